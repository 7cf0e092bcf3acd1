# SPDX-License-Identifier: MIT
"""Bytes read for each token at equal memory: a low version and a residual against two versions of their own.

    python bench/equal_memory.py                       # on the tiny model, by the engine
    python bench/equal_memory.py --trace FILE [FILE]   # on recorded routes, by the simulator

Two versions: q8_0 and q4_0. Parts: q4_0 and a residual, in q4_0 (9 bits together) or another type. Memory is
a share of what all experts take in q8_0; both arms get the same bytes, and split them as the simulator finds
best. Both begin with the same thresholds; then t1 of the worse one is raised until the quality is equal: on
the tiny model the mean divergence from f16; recorded routes have no text, so there the share of selections
that is served in low precision.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from quality import convert, halves, plain_f16
from residual import with_residual

from pyhobbit.bench.script import option_parser, table_head, table_row
from pyhobbit.quality.calibration import profile, routes
from pyhobbit.quality.evaluate import Evaluator
from pyhobbit.routing.analysis import unimportance
from pyhobbit.routing.trace import Simulation, SimulationResult, read_trace, simulate
from pyhobbit.settings.config import CacheConfig, EngineConfig, EvaluationConfig

POLICY = "echo"
LOW_SHARES = {False: np.arange(0.05, 0.75, 0.05), True: np.arange(0.4, 0.95, 0.05)}
EQUAL = 0.05  # of the divergence, or of the share in low precision
TARGET = 0.75
STEPS = 7  # of bisection
HEAD = (
    "memory",
    "t2",
    "t1",
    "of the pools low",
    "high / low / skipped, %",
    "quality",
    "KiB or bits read per token",
    "ratio",
)


@dataclass(frozen=True)
class Arm:
    """bits_high: of a slot of the high pool, per weight."""

    name: str
    residual: bool
    bits_high: float
    bits_low: float


VERSIONS = Arm("versions", False, 8.5, 4.5)


def parts(residual: str) -> Arm:
    """q4_0 and a residual of that type."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[residual.upper()]]
    return Arm(residual, True, 8 * size / block, VERSIONS.bits_low)


@dataclass(frozen=True)
class Shape:
    n_layers: int
    n_experts: int
    n_used: int


@dataclass(frozen=True)
class Run:
    """cost: what is to be equal.  read: per token."""

    t1: float
    low_share: float
    mix: tuple[float, float, float]
    cost: float
    read: float


RunArm = Callable[[Arm, float, float, float], Run]
"""Given share of the memory, t1 and t2."""


#
# the simulator
#


def simulated(arm: Arm, shape: Shape, rows: np.ndarray, memory: float, t1: float, t2: float) -> Run:
    """The split of the pools that reads least; read: bits per token of one weight in each expert."""
    n_all = shape.n_layers * shape.n_experts
    budget = memory * n_all * VERSIONS.bits_high
    runs = []
    for low_share in LOW_SHARES[arm.residual]:
        n_low = min(n_all, int(budget * low_share / arm.bits_low))
        if arm.residual:  # of no use without its low version
            n_low = min(n_all, max(n_low, int(budget / (arm.bits_high + arm.bits_low))))
        n_high = min(n_low if arm.residual else n_all, int((budget - n_low * arm.bits_low) / arm.bits_high))
        result = simulate(rows, _simulation(arm, shape, n_high, n_low, t1, t2))
        runs.append(Run(t1, float(low_share), result.shares, result.shares[1], _bits(arm, result)))
    return min(runs, key=lambda run: run.read)


def _simulation(arm: Arm, shape: Shape, n_high: int, n_low: int, t1: float, t2: float) -> Simulation:
    return Simulation(
        shape.n_layers,
        shape.n_experts,
        shape.n_used,
        slots_high=n_high,
        slots_low=n_low,
        policy=POLICY,
        floors=True,
        residual=arm.residual,
        t1=t1,
        t2=t2,
        bits_high=arm.bits_high,
        bits_low=arm.bits_low,
    )


def _bits(arm: Arm, result: SimulationResult) -> float:
    return (result.loads_high * arm.bits_high + result.loads_low * arm.bits_low) / result.n_tokens


#
# the engine
#


class Tiny:
    """The tiny model: what the first half of the held-out text chooses, and measurements on the second."""

    def __init__(self, n_chunks: int, residual: str) -> None:
        self._paths = {
            VERSIONS: convert("q8_0", "q4_0"),
            parts(residual): with_residual(plain_f16(), "q4_0", residual),
        }
        with _evaluator(plain_f16(), CacheConfig(pools=64_000_000), one_by_one=False) as evaluator:
            fitted, self._chunks = halves(evaluator, n_chunks)
            info = evaluator.info
            self.shape = Shape(info.n_layers, info.n_experts, info.n_experts_used)
            _, seen = profile(evaluator, fitted)
            self._reference = evaluator.reference(self._chunks)
        self._rows = routes(seen, slice(None))
        ranked = unimportance(seen.weights)
        self.scores = np.sort(ranked[ranked > 0])
        with _evaluator(self._paths[VERSIONS], CacheConfig(t1=1.0), one_by_one=False) as evaluator:
            self._all_bytes = evaluator.info.tier_bytes_high

    def run(self, arm: Arm, memory: float, t1: float, t2: float) -> Run:
        """cost: mean divergence from f16.  read: KiB per token."""
        low_share = simulated(arm, self.shape, self._rows, memory, t1, t2).low_share
        cache = CacheConfig(
            pools=int(memory * self._all_bytes), t1=t1, t2=t2, low_share=low_share, policy=POLICY, prefetch=0
        )
        with _evaluator(self._paths[arm], cache, one_by_one=True) as evaluator:
            found = evaluator.measure(self._chunks, t1, t2, self._reference)
        mix = (found.share_high, found.share_low, found.share_skipped)
        return Run(t1, low_share, mix, found.mean_kl, found.bytes_read_per_token / 1024)


