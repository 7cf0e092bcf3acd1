# SPDX-License-Identifier: MIT
"""Arms on a device with memory of its own, there or modelled: a limit is its memory for experts.

It has all other weights and the KV cache, and host memory has all experts.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bench.harness import runner, trace
from bench.harness.arms import DEVICE_ARMS, MODELLED, Arm, ours
from bench.harness.runner import BenchConfig, Host, Record
from bench.harness.system import ROOT
from bench.harness.trace import PROFILED
from bench.harness.worker import Job
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.model.model_file import expert_bytes, model_parts
from pyhobbit.routing.trace import read_trace, use_rates
from pyhobbit.settings.config import Setting, format_size

SOURCES = ROOT / "tests/modelled_device"
LIBRARY = ROOT / "build/release/bin/libmodelled-time.so"
"""The modelled device, which the build makes with the tests."""


@cache
def experts_of(model: Path) -> tuple[int, ...]:
    """Bytes of each layer's experts, 0 without any. Raises HobbitError."""
    return tuple(expert_bytes(model_parts(model)))


def budget(model: Path, share: float) -> int:
    """Bytes of a device for experts. Raises ConfigError where no layer's experts would fit."""
    layers = experts_of(model)
    found, least = round(share * sum(layers)), layers[-1]
    if found < least:
        raise ConfigError(
            f"--limits {share:g} leaves {format_size(found)} of the device for experts, and those of one "
            f"layer take {format_size(least)}; give at least {ceil(100 * least / sum(layers)) / 100}"
        )
    return found


def n_cpu_moe(model: Path, room: int) -> int:
    """llama.cpp's best: the smallest N at which the experts of layers N, N + 1 ... fit."""
    layers = experts_of(model)
    return next(n for n in range(len(layers)) if sum(layers[n:]) <= room)


@dataclass(frozen=True)
class Device(Host):
    """A device of ggml's. rpc: server that offers it, HOST:PORT.  bound: setting that a limit is given to."""

    name: str
    rpc: str | None = None
    bound: str = "hobbit.device_memory"

    arms: ClassVar[Mapping[str, Arm]] = DEVICE_ARMS
    usual: ClassVar[Mapping[str, Any]] = {"limits": (0.2, 0.3, 0.5)}
    fills: ClassVar[bool] = True
    """The experts are loaded before the first token."""

    def describe(self) -> Record:
        """Name, description and memory, by our libraries. Raises HobbitError."""
        return runner.start(Job("", device=self.name, rpc=self.rpc))

    def head(self, config: BenchConfig) -> Record:
        model = config.model
        best = {f"{share:.0%}": n_cpu_moe(model, budget(model, share)) for share in config.limits}
        return {**self._source(), "expert_bytes": sum(experts_of(model)), "n_cpu_moe": best}

    def _source(self) -> Record:
        return {"source": "measured", "device": self.describe()}

    def limit_bytes(self, config: BenchConfig, share: float) -> int:
        return budget(config.model, share)

    def n_before(self, config: BenchConfig) -> int:
        """Tokens that are computed before those that count."""
        return sum(config.prompts) + config.n_warm_up

    def job(self, config: BenchConfig, arm: Arm, limit: int | None) -> Job:
        """The job for the process of a turn."""
        job = replace(runner.job(config, arm, None), device=self.name, rpc=self.rpc)
        if arm.build == "stock" and limit is not None:
            return replace(job, n_cpu_moe=n_cpu_moe(config.model, limit))
        bound: dict[str, Setting] = {"hobbit.device": self.name}
        if limit is None:  # half an expert for alignment
            shape = trace.moe_shape(config.model)
            largest = max(experts_of(config.model)) // shape.n_experts
            bound["hobbit.pools"] = int((shape.n_used + 0.5) * largest)
        else:
            bound[self.bound] = limit
        return replace(job, settings=runner.settings(config, arm, bound))

    def measure(self, config: BenchConfig, arm: Arm, limit: int | None, folder: Path) -> Record:
        if arm.profiled:
            config = runner.with_uses(config, arm, folder / "profiled", lambda: self._uses(config, folder))
        elif arm.build == "ours" and self.fills:
            config = runner.with_uses(config, arm, folder / "all")
        return self._start(self.job(config, arm, limit))

    def _start(self, job: Job) -> Record:
        return runner.start(job)

    def _uses(self, config: BenchConfig, folder: Path) -> list[int]:
        """Uses by tokens that no turn measures, and one of each for their order. Raises ArmError."""
        path, n_before = folder / "profile.csv", self.n_before(config) + config.n_tokens
        arm, limit = ours("profile", "", mode="gpu", trace=str(path)), budget(config.model, config.limits[0])
        job = replace(self.job(config, arm, limit), prompts=(1,), seconds=3600)
        self._start(replace(job, n_warm_up=n_before, n_tokens=PROFILED))
        seen = read_trace(path)
        routes = seen.split(seen.n_decoded - PROFILED, seen.n_decoded)
        counted = routes[routes["counted"] != 0]
        return [1 + int(n) for n in use_rates(counted, seen.n_layers, seen.n_experts, 1)]


