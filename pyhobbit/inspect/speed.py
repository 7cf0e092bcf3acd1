# SPDX-License-Identifier: MIT
"""How fast a model would generate on this machine: an estimate from some seconds of measurement."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, pairwise
from pathlib import Path

import numpy as np

from pyhobbit._tables import Latency
from pyhobbit.engine.engine import Engine, Piece
from pyhobbit.engine.placement import PROMPTS, TEXT_TOKENS
from pyhobbit.engine.plan import MemoryPlan
from pyhobbit.engine.stats import Stats
from pyhobbit.errors import HobbitError
from pyhobbit.model.model_file import ModelFile
from pyhobbit.native.machine import Disk, measure_disk
from pyhobbit.settings.config import EngineConfig, SamplingConfig
from pyhobbit.settings.table import default

_SAMPLE_SECONDS, _MOST_SECONDS = 4.0, 40.0  # the latter where a device is being filled
_MIN_TOKENS = 4


@dataclass(frozen=True)
class Warm:
    """Decoding with full pools, per token. hits: shares of the high and of the low pool."""

    hits: tuple[float, float]
    wait_s: float
    read_bytes: float


@dataclass(frozen=True)
class Sample:
    """Decoding some tokens, from a cold cache. compute_s: of a token, the median, waits left out.

    wait_s_per_byte: that computing waited, by bytes read; 0 where nothing was.  mix: shares of the selections
    in high precision, in low, and skipped.  warm: the second half; None where pools were not full by then.
    latencies: see Engine.latencies(); of runs on a GPU.  link_bytes_per_s: of uploads to devices; 0: none.
    """

    n_tokens: int
    compute_s: float
    wait_s_per_byte: float
    mix: tuple[float, float, float]
    warm: Warm | None
    latencies: tuple[Latency, ...] = ()
    link_bytes_per_s: float = 0.0


@dataclass(frozen=True)
class Speed:
    """The estimate for decoding with a warm cache, per token. hits: assumed, of the high and the low pool.

    source: what the hits were taken from: "all" (the pools hold every expert), "sample" or "even"
     (as if a text used all experts alike, which is the worst case).
    """

    compute_s: float
    wait_s: float
    read_bytes: float
    hits: tuple[float, float]
    source: str
    disk: Disk | None
    sample: Sample

    @property
    def tokens_per_second(self) -> float:
        return 1 / (self.compute_s + self.wait_s)


def disk_speed(model: ModelFile, io_threads: int | None) -> Disk:
    """The disk's speed for reads like the cache's. Raises HobbitError."""
    best = model.tiers[0]
    return measure_disk(best.path, best.part_bytes, io_threads or default("io_threads"))


def measure(model: ModelFile, config: EngineConfig, plan: MemoryPlan) -> Speed:
    """Estimates a planned model's speed by running some of it. Raises HobbitError, KeyboardInterrupt."""
    disk = None
    if plan.info.cached:  # the plan is the cache's, whatever is faster
        disk = disk_speed(model, config.cache.io_threads)
        config = replace(config, cache=replace(config.cache, placement="cache"))
    return estimate(plan, measure_sample(model.path, config), disk)


# --- measuring


def measure_sample(path: Path, config: EngineConfig, seconds: float = _SAMPLE_SECONDS) -> Sample:
    """Loads the model and decodes for some seconds. Raises HobbitError, KeyboardInterrupt."""
    with Engine(path, config) as engine:
        cached = engine.info().cached
        marks, n_filling = [engine.stats()], 0
        start = time.perf_counter()
        for _ in decode_texts(engine):
            marks.append(engine.stats())
            n_filling += _fills((marks[-2], marks[-1]))
            most = seconds if 2 * n_filling < len(marks) else _MOST_SECONDS
            if time.perf_counter() - start >= most and len(marks) > _MIN_TOKENS:
                break
        latencies = engine.latencies()
    if not cached:
        # The first tokens map the weights; the later ones show how fast it is when they are there.
        compute_s = _compute_s(marks[len(marks) // 2 :])
        return Sample(len(marks) - 1, compute_s, 0.0, (1.0, 0.0, 0.0), None)
    return replace(_cached_sample(marks), latencies=latencies)


def decode_texts(engine: Engine, before: str = "") -> Iterator[Piece]:
    """Tokens without end, of texts that begin alike. Raises HobbitError where answers end at once."""
    n_short = 0  # answers in a row
    for seed, prompt in enumerate(cycle(PROMPTS)):
        n_tokens = 0
        for piece in engine.generate(before + prompt, TEXT_TOKENS, SamplingConfig(seed=seed)):
            n_tokens += piece.token is not None
            yield piece
        n_short = 0 if n_tokens > 1 else n_short + 1
        if n_short == len(PROMPTS):
            raise HobbitError("the model ends every answer at once, so there is no decoding to measure")


def _fills(pair: tuple[Stats, Stats]) -> bool:
    """True if free slots of a device were filled meanwhile: each is once, over a link that may be slow."""
    before, after = (each.cache.bytes_transferred for each in pair)
    return before < after <= pair[1].info.pool_bytes_high + pair[1].info.pool_bytes_low


def _compute_s(marks: Sequence[Stats]) -> float:
    """Seconds of a token without its waits: the median, which a busy machine's hiccups do not change."""
    pairs = [each for each in pairwise(marks) if each[1].decoded_tokens == each[0].decoded_tokens + 1]
    steps = [after.since(before) for before, after in [each for each in pairs if not _fills(each)] or pairs]
    return max(1e-6, float(np.median([step.decode_s - step.cache.stall_s for step in steps])))


def _cached_sample(marks: Sequence[Stats]) -> Sample:
    middle = marks[len(marks) // 2]
    whole, late = marks[-1].since(marks[0]), marks[-1].since(middle)
    cache, found, n_late = whole.cache, whole.cache.rates, late.generated_tokens
    warm, rates = None, late.cache.rates
    if middle.cache.evictions and n_late:
        high, low = (1.0 if rate is None else rate for rate in (rates.hit_rate_high, rates.hit_rate_low))
        warm = Warm((high, low), late.cache.stall_s / n_late, late.cache.bytes_read / n_late)
    return Sample(
        n_tokens=whole.generated_tokens,
        compute_s=_compute_s(marks),
        wait_s_per_byte=cache.stall_s / cache.bytes_read if cache.bytes_read else 0.0,
        mix=(found.high_share or 0.0, found.low_share or 0.0, found.skipped_share or 0.0),
        warm=warm,
        link_bytes_per_s=cache.bytes_transferred / cache.transfer_s if cache.transfer_s else 0.0,
    )


# --- estimating


def estimate(plan: MemoryPlan, sample: Sample, disk: Disk | None) -> Speed:
    """Estimates the speed. disk: None without a cache."""
    low_is_whole = plan.share_low >= 1 or plan.info.pool_slots_low == 0
    if plan.share_high >= 1 and low_is_whole:  # also without a cache
        return Speed(sample.compute_s, 0.0, 0.0, (1.0, 1.0), "all", disk, sample)
    if sample.warm is not None:
        warm = sample.warm
        return Speed(sample.compute_s, warm.wait_s, warm.read_bytes, warm.hits, "sample", disk, sample)
    hits, (high, low, _) = (plan.share_high, plan.share_low), sample.mix
    read_bytes = plan.info.used_bytes(high * (1 - hits[0]), low * (1 - hits[1]))
    wait_s = read_bytes * sample.wait_s_per_byte
    return Speed(sample.compute_s, wait_s, read_bytes, hits, "even", disk, sample)
