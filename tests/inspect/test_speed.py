# SPDX-License-Identifier: MIT
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyhobbit._tables import COUNTERS
from pyhobbit.engine.engine import Piece
from pyhobbit.engine.plan import MemoryPlan
from pyhobbit.engine.stats import CacheStats, ModelInfo, Stats
from pyhobbit.errors import HobbitError
from pyhobbit.inspect.advice import advice, memory_rows, speed_rows
from pyhobbit.inspect.speed import (
    Sample,
    Speed,
    Warm,
    decode_texts,
    estimate,
    measure_sample,
)
from pyhobbit.model.file_names import calibration_path
from pyhobbit.native.machine import Disk, measure_disk
from pyhobbit.quality.stored import low_tier_text
from pyhobbit.settings.config import CacheConfig, EngineConfig

_GIB = 1 << 30

# 10 layers of 100 experts, 4 used, 1 MiB each in high and 0.5 MiB in low precision; room for 40 % and 20 %
PLAN = MemoryPlan(
    info=ModelInfo(
        model="m.gguf",
        description="",
        n_ctx=4096,
        n_threads=1,
        cached=True,
        has_experts=True,
        n_layers=10,
        n_experts=100,
        n_experts_used=4,
        n_all_experts=1000,
        n_tiers=2,
        tier_bytes_high=1000 << 20,
        tier_bytes_low=500 << 20,
        token_bytes_high=40 << 20,
        token_bytes_low=20 << 20,
        pool_bytes_high=400 << 20,
        pool_bytes_low=100 << 20,
        pool_slots_high=400,
        pool_slots_low=200,
        t1=0.6,
        t2=0.9,
        direct_io=True,
    ),
    available=8 * _GIB,
    process=50 << 20,
    weights=1 * _GIB,
    context=64 << 20,
    compute=32 << 20,
    n_batch=512,
)
SAMPLE = Sample(n_tokens=20, compute_s=0.05, wait_s_per_byte=1e-9, mix=(0.5, 0.3, 0.2), warm=None)
DISK = Disk(0.8e9, 1 << 20, 4, direct=True)
MAPPED = Disk(5e8, 128 << 10, 2, True)


def _plan(**info: object) -> MemoryPlan:
    return replace(PLAN, info=replace(PLAN.info, **info))


def test_without_better_knowledge_experts_are_used_alike() -> None:
    found = estimate(PLAN, SAMPLE, DISK)
    assert (found.source, found.hits) == ("even", (0.4, 0.2))
    # 40 selections a token: half of them high at 60 % misses, 30 % low at 80 %
    assert found.read_bytes == pytest.approx(40 * (0.5 * 0.6 * (1 << 20) + 0.3 * 0.8 * (1 << 19)))
    assert found.wait_s == pytest.approx(found.read_bytes * 1e-9)
    assert found.tokens_per_second == pytest.approx(1 / (0.05 + found.wait_s))


def test_hits_come_from_what_knows_best() -> None:
    sampled = replace(SAMPLE, warm=Warm((0.7, 0.6), 0.03, 9e6))
    warm = estimate(PLAN, sampled, DISK)
    assert (warm.hits, warm.wait_s, warm.read_bytes) == ((0.7, 0.6), 0.03, 9e6)
    whole = estimate(_plan(pool_slots_high=1000, pool_slots_low=0), sampled, DISK)
    assert (whole.source, whole.wait_s, whole.tokens_per_second) == ("all", 0, 20)
    stock = estimate(_plan(cached=False, pool_slots_low=0), SAMPLE, None)
    assert (stock.source, stock.read_bytes) == ("all", 0)