@dataclass(frozen=True)
class Modelled(Device):
    """A device that is not there: both programs run as they are, in virtual time (docs/modelled.md).

    name: as ggml would name it.  machine: the name of its prices.
    """

    machine: str = ""
    prices: Mapping[str, Any] = field(default_factory=dict)

    usual: ClassVar[Mapping[str, Any]] = {
        "limits": (0.25,), "reps": 1, "prompts": (1,), "n_warm_up": 64, "arms": MODELLED
    }  # fmt: skip
    fills = False  # its process computes every expert once

    @staticmethod
    def of(machine: str) -> "Modelled":
        """The machine of a price file. Raises ConfigError, HobbitError."""
        if not LIBRARY.exists():
            raise HobbitError(f"there is no {LIBRARY}; run 'make build' in {ROOT}")
        prices = read_prices(machine)
        bound = "hobbit.pools" if prices["one_memory"] else Device.bound
        return Modelled(f"{prices['name']}0", None, bound, Path(machine).stem, prices)

    def _source(self) -> Record:
        return {"source": "modelled", "prices": self.machine, "routing": "seeded"}

    def job(self, config: BenchConfig, arm: Arm, limit: int | None) -> Job:
        spread = 0.6 if config.low else 0.0
        return replace(super().job(config, arm, limit), mmap=True, n_threads=1, spread=spread)

    def _uses(self, config: BenchConfig, _folder: Path) -> list[int]:
        """Uses by all tokens before those that are measured, and by PROFILED behind them."""
        shape, first = trace.moe_shape(config.model), self.n_before(config)
        end = first + config.n_tokens
        others = np.delete(trace.seeded_routing(shape, end, PROFILED), slice(first, end), axis=0)
        experts = others[:, np.flatnonzero(experts_of(config.model))]
        n_layers, n_experts = experts.shape[1], shape.n_experts
        places = np.arange(n_layers)[:, None] * n_experts + experts
        return (1 + np.bincount(places.ravel(), minlength=n_layers * n_experts)).tolist()

    def _start(self, job: Job) -> Record:
        environment = {
            "PYTHONPATH": str(ROOT),
            "LD_PRELOAD": str(LIBRARY),
            "MODELLED": " ".join(f"{name}={value}" for name, value in self.prices.items()),
        }
        return runner.start(job, program=(str(SOURCES / "decode.py"),), environment=environment)


def read_prices(machine: str) -> dict[str, Any]:
    """Prices of a machine: a file of tests/modelled_device/prices by its name, or any by its path.

    A price that the file lacks is that of 4090-ddr5. Raises ConfigError.
    """
    bundled = {each.stem: each for each in (SOURCES / "prices").glob("*.json")}
    path = bundled.get(machine, Path(machine))
    try:
        usual, own = (json.loads(each.read_text("utf-8")) for each in (bundled["4090-ddr5"], path))
        unknown = sorted(own.keys() - usual.keys())
    except (OSError, ValueError, AttributeError) as e:
        names = ", ".join(sorted(bundled))
        raise ConfigError(f"--prices {machine} is no price file ({e}); give a path, or one of {names}") from e
    if unknown:
        raise ConfigError(f"{path} has unknown prices: {', '.join(unknown)}")
    return usual | own
