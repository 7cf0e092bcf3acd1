# SPDX-License-Identifier: MIT
"""llama.cpp and the expert cache on a device with memory of its own, with the same share of it for experts.

    python -m bench.device --device CUDA0 --stock build/stock-cuda/bin \\
        --shape mixtral-8x7b --layers 8 --type q8_0 --low q2_k --trace FILE

In every arm the device has all other weights and the KV cache, and host memory has all experts, but where
--memory bounds it. How to build for a device, and what the figures mean: docs/measurements.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from bench import compare
from bench.harness import report, routing, runner
from bench.harness.arms import Arm, kind, ours
from bench.harness.carry import placed
from bench.harness.job import Job
from bench.tables import ROOT, markdown, number, option_parser
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.model.gguf_file import read_gguf
from pyhobbit.model.model_file import expert_bytes
from pyhobbit.native.paths import LIB_DIR
from pyhobbit.routing.trace import read_trace
from pyhobbit.settings.config import Setting, format_size, parse_size
from pyhobbit.settings.papers import PAPERS

STOCK = ("stock", "stock-repacked")
DEMAND = "demand"
STOCK_CACHE, STOCK_FIT = "stock-cache", "stock-fit"
_HOBBIT, _TWIDDLER, _DAOP = (dict(PAPERS[name].settings) for name in ("hobbit", "twiddler", "daop"))
_RANK = {**PAPERS["mobile"].settings, "t1": 0.5, "t2": 0.5}  # the rule's own, in place of the run's
_DEMAND: dict[str, Any] = {"mode": "gpu", "prefetch": 0}
ARMS = (
    Arm("stock", "llama.cpp, --n-cpu-moe: as many layers' experts on the device as fit", "stock"),
    Arm("stock-repacked", "as stock, the others repacked for the CPU (--no-host)", "stock", repack=True),
    Arm(STOCK_FIT, "llama.cpp, placed as its --fit does in the same memory", "stock"),
    Arm(STOCK_CACHE, "llama.cpp's own cache of experts (--moe-cache-mib), if --stock has it", "stock"),
    ours(DEMAND, "no cache: room for a token's experts of one layer", fits=True, **_DEMAND),
    ours("ours-gpu", "expert cache; missing experts are uploaded", mode="gpu"),
    ours("ours-cooperative", "expert cache; the CPU computes missing experts", mode="cooperative"),
    ours("ours-auto", "expert cache; missing experts take the faster of both ways", mode="auto"),
    ours("ours-twiddler", "Twiddler: experts placed by a profile, Algorithm 1", calibrated=True, **_TWIDDLER),
    ours("ours-daop", "DAOP: placed by the prompt, computed a layer early, missing ones replaced", **_DAOP),
    ours("demand-rank", "as demand, a token's best half, unsure tokens again", fits=True, **_RANK, **_DEMAND),
    *(
        ours(f"hobbit-{mode}-{n}", f"HOBBIT, {n} layers of prefetch", "low", mode=mode, prefetch=n, **_HOBBIT)
        for mode, n in (("cooperative", 2), *(("gpu", n) for n in range(4)))
    ),
    ours("ours-eq2", "as ours-auto, high and low precision by Eq. 2", "low", mode="auto"),
    ours("ours-price", "as ours-eq2, by the rule price and --calibration", "priced", mode="auto"),
)
BY_NAME = {arm.name: arm for arm in ARMS}
LIMITS = (0.2, 0.3, 0.5)
LIMITS_HELP = "device memory for experts as shares of them all (default: 0.2 0.3 0.5)"
LARGE_COPY = 64 << 20
PROFILE, PROFILED = "hobbit.calibrated", 256  # a setting that asks for one; tokens
SELECTIONS = ("selections_high", "selections_low", "selections_skipped")
MISSES = ("misses_high", "misses_low")
LAYERS = ("layers_computed",)


@dataclass(frozen=True)
class Experts:
    """Experts of a model. layers: bytes of each layer's experts, 0 without any."""

    layers: tuple[int, ...]
    n_experts: int
    n_used: int

    @property
    def largest(self) -> int:
        """Bytes of one expert."""
        return max(self.layers) // self.n_experts

    def budget(self, share: float) -> int:
        """Bytes. Raises ConfigError where no layer's experts would fit."""
        found, least = round(share * sum(self.layers)), self.layers[-1]
        if found < least:
            raise ConfigError(
                f"--limits {share:g} leaves {format_size(found)} of the device for experts, and those of one "
                f"layer take {format_size(least)}; give at least {ceil(100 * least / sum(self.layers)) / 100}"
            )
        return found

    def n_cpu_moe(self, share: float) -> int:
        """llama.cpp's best: the smallest N at which the experts of layers N, N + 1 ... fit."""
        budget = self.budget(share)
        return next(n for n in range(len(self.layers)) if sum(self.layers[n:]) <= budget)


