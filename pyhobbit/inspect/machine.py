# SPDX-License-Identifier: MIT
"""How a model fits this machine: the plan of its memory, its speed, and what would make it faster."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyhobbit.engine.plan import MemoryPlan, lay_out
from pyhobbit.errors import HobbitError
from pyhobbit.inspect import advice
from pyhobbit.inspect.speed import Speed, estimate, measure_sample, replay
from pyhobbit.model.model_file import ModelFile
from pyhobbit.model.stored_settings import effective_policy, stored_settings
from pyhobbit.native.machine import measure_disk
from pyhobbit.settings.config import CacheConfig, EngineConfig, InspectConfig
from pyhobbit.settings.table import default

if TYPE_CHECKING:
    from pyhobbit.routing.trace import Trace


class Fit:
    """A model on this machine, as chat would open it. plan: None where it does not fit, which error tells."""

    def __init__(self, model: ModelFile, config: InspectConfig) -> None:
        self._model = model
        self._trace = config.trace
        cache = config.engine.cache
        if len(model.tiers) > 1:
            cache = replace(cache, t1=config.t1, t2=config.t2)
        self._config: EngineConfig = replace(config.engine, cache=cache, n_ctx=config.n_ctx)
        self.plan: MemoryPlan | None = None
        self._speed: Speed | None = None
        self.error = ""
        try:
            self.plan = lay_out(model.path, self._config)
        except HobbitError as e:
            self.error = str(e)

    @property
    def cache(self) -> CacheConfig:
        """The settings of the expert cache, with the thresholds that are given."""
        return self._config.cache

    def gpu_rows(self) -> dict[str, str]:
        """The GPUs in use, for people."""
        return {} if self.plan is None else {"GPU": advice.planned_gpu_text(self.plan)}

    def memory_rows(self) -> dict[str, str]:
        """What lies where, for people."""
        return {"memory": self.error} if self.plan is None else advice.memory_rows(self.plan)

    def memory_dict(self) -> dict[str, Any]:
        """The same as plain values, bytes."""
        return {"error": self.error} if self.plan is None else asdict(self.plan)

    def measure(self) -> dict[str, Any]:
        """Estimates the speed; plain values, seconds and bytes. Raises HobbitError."""
        assert self.plan is not None
        plan, model = self.plan, self._model
        disk = None
        if plan.info.cached:
            best = model.tiers[0]
            disk = measure_disk(best.path, best.part_bytes, self.cache.io_threads or default("io_threads"))
        sample = measure_sample(model.path, self._config)
        self._speed = estimate(plan, sample, disk, self._replayed(plan))
        return {**asdict(self._speed), "tokens_per_second": self._speed.tokens_per_second}

    def _replayed(self, plan: MemoryPlan) -> tuple[float, float] | None:
        if self._trace is None or not plan.info.cached:
            return None
        policy = effective_policy(self.cache, stored_settings(self._model.path, self.cache.sidecar))
        return replay(plan, _own_trace(self._trace, plan).routes, policy)

    def speed_rows(self) -> dict[str, str]:
        """What was measured, for people."""
        assert self.plan is not None
        assert self._speed is not None
        return advice.speed_rows(self.plan, self._speed)

    def advice(self) -> list[str]:
        """What would make it faster, a sentence each."""
        if self.plan is None:
            return []
        calibrated = self._model.calibration is not None
        bits = self._model.tiers[0].bits_per_weight
        return advice.advice(self.plan, self._speed, self._config.cache, calibrated, bits)


def _own_trace(path: Path, plan: MemoryPlan) -> "Trace":
    from pyhobbit.routing.trace import read_trace

    trace = read_trace(path)
    info = plan.info
    shape = (trace.n_layers, trace.n_experts, trace.n_used)
    own = (info.n_layers, info.n_experts, info.n_experts_used)
    if shape != own:
        theirs, ours = ("{} layers of {} experts, {} used".format(*each) for each in (shape, own))
        raise HobbitError(f"{path} is a trace of another model: it has {theirs}, and {info.model} has {ours}")
    return trace
