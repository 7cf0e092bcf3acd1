# SPDX-License-Identifier: MIT
"""Runs of the tiny model in a paper's configuration: counters and routes."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import logits
import models
import numpy as np
import pytest
from exactness import SHORT_PLANS

from pyhobbit import CacheConfig, Engine, EngineConfig, SamplingConfig
from pyhobbit.errors import HobbitError
from pyhobbit.model.file_names import calibration_path
from pyhobbit.quality.stored import Calibration
from pyhobbit.routing.trace import Simulation, SimulationResult, Trace, read_trace, simulate
from pyhobbit.settings.config import parse_size
from pyhobbit.settings.papers import settings_of

PROMPT = "def read_file(path):\n"
N_LAYERS, N_EXPERTS, N_USED, N_TOKENS = 6, 8, 2, 32
ALONE: dict[str, Any] = {"prefetch": 0}  # so that the policy alone decides what is resident
USES = tuple(int(n) for n in np.random.default_rng(3).permutation(N_LAYERS * N_EXPERTS) + 1)
COUNTED = ("hits_high", "misses_high", "hits_low", "misses_low")


class PaperRun:
    """An answer's decoded tokens: counters of the prompt and of all, and the trace."""

    def __init__(self, model: Path, trace: Path, pools: str, **settings: Any) -> None:
        settings = {name: value for name, value in settings.items() if name != "mode"}  # needs a GPU
        cache = CacheConfig(pools=parse_size(pools), trace=trace, **settings)
        with Engine(model, EngineConfig(cache, n_ctx=256)) as engine:
            _wait_for_fill(engine, calibration_path(model).exists())
            pieces = engine.generate(PROMPT, N_TOKENS, SamplingConfig(temp=0))
            next(pieces)
            self.prompt = engine.stats().cache
            self.n_decoded = sum(1 for _ in pieces)
            self.all = engine.stats().cache
            self.info = engine.info()
        self.trace: Trace = read_trace(trace)

    def counted(self, name: str) -> int:
        return getattr(self.all, name) - getattr(self.prompt, name)

    def equals(self, result: SimulationResult) -> bool:
        return all(getattr(result, name) == self.counted(name) for name in COUNTED)

    def simulation(self, policy: str, **given: Any) -> Simulation:
        slots = self.info.pool_slots_high, self.info.pool_slots_low
        return Simulation(N_LAYERS, N_EXPERTS, N_USED, *slots, policy=policy, floors=True, **given)

    def is_only(self, policy: str, **given: Any) -> bool:
        """True if the engine kept the experts of this policy, and not those of LRU."""
        own = self.simulation(policy, **given)
        same, lru = (simulate(self.trace.routes, each) for each in (own, replace(own, policy="lru")))
        return self.equals(same) and not self.equals(lru)


def _wait_for_fill(engine: Engine, is_calibrated: bool) -> None:
    """A calibration's most used experts are read in the background, each in three parts."""
    info, end = engine.info(), time.monotonic() + 300
    n_reads = 3 * (info.pool_slots_high + info.pool_slots_low) * is_calibrated
    while engine.stats().cache.reads < n_reads:
        assert time.monotonic() < end
        time.sleep(0.05)


def calibrated(source: Path, folder: Path, **found: Any) -> Path:
    """A copy of a model, with what is known of its experts."""
    model = folder / "m.gguf"
    model.symlink_to(source)
    with Engine(model, EngineConfig(CacheConfig(pools=6 << 20), n_ctx=256)) as engine:
        low_bytes = engine.info().tier_bytes_low
    given = {"low_share": 0.3, "weights": (1.0, 0.0, 0.0, 0.0), "expert_uses": USES}
    Calibration(source.stat().st_size, low_bytes, **{**given, **found}).write(model)
    return model


def check_needs_gpu(paper: str, folder: Path) -> None:
    """Asserts that the paper's configuration says so where there is none."""
    cache = CacheConfig(pools=6 << 20, **settings_of(paper, {}))
    with pytest.raises(HobbitError, match="name a GPU with"):
        Engine(calibrated(models.tiny(), folder), EngineConfig(cache, n_ctx=256)).open()


def counters_on_a_device(paper: str, folder: Path, rpc: str) -> dict[str, float]:
    """Counters of the paper's configuration on the device of an RPC server."""
    model = calibrated(models.tiny(), folder)
    cache = CacheConfig(device="RPC0", pools=6 << 20, **settings_of(paper, {}))
    return logits.run(models.lib_dir(), model, SHORT_PLANS, cache.settings(), rpc=rpc).stats