def _evaluator(path: Path, cache: CacheConfig, one_by_one: bool) -> Evaluator:
    """one_by_one: as in decoding."""
    engine = EngineConfig(cache, EvaluationConfig.default_n_ctx, n_threads=1)
    return Evaluator(path, EvaluationConfig(engine, strict=False, one_by_one=one_by_one))


#
# equal quality
#


def equalized(run: RunArm, other: Arm, memory: float, t1: float, t2: float) -> tuple[Run, Run]:
    """Runs of the versions and of the parts of nearly equal cost: the dearer one gets a higher t1."""
    runs = {arm: run(arm, memory, t1, t2) for arm in (VERSIONS, other)}
    worse, better = sorted(runs, key=lambda arm: -runs[arm].cost)
    tried, (low, high) = [runs[worse]], (t1, t2)
    while len(tried) <= STEPS and abs(tried[-1].cost / runs[better].cost - 1) > EQUAL / 5:
        if tried[-1].cost > runs[better].cost:
            low = tried[-1].t1
        else:
            high = tried[-1].t1
        tried.append(run(worse, memory, (low + high) / 2, t2))
    runs[worse] = min(tried, key=lambda each: abs(each.cost / runs[better].cost - 1))
    return runs[VERSIONS], runs[other]


def rows(
    run: RunArm, other: Arm, memories: Sequence[float], mixes: Sequence[tuple[float, float]]
) -> Iterator[tuple[str, ...]]:
    for t1, t2 in mixes:
        for memory in memories:
            versions, summed = equalized(run, other, memory, t1, t2)
            ratio, off = summed.read / versions.read, summed.cost / versions.cost - 1
            yield (
                f"{memory:.0%}",
                f"{t2:g}",
                f"{versions.t1:.3g}, {summed.t1:.3g}",
                f"{versions.low_share:.0%}, {summed.low_share:.0%}",
                f"{_percents(versions.mix)}, {_percents(summed.mix)}",
                f"{versions.cost:.3g}, {summed.cost:.3g}" + ("" if abs(off) <= EQUAL else f" ({off:+.0%})"),
                f"{versions.read:.0f}, {summed.read:.0f}",
                f"{ratio:.2f}" + (" *" if ratio <= TARGET and abs(off) <= EQUAL else ""),
            )


def _percents(mix: tuple[float, float, float]) -> str:
    return " / ".join(f"{100 * share:.1f}" for share in mix)


def table(title: str, lines: Iterator[tuple[str, ...]]) -> None:
    print(f"\n{title}\n\n{table_head(HEAD)}")
    for line in lines:
        print(table_row(line), flush=True)


def _pair(text: str) -> tuple[float, float]:
    t1, t2 = map(float, text.split(":"))
    return t1, t2


def main() -> None:
    parser = option_parser(__doc__)
    add = parser.add_argument
    add("--trace", type=Path, nargs="+", default=[], metavar="FILE", help="recorded routes")
    add("--residual", default="q4_0", metavar="TYPE", help="of the parts (default: %(default)s)")
    add("--memory", type=float, nargs="+", default=[0.2, 0.3, 0.4], metavar="F")
    add(
        "--thresholds",
        type=_pair,
        nargs="+",
        default=[(0.0, 1.0), (0.3, 1.0), (0.6, 1.0), (0.6, 0.9)],
        metavar="T1:T2",
        help="that both begin with",
    )
    add("--chunks", type=int, default=8, help="of 512 tokens of the tiny model (default: %(default)s)")
    args = parser.parse_args()
    print(f"* at most {TARGET} at equal quality; pairs: the two versions, the parts")
    if not args.trace:
        compare_on_tiny(args)
    for path in args.trace:
        compare_on_routes(path, args)


def compare_on_tiny(args: argparse.Namespace) -> None:
    tiny = Tiny(args.chunks, args.residual)
    # Of its two experts, the second has a score above 0.5.
    tiny_mixes = [(t1, t2) for t1, t2 in args.thresholds if t1 == 0 or t1 > tiny.scores[0]]
    title = f"tiny model, {args.chunks} x {EvaluationConfig.default_n_ctx} tokens; KL divergence, KiB"
    table(title, rows(tiny.run, parts(args.residual), args.memory, tiny_mixes))


def compare_on_routes(path: Path, args: argparse.Namespace) -> None:
    trace = read_trace(path)
    shape = Shape(trace.n_layers, trace.n_experts, trace.n_used)

    def replayed(arm: Arm, memory: float, t1: float, t2: float) -> Run:
        return simulated(arm, shape, trace.routes, memory, t1, t2)

    title = f"{path.name}: {trace.n_decoded} tokens of {trace.model}; share in low precision, bits"
    table(title, rows(replayed, parts(args.residual), args.memory, args.thresholds))


if __name__ == "__main__":
    main()
