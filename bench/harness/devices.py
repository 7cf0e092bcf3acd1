# SPDX-License-Identifier: MIT
"""Arms on a device with memory of its own, there or modelled: a limit is its memory for experts.

It has all other weights and the KV cache, and host memory has all experts.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bench.harness import runner, trace
from bench.harness.arms import DEVICE_ARMS, MODELLED, PROFILE, Arm, ours
from bench.harness.runner import ArmError, BenchConfig, Host, Record, Turn
from bench.harness.system import ROOT, compiled
from bench.harness.worker import Job
from pyhobbit.errors import ConfigError
from pyhobbit.model.model_file import expert_bytes, model_parts
from pyhobbit.quality.stored import Calibration
from pyhobbit.routing.trace import read_trace
from pyhobbit.settings.config import Setting, format_size

PROFILED = 256  # tokens of a profile
SOURCES = ROOT / "tests/modelled_device"


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


def n_cpu_moe(model: Path, share: float) -> int:
    """llama.cpp's best: the smallest N at which the experts of layers N, N + 1 ... fit."""
    layers, room = experts_of(model), budget(model, share)
    return next(n for n in range(len(layers)) if sum(layers[n:]) <= room)


@dataclass(frozen=True)
class Device(Host):
    """A device of ggml's. rpc: server that offers it, HOST:PORT."""

    name: str
    rpc: str | None = None

    arms: ClassVar[Mapping[str, Arm]] = DEVICE_ARMS
    usual: ClassVar[Mapping[str, Any]] = {"limits": (0.2, 0.3, 0.5)}

    def describe(self, lib_dir: Path | None) -> Record:
        """Name, description and memory, by the libraries of lib_dir; None: ours. Raises HobbitError."""
        stock = None if lib_dir is None else str(lib_dir.resolve())
        return runner.start(Job("", stock, device=self.name, rpc=self.rpc))

    def head(self, config: BenchConfig) -> Record:
        return {
            "source": "measured",
            "expert_bytes": sum(experts_of(config.model)),
            "n_cpu_moe": {f"{share:.0%}": n_cpu_moe(config.model, share) for share in config.limits},
            **self._own_head(config),
        }

    def _own_head(self, config: BenchConfig) -> Record:
        if any(arm.build == "stock" for arm in config.arms):
            self.describe(config.stock)
        return {"device": self.describe(None)}

    def limit_bytes(self, config: BenchConfig, share: float) -> int:
        return budget(config.model, share)

    def n_before(self, config: BenchConfig) -> int:
        """Tokens that are computed before those that count."""
        return sum(config.prompts) + config.n_warm_up

    def job(self, config: BenchConfig, turn: Turn, routes: Path) -> Job:
        """The job for the process of a turn."""
        job = replace(runner.job(config, turn.arm, None, routes), device=self.name, rpc=self.rpc)
        if turn.arm.build == "stock" and turn.limit is not None:
            return replace(job, n_cpu_moe=n_cpu_moe(config.model, turn.limit))
        bound: dict[str, Setting] = {"hobbit.device": self.name}
        if turn.limit is None:  # half an expert for alignment
            shape = trace.moe_shape(config.model)
            largest = max(experts_of(config.model)) // shape.n_experts
            bound["hobbit.pools"] = int((shape.n_used + 0.5) * largest)
        else:
            bound["hobbit.device_memory"] = budget(config.model, turn.limit)
        return replace(job, fits=True, settings=runner.settings(config, turn.arm, bound))

    def measure(self, config: BenchConfig, turn: Turn, _limit: int | None, routes: Path) -> Iterator[Record]:
        own = self._profiled(config, routes) if PROFILE in turn.arm.settings else config
        yield self._start(self.job(own, turn, routes))

    def _start(self, job: Job) -> Record:
        return runner.start(job)

    def _profiled(self, config: BenchConfig, routes: Path) -> BenchConfig:
        """With a calibration, by tokens that no turn measures. Raises ArmError."""
        link, path = routes.with_name(config.model.name), routes.with_suffix(".csv")
        n_before = self.n_before(config)
        n_after = n_before + config.n_tokens
        with np.load(routes) as arrays:
            recorded = arrays.get("experts")
        if not link.exists() and recorded is not None:
            others = np.delete(recorded, slice(n_before, n_after), axis=0)
            placed(config.model, link, others[:, np.flatnonzero(experts_of(config.model))])
        elif not link.exists():
            turn = Turn(ours("profile", "", mode="gpu", trace=str(path)), config.limits[0], 0)
            job = replace(self.job(config, turn, routes), prompts=(1,), seconds=3600)
            self._start(replace(job, n_warm_up=n_after, n_tokens=PROFILED))
            seen = read_trace(path)
            shape = replace(trace.moe_shape(config.model), n_layers=seen.n_layers)
            placed(config.model, link, trace.lay_over(seen, shape).experts[-PROFILED:])
        return replace(config, model=link)


def placed(model: Path, link: Path, experts: NDArray[np.int32]) -> None:
    """Makes a link to the model, with a calibration that counts these uses, [tokens, layers, used].

    Every expert counts once more, so that all have their order, and the pool is full before the first token.
    Raises ArmError.
    """
    if not len(experts):
        raise ArmError("the trace has no tokens beside those that are measured; give fewer with --tokens")
    n_experts = trace.moe_shape(model).n_experts
    uses = [1 + np.bincount(of.ravel(), minlength=n_experts) for of in experts.swapaxes(0, 1)]
    parts = model_parts(model)
    for part in parts:
        link.with_name(part.path.name).symlink_to(part.path.absolute())
    size = sum(part.size for part in parts)
    Calibration(size, expert_uses=tuple(np.concatenate(uses).tolist())).write(link)


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

    @staticmethod
    def of(machine: str) -> "Modelled":
        """The machine of a price file. Raises ConfigError."""
        prices = read_prices(machine)
        settings = dict(word.split("=", 1) for word in prices["device"].split())
        return Modelled(f"{settings['name']}0", machine=Path(machine).stem, prices=prices)

    def _own_head(self, config: BenchConfig) -> Record:
        routing = {} if config.trace else {"routing": "seeded"}
        return {"source": "modelled", "prices": self.machine, **routing}

    def routing(self, shape: trace.MoeShape, config: BenchConfig) -> trace.Routing:
        chosen = trace.seeded_routing(shape, self.n_before(config) + config.n_tokens, PROFILED)
        return trace.weighted(chosen, 0.6 if config.low else 0.0)

    def _start(self, job: Job) -> Record:
        environment = {
            "PYTHONPATH": str(ROOT),
            "LD_PRELOAD": str(library()),
            "MODELLED_PRICES": json.dumps(self.prices),
        }
        job = replace(job, mmap=True, n_threads=1)
        return runner.start(job, program=(str(SOURCES / "decode.py"),), environment=environment)


def library() -> Path:
    """The modelled device, compiled on first use. Raises HobbitError without a compiler."""
    names = ("modelled-device", "streams", "time-face", "host-threads")
    sources = [SOURCES / f"{name}.cpp" for name in names]
    flags = ["-std=c++17", "-Wl,-z,lazy"]
    return compiled("modelled", "CXX=c++", sources, *sorted(SOURCES.glob("*.h")), flags=flags)


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
