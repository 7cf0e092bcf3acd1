# SPDX-License-Identifier: MIT
"""A file without half of its high versions, from its calibration to its logits."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import models
import numpy as np
import pytest
from conftest import RunPyhobbit

from pyhobbit.engine.engine import Engine
from pyhobbit.model.file_names import calibration_path
from pyhobbit.model.gguf_file import read_gguf
from pyhobbit.quality.evaluate import Costs, Evaluator
from pyhobbit.settings.config import CacheConfig, EngineConfig, SamplingConfig

HELDOUT = Path(__file__).resolve().parents[2] / "tiny_moe/heldout.txt"
N_LAYERS, N_EXPERTS = 6, 8
GREEDY = SamplingConfig(temp=0)
ALL = 64_000_000  # pools for all experts


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, run_pyhobbit: RunPyhobbit) -> tuple[Path, Path]:
    """The tiny model with two tiers, calibrated by expert, and without half of its high versions."""
    full = tmp_path_factory.mktemp("partial") / "m.gguf"
    shutil.copyfile(models.tiny_tiers("f16", "q4_0"), full)
    quick = ("--set", "rule=edgemoe", "--chunks", 4, "--ctx", 64, "--threads", 1)
    done = run_pyhobbit("calibrate", full, "--text", HELDOUT, *quick)
    assert done.returncode == 0, done.stderr
    done = run_pyhobbit("convert", "--set", "drop_high=0.5", full)
    assert done.returncode == 0, done.stderr
    assert "24 of 48 experts have a high version" in done.stderr
    return full, full.with_name("m-partial.gguf")


def present(path: Path) -> np.ndarray:
    """True for experts with a high version: bool [n_layers, n_experts]."""
    keys, found = read_gguf(path).metadata, np.zeros((N_LAYERS, N_EXPERTS), bool)
    for layer in range(N_LAYERS):
        key = f"hobbit.tier.high.blk.{layer}.ffn_up_exps.0.experts"
        found[layer, keys[key].value() if key in keys else []] = True
    return found


def evaluation(pools: int = ALL) -> EngineConfig:
    return EngineConfig(CacheConfig(pools=pools), n_ctx=64, n_threads=1)


def test_what_low_precision_hurts_least_is_dropped(files: tuple[Path, Path]) -> None:
    full, partial = files
    divergences = read_gguf(calibration_path(full)).metadata["hobbit.low_costs"].value()
    kept = present(partial)
    assert kept.sum() == 24
    values = np.reshape(divergences, kept.shape)
    assert values[~kept].max() <= values[kept].min()


def test_the_logits_are_those_of_the_full_file_with_the_same_experts_low(files: tuple[Path, Path]) -> None:
    full, partial = files
    never = (math.inf,) * (N_LAYERS * N_EXPERTS)
    costs = Costs(tuple(np.where(present(partial), math.inf, 0.0).ravel().tolist()), never)
    with Evaluator(full, evaluation(), "edgemoe") as evaluator:
        chunks = evaluator.chunks(HELDOUT.read_text(encoding="utf-8"))[:3]
        high = evaluator.reference(chunks)
        evaluator.set_costs(costs)
        evaluator._session.cache.set(price=1.0)
        wanted = np.stack([evaluator._scored_logits(chunk).copy() for chunk in chunks])
    assert not np.array_equal(wanted, high)
    for pools in (ALL, 3_000_000):  # the smaller ones evict
        with Evaluator(partial, evaluation(pools), "edgemoe") as evaluator:
            np.testing.assert_array_equal(evaluator.reference(chunks), wanted)
            counted = evaluator.stats
            assert counted.selections_low > 0
            assert counted.selections_high > 0
            assert (counted.evictions > 0) == (pools < ALL)


def test_text_is_generated_and_the_pools_know_what_there_is(files: tuple[Path, Path]) -> None:
    full, partial = files
    answers = {}
    for pools in (ALL, 3_000_000):
        with Engine(partial, EngineConfig(CacheConfig(pools=pools, prefetch=2), n_threads=1)) as engine:
            answers[pools] = "".join(piece.text for piece in engine.generate("The ", 24, GREEDY))
            info, stats = engine.info(), engine.stats().cache
        assert info.n_absent_high == 24
        assert stats.selections_low > 0
    assert answers[ALL] == answers[3_000_000]
    with Engine(partial, EngineConfig(CacheConfig(pools=ALL), n_threads=1)) as engine:
        info = engine.info()
        assert (info.pool_slots_high, info.pool_slots_low) == (24, 48)
    with Engine(full, EngineConfig(CacheConfig(pools=ALL), n_threads=1)) as engine:
        before = engine.info()
    assert before.n_absent_high == 0
    assert info.mean_expert_bytes == before.mean_expert_bytes
    assert info.tier_bytes_high * 2 == before.tier_bytes_high
    assert info.expert_bytes == info.tier_bytes_high + info.tier_bytes_low // 2


def test_it_can_be_looked_at_and_calibrated_again(
    files: tuple[Path, Path], run_pyhobbit: RunPyhobbit, tmp_path: Path
) -> None:
    partial = tmp_path / "m.gguf"
    shutil.copyfile(files[1], partial)
    done = run_pyhobbit("inspect", partial, "--no-speed")
    assert done.returncode == 0, done.stderr
    assert "24 of 48 experts have no high version" in done.stdout
    quick = ("--chunks", 4, "--ctx", 64, "--threads", 1, "--max-kl", 0.02, "--json")
    done = run_pyhobbit("calibrate", partial, "--text", HELDOUT, *quick)
    assert done.returncode == 0, done.stderr
    quality = json.loads(done.stdout)["quality"]
    assert 0 <= quality["mean_kl"] <= 0.02
    assert quality["share_low"] > 0
    done = run_pyhobbit("chat", partial, "-p", "The ", "-n", 8)
    assert done.returncode == 0, done.stderr
