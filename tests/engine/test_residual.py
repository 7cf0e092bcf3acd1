# SPDX-License-Identifier: MIT
"""Experts of a low version and a residual: what the engine computes and reads, and what the verbs say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from conftest import RunPyhobbit
from gguf import GGUFReader

from pyhobbit import CacheConfig, Engine, EngineConfig, SamplingConfig
from pyhobbit.cli.main import main
from pyhobbit.convert.options import Options
from pyhobbit.convert.pipeline import convert
from pyhobbit.model.file_names import calibration_path
from pyhobbit.quality.evaluate import Evaluator, compare
from pyhobbit.quality.fit import CacheModel
from pyhobbit.routing.trace import Simulation, read_trace, simulate
from pyhobbit.settings.config import EvaluationConfig

pytestmark = pytest.mark.model

HELD_OUT = models.TINY / "heldout.txt"
N_EXPERTS = 6 * 8
PART_BYTES = 3 * 256 * 256 * 9 // 16  # bytes of an expert in q4_0: whole blocks of the disk
EVERYTHING = 64_000_000
N_CTX = 128


def opened(path: Path, one_by_one: bool = False, strict: bool = True, **cache: Any) -> Evaluator:
    config = CacheConfig(**{"pools": EVERYTHING, "prefetch": 0, **cache})
    engine = EngineConfig(config, n_ctx=N_CTX, n_threads=1)
    return Evaluator(path, EvaluationConfig(engine, strict=strict, one_by_one=one_by_one))


def logits(path: Path, **options: Any) -> np.ndarray:
    """Everything in high precision: float32 [n, n_vocab]."""
    with opened(path, **options) as evaluator:
        chunks = evaluator.chunks(HELD_OUT.read_text(encoding="utf-8"), 2)
        found = evaluator.reference(chunks)
        return found.reshape(-1, found.shape[-1])


@pytest.fixture(scope="module")
def parts() -> Path:
    return models.tiny_residual("q4_0", "q4_0")


@pytest.fixture(scope="module")
def high(parts: Path) -> np.ndarray:
    return logits(parts)


#
# the engine
#


def test_a_residual_of_nothing_changes_no_bit(tmp_path: Path) -> None:
    """Weights that q4_0 holds exactly lack nothing: the sum is the product of the low version alone."""
    source = models.tiny_f32_experts("q4_0")
    both = convert(Options(source, low="q4_0", high="residual:q4_0", output=tmp_path / "m.gguf"))
    found = {each.name: each.data for each in GGUFReader(both).tensors}
    wanted = {each.name: each.data for each in GGUFReader(models.tiny_experts("q4_0")).tensors}
    np.testing.assert_array_equal(found["blk.3.ffn_up_exps.weight"], wanted["blk.3.ffn_up_exps.weight"])
    np.testing.assert_array_equal(logits(both), logits(models.tiny_experts("q4_0")))


@pytest.mark.parametrize("one_by_one", [False, True])
def test_both_parts_add_up_alike_however_they_come(parts: Path, one_by_one: bool) -> None:
    wanted = logits(parts, one_by_one=one_by_one)
    for pools in (8, 20):
        found = logits(parts, one_by_one=one_by_one, pools=pools * PART_BYTES)
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("pools", [EVERYTHING, 16 * PART_BYTES])
def test_a_sidecar_computes_what_one_file_does(high: np.ndarray, pools: int) -> None:
    beside = models.tiny_residual_sidecar("f16", "q4_0", "q4_0")
    np.testing.assert_array_equal(logits(beside, pools=pools), high)


def mean_kl(wanted: np.ndarray, found: np.ndarray) -> float:
    any_targets = np.zeros(len(wanted), int)
    return float(compare(wanted, found, any_targets).divergence.mean())


def test_two_parts_are_as_good_as_eight_bits(high: np.ndarray) -> None:
    wanted = logits(models.tiny())
    eight = mean_kl(wanted, logits(models.tiny_experts("q8_0")))
    four = mean_kl(wanted, logits(models.tiny_experts("q4_0")))
    both = mean_kl(wanted, high)
    assert both < 1.5 * eight
    assert both < 0.2 * four


@pytest.mark.parametrize(("low", "residual"), [("q2_k", "q3_k"), ("q4_k", "q5_0"), ("iq3_s", "q4_0")])
def test_types_may_differ(low: str, residual: str) -> None:
    wanted = logits(models.tiny())
    found = logits(models.tiny_residual(low, residual))
    alone = mean_kl(wanted, logits(models.tiny_experts(low)))
    assert mean_kl(wanted, found) < 0.6 * alone


def test_going_up_reads_the_residuals_alone(parts: Path) -> None:
    engine = EngineConfig(CacheConfig(pools=EVERYTHING, prefetch=0), n_ctx=N_CTX, n_threads=1)
    with Evaluator(parts, EvaluationConfig(engine, rule="random")) as evaluator:
        chunks = evaluator.chunks(HELD_OUT.read_text(encoding="utf-8"), 2)
        shape = (len(chunks), N_CTX - 1 - N_CTX // 2, evaluator.reference(chunks[:0]).shape[-1])
        low = evaluator.measure(chunks, 0.0, 1.0, np.zeros(shape, np.float32))
        assert low.share_low == 1
        of_low = evaluator.stats.bytes_read
        evaluator.reference(chunks)
        assert evaluator.stats.bytes_read == 2 * of_low <= 2 * N_EXPERTS * PART_BYTES
        evaluator.measure(chunks, 0.0, 1.0, np.zeros(shape, np.float32))
        assert evaluator.stats.bytes_read == 2 * of_low


def test_an_expert_in_high_precision_is_both_parts(parts: Path) -> None:
    with opened(parts) as evaluator:
        assert evaluator.expert_bytes == (2 * PART_BYTES, PART_BYTES)
        assert evaluator.info.high_is_residual
        assert evaluator.info.tier_bytes_high == evaluator.info.tier_bytes_low == N_EXPERTS * PART_BYTES


@pytest.mark.parametrize(
    ("policy", "t1", "t2", "pools"),
    [("lru", 1.0, 1.0, 40), ("hobbit", 0.0, 1.0, 40), ("echo", 0.6, 0.9, 30), ("lfu", 0.0, 1.0, 60)],
)
def test_a_replay_counts_what_the_engine_read(
    parts: Path, tmp_path: Path, policy: str, t1: float, t2: float, pools: int
) -> None:
    trace_file = tmp_path / "t.csv"
    cache = CacheConfig(pools=pools * PART_BYTES, t1=t1, t2=t2, policy=policy, prefetch=0, trace=trace_file)
    with Engine(parts, EngineConfig(cache=cache)) as engine:
        pieces = engine.generate("def read_file(path):", max_tokens=16, sampling=SamplingConfig(temp=0))
        next(pieces)
        prompt = engine.stats().cache
        assert sum(1 for _ in pieces) == 15
        total, info = engine.stats().cache, engine.info()
    assert info.pool_slots_high <= info.pool_slots_low
    replay = Simulation(
        info.n_layers,
        info.n_experts,
        info.n_experts_used,
        info.pool_slots_high,
        info.pool_slots_low,
        policy,
        floors=True,
        residual=True,
        t1=t1,
        t2=t2,
        bits_high=4.5,
        bits_low=4.5,
    )
    result = simulate(read_trace(trace_file).routes, replay)
    for name in ("hits_high", "misses_high", "hits_low", "misses_low"):
        assert getattr(result, name) == getattr(total, name) - getattr(prompt, name), name
    assert result.loads_high > 0
    n_loads = result.loads_high + result.loads_low
    assert total.bytes_read - prompt.bytes_read == n_loads * PART_BYTES


def test_a_damaged_pair_is_refused(parts: Path, tmp_path: Path, run_pyhobbit: RunPyhobbit) -> None:
    path = tmp_path / "m.gguf"
    data = bytearray(parts.read_bytes())
    at = data.index(b"hobbit.tier.high.of") + len("hobbit.tier.high.of") + 4 + 8
    data[at : at + 3] = b"mid"
    path.write_bytes(data)
    done = run_pyhobbit("chat", path, "-p", "x", "-n", 1)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("pyhobbit: error: ")


#
# the verbs
#


def inspected(path: Path, capsys: pytest.CaptureFixture[str], *options: object) -> str:
    assert main(["inspect", str(path), "--no-speed", *map(str, options)]) == 0
    return capsys.readouterr().out


def test_inspect_says_what_is_stored_where(parts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = inspected(parts, capsys, "--pools", 30 * PART_BYTES)
    assert "tier low and a residual of 5.1 MiB in q4_0: 4.50 + 4.50 = 9.00 bits per weight" in text
    assert "216.0 KiB per expert; going from low to high reads 108.0 KiB" in text
    assert "5.1 MiB in q4_0, 4.50 bits per weight, 108.0 KiB per expert" in text
    assert "low pool      1.6 MiB: 15 of 48 experts" in text
    assert "residual pool 1.6 MiB: 15 of 48 experts" in text
    assert "on disk       7.0 MiB of experts in high precision" in text
    assert "unused" not in text


def test_inspect_says_what_a_sidecar_replaces(capsys: pytest.CaptureFixture[str]) -> None:
    text = inspected(models.tiny_residual_sidecar("f16", "q4_0", "q4_0"), capsys)
    assert "in q4_0, in tiny-f16.hobbit.gguf: 4.50 + 4.50" in text
    assert "108.0 KiB per expert, in tiny-f16.hobbit.gguf" in text
    assert "unused        18.0 MiB of experts in the model itself, which the tiers replace" in text


def test_inspect_as_json(parts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(inspected(parts, capsys, "--json"))
    high, low = document["model"]["tiers"]
    assert (high["residual_on"], low["residual_on"]) == ("low", None)
    assert document["memory"]["info"]["high_is_residual"] is True


def test_inspect_estimates_the_speed(parts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(parts), "--threads", "1", "--pools", str(30 * PART_BYTES)]) == 0
    assert "token/s, estimated with a warm cache" in capsys.readouterr().out


def test_config_counts_residuals(parts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", str(parts), "--pools", str(40 * PART_BYTES), "--t1", "0.5"]) == 0
    text = capsys.readouterr().out
    assert "room for residuals of 16 of 48 experts" in text
    assert "room for 24 of 48 experts" in text
    assert "2 - t1 slots for each of the high pool" in text


def test_statistics_name_the_parts(parts: Path) -> None:
    with Engine(parts, EngineConfig(cache=CacheConfig(pools=40 * PART_BYTES))) as engine:
        "".join(piece.text for piece in engine.generate("def f(", max_tokens=4))
        stats = engine.stats()
    assert stats.as_dict()["high_is_residual"] is True
    assert "residual 20 of 48 (2.1 MiB), " in stats.summary()
    assert "low 20 of 48 (2.1 MiB), " in stats.summary()
    assert stats.info.expert_bytes == 2 * N_EXPERTS * PART_BYTES


def test_calibration_fits_the_split_of_parts(parts: Path, tmp_path: Path, run_pyhobbit: RunPyhobbit) -> None:
    model = tmp_path / "m.gguf"
    shutil.copyfile(parts, model)
    arguments = ("--text", HELD_OUT, "--ctx", 64, "--chunks", 4, "--threads", 1, "--max-kl", 0.01, "--json")
    done = run_pyhobbit("calibrate", model, *arguments)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["quality"]["mean_kl"] <= 0.01
    assert found["high_bytes_per_token"] == 6 * 2 * 2 * PART_BYTES
    assert found["calibration"]["residual_bytes"] == N_EXPERTS * PART_BYTES
    assert 0.4 <= found["calibration"]["low_share"] <= 0.9
    keys = GGUFReader(calibration_path(model)).fields
    assert keys["hobbit.high_bytes"].contents() == N_EXPERTS * PART_BYTES
    with Engine(model, EngineConfig(cache=CacheConfig(pools=40 * PART_BYTES))) as engine:
        info = engine.info()
    assert (info.t1, info.t2) == (found["quality"]["t1"], found["quality"]["t2"])
    assert info.pool_slots_low == int(40 * found["calibration"]["low_share"])
    shutil.copyfile(models.tiny_residual("q4_0", "q5_0"), model)
    done = run_pyhobbit("chat", model, "-p", "x", "-n", 1)
    assert done.returncode == 1
    assert "made for another version" in done.stderr


@pytest.mark.parametrize(
    ("capacity", "low_share", "slots"), [(0.5, 0.5, (50, 50)), (0.5, 0.8, (20, 80)), (0.5, 0.1, (50, 50))]
)
def test_slots_of_parts(capacity: float, low_share: float, slots: tuple[int, int]) -> None:
    model = CacheModel(n_layers=10, n_experts=10, n_used=2, low_cost=0.5, t1=1.0, t2=1.0, residual=True)
    assert model.uses_low
    assert model.slots(capacity, low_share) == slots