def experts_of(model: Path) -> Experts:
    """Raises HobbitError."""
    file, shape = read_gguf(model), routing.moe_shape(model)
    if file.get("split.count", 1) > 1:
        raise HobbitError(f"{model} is one of several files; merge them with llama.cpp's llama-gguf-split")
    return Experts(tuple(expert_bytes([file])), shape.n_experts, shape.n_used)


#
# runs
#


@dataclass(frozen=True)
class Target:
    """The device, and the server that offers it.

    memory: bytes of host memory that the cache's arms may take.
    """

    device: str
    rpc: str | None
    memory: int | None = None

    def describe(self, lib_dir: Path, copies: Sequence[int] = ()) -> dict[str, Any]:
        """Output of bench.harness.ggml_device, in a process of its own. Raises HobbitError."""
        command = [sys.executable, "-m", "bench.harness.ggml_device", str(lib_dir.resolve()), self.device]
        command += ["--rpc", self.rpc] if self.rpc else []
        command += ["--copies", *map(str, copies)] * bool(copies)
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        if done.returncode:
            raise HobbitError(runner.reason(done))
        return json.loads(done.stdout)

    def job(self, config: runner.BenchConfig, experts: Experts, turn: runner.Turn, routes: Path) -> Job:
        """The job for the process of a turn."""
        job = replace(runner.job(config, turn.arm, None, routes), device=self.device, rpc=self.rpc)
        if turn.limit is not None and kind(turn.arm.name) == STOCK_CACHE:
            return replace(job, n_cpu_moe=len(experts.layers), moe_cache=experts.budget(turn.limit))
        if turn.limit is not None and kind(turn.arm.name) == STOCK_FIT:
            return replace(job, n_cpu_moe=len(experts.layers), fit=experts.budget(turn.limit))
        if turn.limit is not None and turn.arm.build != "ours":
            return replace(job, n_cpu_moe=experts.n_cpu_moe(turn.limit))
        bound: dict[str, Setting] = {"hobbit.device": self.device}
        if self.memory is not None:
            bound["hobbit.memory"] = self.memory
        if turn.limit is None:
            bound["hobbit.pools"] = int((experts.n_used + 0.5) * experts.largest)  # half a one for alignment
        else:
            bound["hobbit.device_memory"] = experts.budget(turn.limit)
        return replace(job, fits=True, settings=runner.settings(config, turn.arm, bound))


def run(config: runner.BenchConfig, target: Target, experts: Experts, results: Path) -> list[dict[str, Any]]:
    """Runs everything in turn. Raises HobbitError."""
    copies = sorted({experts.largest, LARGE_COPY})
    head = runner.description(config) | {
        "device": target.describe(LIB_DIR, copies),
        "expert_bytes": sum(experts.layers),
        "n_cpu_moe": {f"{share:g}": experts.n_cpu_moe(share) for share in config.limits},
    }

    def run_turn(config: runner.BenchConfig, turn: runner.Turn, routes: Path) -> dict[str, Any]:
        budget = None if turn.limit is None else experts.budget(turn.limit)
        record = runner.record_of(turn, budget) | {"peak_bytes": None, "disk_bytes_per_second": None}
        try:
            own = profiled(config, target, experts, routes) if PROFILE in turn.arm.settings else config
        except HobbitError as e:
            return record | {"error": str(e)}
        done = runner.start(target.job(own, experts, turn, routes), None)
        return record | ({"error": runner.reason(done)} if done.returncode else json.loads(done.stdout))

    return runner.take_turns(config, results, head, run_turn)


def profiled(
    config: runner.BenchConfig, target: Target, experts: Experts, routes: Path
) -> runner.BenchConfig:
    """With a calibration, by tokens that no turn measures. Raises HobbitError."""
    link, trace = routes.with_name(config.model.name), routes.with_suffix(".csv")
    n_before = sum(config.prompts) + config.n_warm_up
    n_after = n_before + config.n_tokens
    if not link.exists() and config.trace is not None:
        with np.load(routes) as arrays:
            others = np.delete(arrays["experts"], slice(n_before, n_after), axis=0)
        placed(config.model, link, others[:, np.flatnonzero(experts.layers)])
    elif not link.exists():
        turn = runner.Turn(ours("profile", "", mode="gpu", trace=str(trace)), config.limits[0], 0)
        job = replace(target.job(config, experts, turn, routes), prompts=(1,), seconds=3600)
        done = runner.start(replace(job, n_warm_up=n_after, n_tokens=PROFILED), None)
        if done.returncode:
            raise HobbitError(f"the model cannot be profiled: {runner.reason(done)}")
        seen = read_trace(trace)
        shape = replace(routing.moe_shape(config.model), n_layers=seen.n_layers)
        placed(config.model, link, routing.lay_over(seen, shape).experts[-PROFILED:])
    return replace(config, model=link)