def _read_so_far() -> int:
    """Bytes that all reads of this process have returned, by the kernel's count."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


@pytest.mark.parametrize(("n_bytes", "read_bytes"), [(1 << 20, 303104), (100_000, 98304)])
def test_the_disk_is_measured_on_the_file(tmp_path: Path, n_bytes: int, read_bytes: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(n_bytes))
    start, before = time.monotonic(), _read_so_far()
    disk = measure_disk(path, 300_000, 2, seconds=0.05)
    n_read, elapsed = _read_so_far() - before, time.monotonic() - start
    assert disk.read_bytes == read_bytes
    beside = 65536  # the process's other reads
    assert 2 * read_bytes <= n_read + beside
    assert (n_read - beside) / elapsed <= disk.bytes_per_s <= n_read / 0.05


def test_a_sample_of_the_tiny_model(tiny_gguf: Path) -> None:
    small = EngineConfig(cache=CacheConfig(pools=4 << 20, prefetch=0), n_threads=1)
    sample = measure_sample(tiny_gguf, small, seconds=0.5)
    assert sample.n_tokens >= 4
    assert 0 < sample.compute_s < 60
    assert sample.wait_s_per_byte > 0
    assert sample.mix == (1.0, 0.0, 0.0)
    assert sample.warm is not None
    assert 0 < sample.warm.hits[0] < 1
    assert sample.warm.read_bytes > 0


class _ToldEngine:
    """Stands for an Engine: its statistics are these marks, one after each token."""

    def __init__(self, marks: list[Stats]) -> None:
        self._marks = iter(marks)

    def __call__(self, *_: object) -> "_ToldEngine":
        return self

    def __enter__(self) -> "_ToldEngine":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def info(self) -> ModelInfo:
        return PLAN.info

    def stats(self) -> Stats:
        return next(self._marks)

    def generate(self, *_: object) -> Iterator[Piece]:
        yield from [Piece("a", 1, 0.0)] * 48

    def latencies(self) -> tuple[()]:
        return ()


def _mark(n: int, decoded: int, decode_s: float, **counters: float) -> Stats:
    """The statistics after n tokens."""
    zeros = {each.name: 0 for each in COUNTERS}
    cache = CacheStats(**{**zeros, **counters})
    times = {"generated_tokens": n, "decoded_tokens": decoded, "decode_s": decode_s}
    return Stats(PLAN.info, cache, load_s=1.0, peak_rss_bytes=1, **times)


@pytest.mark.parametrize("evictions", [0, 1])
def test_a_sample_is_computed_from_the_counters(evictions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens, of which the first follows a prompt. Pools are full where the first half evicted."""
    marks = [
        _mark(0, 0, 0.0),
        _mark(1, 0, 0.0, stall_s=0.02, bytes_read=2e6),
        _mark(2, 1, 0.3, stall_s=0.12, bytes_read=12e6, hits_high=2, misses_high=4, evictions=evictions),
        _mark(3, 2, 0.5, stall_s=0.17, bytes_read=17e6, hits_high=3, misses_high=5, evictions=9),
        _mark(
            4, 3, 1.4, stall_s=0.27, bytes_read=27e6, hits_high=5, misses_high=5, hits_low=1, misses_low=3,
            evictions=9, selections_high=12, selections_low=6, selections_skipped=2,
        ),
    ]  # fmt: skip
    monkeypatch.setattr("pyhobbit.inspect.speed.Engine", _ToldEngine(marks))
    sample = measure_sample(Path("m.gguf"), EngineConfig(), seconds=0)
    assert sample.n_tokens == 4
    assert sample.compute_s == pytest.approx(0.2)  # median of 0.2, 0.15 and 0.8, less the waits
    assert sample.wait_s_per_byte == pytest.approx(0.27 / 27e6)
    assert sample.mix == pytest.approx((0.6, 0.3, 0.1))
    if evictions == 0:
        assert sample.warm is None
        return
    assert sample.warm is not None
    assert sample.warm.hits == pytest.approx((0.75, 0.25))
    assert (sample.warm.wait_s, sample.warm.read_bytes) == pytest.approx((0.15 / 2, 15e6 / 2))


