# SPDX-License-Identifier: MIT
"""A file with each expert once: its size, its logits, and who refuses it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import models
import numpy as np
import pytest
from conftest import RunPyhobbit

from pyhobbit.engine.engine import Engine
from pyhobbit.model.gguf_file import read_gguf
from pyhobbit.model.model_file import read_model_file
from pyhobbit.quality.evaluate import Evaluator
from pyhobbit.settings.config import CacheConfig, EngineConfig, SamplingConfig

HELDOUT = Path(__file__).resolve().parents[2] / "tiny_moe/heldout.txt"
N_EXPERTS = 48
ALL, FEW = 64_000_000, 3_000_000  # pools for all experts, and such that evict


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, run_pyhobbit: RunPyhobbit) -> tuple[Path, Path]:
    """The tiny model in static widths: with all low versions beside the high ones, and each expert once."""
    full = tmp_path_factory.mktemp("once") / "m.gguf"
    shutil.copyfile(models.tiny_tiers("f16", "q4_0"), full)
    quick = ("--chunks", 4, "--ctx", 64, "--threads", 1, "--max-kl", 0.003)
    done = run_pyhobbit("calibrate", full, "--text", HELDOUT, "--set", "rule=edgemoe", *quick)
    assert done.returncode == 0, done.stderr
    for once in ("false", "true"):
        output = full.with_name(f"{once}.gguf")
        keys = ("--set", "drop_high=limit", "--set", f"once={once}")
        done = run_pyhobbit("convert", *keys, full, "-o", output)
        assert done.returncode == 0, done.stderr
    return full.with_name("false.gguf"), full.with_name("true.gguf")


def logits(path: Path, pools: int = ALL, t1: float = 1.0) -> tuple[np.ndarray, int, int]:
    """The logits of some text, with the selections that were high and low."""
    with Evaluator(path, EngineConfig(CacheConfig(pools=pools), n_ctx=64, n_threads=1)) as evaluator:
        chunks = evaluator.chunks(HELDOUT.read_text(encoding="utf-8"))[:3]
        evaluator._session.cache.set(t1=t1, t2=1.0)
        found = np.stack([evaluator._scored_logits(chunk).copy() for chunk in chunks])
        return found, evaluator.stats.selections_high, evaluator.stats.selections_low


def test_the_file_is_smaller_by_the_low_versions_of_high_experts(files: tuple[Path, Path]) -> None:
    (high, low), (once_high, once_low) = (read_model_file(path).tiers for path in files)
    n_high = N_EXPERTS - high.n_absent
    assert 0 < n_high < N_EXPERTS
    assert (once_high.n_bytes, once_high.n_absent) == (high.n_bytes, high.n_absent)
    assert (once_low.n_bytes, once_low.n_absent) == (low.n_bytes * high.n_absent // N_EXPERTS, n_high)
    saved = files[0].stat().st_size - files[1].stat().st_size
    assert abs(saved - low.n_bytes * n_high // N_EXPERTS) <= 4096 * (1 + len(read_gguf(files[1]).tensors))


def test_the_logits_are_those_of_static_widths(files: tuple[Path, Path]) -> None:
    wanted, *counts = logits(files[0])
    for pools, t1 in ((ALL, 1.0), (FEW, 1.0), (FEW, 0.0), (ALL, 0.5)):
        found, *used = logits(files[1], pools, t1)
        np.testing.assert_array_equal(found, wanted)
        assert used == counts  # whatever the rule asks for


def test_pools_know_what_there_is(files: tuple[Path, Path]) -> None:
    answers = set()
    for pools in (ALL, FEW):
        config = EngineConfig(CacheConfig(pools=pools, prefetch=2), n_threads=1)
        with Engine(files[1], config) as engine:
            answers.add("".join(piece.text for piece in engine.generate("The ", 24, SamplingConfig(temp=0))))
            info, stats = engine.info(), engine.stats().cache
        assert info.n_absent_high + info.n_absent_low == N_EXPERTS
        assert stats.bytes_read > 0
        assert info.expert_bytes == info.tier_bytes_high + info.tier_bytes_low
        if pools == ALL:
            assert (info.pool_slots_high, info.pool_slots_low) == (info.n_absent_low, info.n_absent_high)
            assert stats.bytes_read <= info.expert_bytes
    assert len(answers) == 1
    for path, more in ((files[0], True), (files[1], False)):
        with Engine(path, EngineConfig(CacheConfig(pools=ALL), n_threads=1)) as engine:
            info = engine.info()
            assert (info.pool_slots_high + info.pool_slots_low > N_EXPERTS) == more


def test_stock_refuses_it(files: tuple[Path, Path]) -> None:
    program = models.stock_dir() / "llama-perplexity"
    command = [program, "-m", files[1], "-f", HELDOUT, "-c", "64", "--chunks", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert re.search(r"tensor 'blk\.0\.ffn_\w+_exps\.weight' not found", done.stderr)


def test_the_verbs_run_on_it(files: tuple[Path, Path], run_pyhobbit: RunPyhobbit, tmp_path: Path) -> None:
    once = tmp_path / "m.gguf"
    shutil.copyfile(files[1], once)
    tiers = {tier.name: tier for tier in read_model_file(once).tiers}
    done = run_pyhobbit("inspect", once, "--no-speed")
    assert done.returncode == 0, done.stderr
    for tier in tiers.values():
        assert f"{tier.n_absent} of 48 experts have no {tier.name} version" in done.stdout
    assert "8 per layer, 2 used per token" in done.stdout
    assert "precision     the best that each expert has" in done.stdout
    assert "pyhobbit calibrate" not in done.stdout
    done = run_pyhobbit("calibrate", once, "--text", HELDOUT, "--chunks", 4, "--ctx", 64)
    assert done.returncode != 0
    assert "has each expert once: calibrate the model that it was made from" in done.stderr
    done = run_pyhobbit("chat", once, "-p", "The ", "-n", 8)
    assert done.returncode == 0, done.stderr
    assert "mixed precision" not in done.stderr
    done = run_pyhobbit("convert", once, "-o", tmp_path / "again.gguf")
    assert done.returncode != 0
    assert "already has tiers: convert the model that it was made from" in done.stderr
    done = run_pyhobbit("convert", "--set", "drop_high=0.5", once)
    assert done.returncode != 0
    assert "drop_high needs two complete tiers" in done.stderr


def test_once_needs_to_know_whose_high_version_stays(run_pyhobbit: RunPyhobbit) -> None:
    done = run_pyhobbit("convert", "--set", "once=true", models.tiny())
    assert done.returncode != 0
    assert "once goes with drop_high" in done.stderr