#
# report
#


def _ratio(record: report.Record, over: Sequence[str], under: Sequence[str]) -> float | None:
    """A sum of counters by another."""
    if not record["counters"]:
        return None
    values = {**record["counters"], "n_decoded": record["n_decoded"]}
    divisor = sum(values[name] for name in under)
    return sum(values[name] for name in over) / divisor if divisor else None


def table(results: report.Results) -> str:
    """The run and its rows."""
    device = results.run["device"]
    rates = {f"{int(size) / 1e6:.0f} MB": rate for size, rate in device["copies"].items()}
    rates |= {"page-locked memory": device["locked"]} if device["locked"] else {}
    link = max(rates.values())
    copies = ", ".join(f"{rate / 1e9:.2f} GB/s of {what}" for what, rate in rates.items())
    about = (
        f"{device['name']}: {device['description']}, {device['total_bytes'] / 1e9:.0f} GB; copies: {copies}"
    )
    layers = ", ".join(f"{n} at {float(share):.0%}" for share, n in results.run["n_cpu_moe"].items())
    stock = f"stock: --n-cpu-moe {layers}, the smallest at which the experts fit; "
    stock += f"device memory as shares of {results.run['expert_bytes'] / 1e9:.2f} GB of experts"
    rows = [dict(_cells(results, key, link)) for key in results.order]
    return "\n".join([*report.preface(results, about), stock, "", *markdown(rows)])


def _cells(results: report.Results, key: report.Key, link: float) -> Iterator[tuple[str, str]]:
    shared = results.cells(key)
    speed, demand = (results.median(each, lambda r: r["tokens_per_second"]) for each in (key, (None, DEMAND)))
    yield "device memory", "-" if key[0] is None else shared["memory"]
    for name in ("arm", "token/s", "least - most", "to stock"):
        yield name, shared[name]
    yield "to demand", number(speed / demand if speed and demand else None, ".2f")
    for name in (*(name for name in shared if name.startswith("first token")), "prefill token/s", "hits"):
        yield name, shared[name]
    moved = ("bytes_transferred",)
    for name, (over, under, how, scale) in {
        "host hits": (("host_hits_high", "host_hits_low"), MISSES, ".1%", 1),
        "by the CPU": (("selections_cpu",), SELECTIONS, ".0%", 1),
        "evicted/token": (("evictions",), ("n_decoded",), ".1f", 1),
        "early": (("selections_early",), SELECTIONS, ".0%", 1),
        "replaced": (("selections_replaced",), SELECTIONS, ".0%", 1),
        "launches/layer": (("device_launches",), LAYERS, ".1f", 1),
        "waits/layer": (("device_waits",), LAYERS, ".1f", 1),
        "reads/layer": (("device_reads",), LAYERS, ".1f", 1),
        "copies/layer": (("device_copies",), LAYERS, ".1f", 1),
        "MB/token moved": (moved, ("n_decoded",), ".1f", 1e-6),
        "GB/s": (moved, ("transfer_s",), ".2f", 1e-9),
        "of the link": (moved, ("transfer_s",), ".0%", 1 / link),
    }.items():
        yield name, number(results.median(key, partial(_ratio, over=over, under=under)), how, scale)
    yield "stall", shared["stall"]
    yield "MB/token read", shared["MB/token"]
    device_bytes = results.median(key, lambda record: record["device_bytes"])
    yield "device MB", number(device_bytes, ".0f", 1e-6)


def main() -> None:
    """Runs and reports."""
    parser = option_parser(__doc__)
    compare.add_options(parser, BY_NAME, LIMITS_HELP)
    parser.set_defaults(limits=list(LIMITS))
    parser.add_argument("--device", required=True, metavar="NAME", help="as ggml names it, like CUDA0")
    parser.add_argument("--rpc", metavar="HOST:PORT", help="ggml-rpc-server that offers it")
    parser.add_argument("--memory", metavar="SIZE", help="host memory of our arms (default: all experts fit)")
    args = parser.parse_args()
    try:
        memory = None if args.memory is None else parse_size(args.memory)
        target = Target(args.device, args.rpc, memory)
        target.describe(LIB_DIR)  # before a model is made
        known = {name: arm for name, arm in BY_NAME.items() if name != STOCK_CACHE or args.arms}
        config = compare.configured(args, known)
        experts = experts_of(config.model)
        for share in config.limits:
            experts.budget(share)
        if any(arm.build == "stock" for arm in config.arms):
            target.describe(config.stock)
        path = compare.results_path(args, config)
        with compare.terminable():
            records = run(config, target, experts, path)
        results = report.Results(records, STOCK)
        compare.publish(results, path.parent, table(results))
    except HobbitError as e:
        sys.exit(f"device: {e}")


if __name__ == "__main__":
    main()