@pytest.mark.parametrize("is_filling", [False, True])
def test_the_filling_of_a_device_is_not_a_tokens_time(
    is_filling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of a second while free slots of 500 MiB are filled, and of 0.1 s otherwise."""
    sent, spent, marks = 0, 0.0, [_mark(0, 0, 0.0)]
    for n in range(1, 40):
        is_uploading = is_filling or (n < 10 and n != 5)
        sent = min(500 << 20, sent + (10 << 20)) if is_uploading else sent + (n >= 20) * (500 << 20)
        spent += 1.0 if is_uploading else 0.1
        counters = {"bytes_transferred": sent, "transfer_s": sent / 5e7}
        marks.append(_mark(n, n, spent, **counters))
    monkeypatch.setattr("pyhobbit.inspect.speed.Engine", _ToldEngine(marks))
    times = iter(range(0, 1000, 2))
    monkeypatch.setattr("pyhobbit.inspect.speed.time.perf_counter", lambda: next(times))
    sample = measure_sample(Path("m.gguf"), EngineConfig(), seconds=0)
    assert sample.compute_s == pytest.approx(1.0 if is_filling else 0.1)
    assert sample.n_tokens == (20 if is_filling else 16)  # 40 seconds, or until half of them are steady
    assert sample.link_bytes_per_s == pytest.approx(5e7)
    rows = speed_rows(PLAN, replace(estimate(PLAN, SAMPLE, DISK), sample=sample))
    assert rows["link"] == "47.7 MiB/s, 10.5 s to fill 500.0 MiB"


#
# text for people
#


def _speed(**changes: object) -> Speed:
    return replace(estimate(PLAN, SAMPLE, DISK), **changes)


def test_the_rows_name_sizes_and_the_assumption() -> None:
    rows = memory_rows(PLAN)
    assert rows["high pool"].startswith("400.0 MiB: 400 of 1000 experts, 40%")
    assert rows["low pool"].startswith("100.0 MiB: 200 of 1000 experts, 20%")
    assert rows["on disk"].startswith("600.0 MiB")
    assert "4096 tokens" in rows["context"]
    assert "the whole model fits, so it runs as in" in memory_rows(_plan(cached=False))["memory"]
    rows = speed_rows(PLAN, _speed())
    assert "estimated with" in rows["speed"]
    assert rows["hits"].startswith("40% high, 20% low: assumed: all experts are used equally")
    assert rows["disk"].startswith("762.9 MiB/s by 4 direct reads at a time of 1.0 MiB; 16.8 MiB to read")


def _advice(
    plan: MemoryPlan, speed: Speed | None, cache: CacheConfig | None = None, may_add_low: bool = True
) -> str:
    return "\n".join(advice(plan, speed, cache or CacheConfig(), calibrated=False, may_add_low=may_add_low))


def test_advice_is_about_what_takes_the_time() -> None:
    slow = _speed(wait_s=0.2)
    assert "600.0 MiB more memory would hold every expert, for 20 token/s" in _advice(PLAN, slow)
    assert "a disk twice as fast would give 6.67 token/s" in _advice(PLAN, slow)
    fast = replace(slow, compute_s=slow.compute_s / 1e4, wait_s=slow.wait_s / 1e4)
    assert "a disk twice as fast would give 66667 token/s" in _advice(PLAN, fast)
    assert "pyhobbit calibrate m.gguf --text FILE" in _advice(PLAN, slow)
    assert "raise --memory" in _advice(PLAN, slow, CacheConfig(memory=2 * _GIB))
    assert "raise --memory" not in _advice(PLAN, slow)
    assert "pyhobbit convert --sidecar m.gguf" in _advice(_plan(n_tiers=1), slow)
    assert "low tier" not in _advice(_plan(n_tiers=1), slow, may_add_low=False)
    assert "refuses direct I/O" in _advice(_plan(direct_io=False), slow)
    fast = _advice(PLAN, _speed(wait_s=0.001))
    assert "computing takes nearly all the time" in fast
    assert "memory would hold" not in fast


def test_a_low_tier_that_lies_idle_is_mentioned_once(tmp_path: Path) -> None:
    model = tmp_path / "my model.gguf"
    idle, cache = _plan(t1=1.0, t2=1.0, pool_slots_low=0, model=str(model)), CacheConfig()
    for speed in (_speed(wait_s=0.2), _speed(wait_s=0.001), None):
        assert _advice(idle, speed).count("the low tier is not used: start with --quality small-loss") == 1
    assert low_tier_text(model, replace(idle.info, precision="price 0.1"), CacheConfig(price=0.1)) is None
    assert low_tier_text(model, replace(idle.info, n_tiers=1), cache) is None
    assert low_tier_text(model, replace(idle.info, pool_bytes_high=1000 << 20), cache) is None  # all fits
    assert low_tier_text(model, idle.info, CacheConfig(t1=1.0)) is None  # asked for
    calibration_path(model).touch()
    assert low_tier_text(model, idle.info, cache) is None


@pytest.mark.parametrize("n_tokens", [0, 1])
def test_a_model_that_ends_every_answer_at_once_cannot_be_measured(n_tokens: int) -> None:
    def generate(_prompt: str, *_: object) -> Iterator[Piece]:
        yield from [Piece("a", 1, 0.0)] * n_tokens
        yield Piece("", None, 0.0, "stop")

    engine: Any = SimpleNamespace(generate=generate)
    with pytest.raises(HobbitError, match="ends every answer at once"):
        list(islice(decode_texts(engine), 100))


def test_texts_follow_each_other_where_one_has_two_tokens() -> None:
    texts = cycle([1, 1, 2])
    engine: Any = SimpleNamespace(generate=lambda *_: [Piece("a", 1, 0.0)] * next(texts))
    assert len(list(islice(decode_texts(engine), 100))) == 100
