# SPDX-License-Identifier: MIT
"""What fixed placements miss beside LRU and echo: the policies static and prompt.

    python bench/placement.py qwen3-30b-a3b.route.csv gpt-oss-120b.route.csv

Loads per token, all in high precision, and their difference from LRU. Of a trace the second half of decoding
counts. static places by the first half's uses, "hindsight" by those of the counted tokens, which no run
knows. Of the tiny model's held-out text the first half of each chunk is a prompt and the second half counts.
There static places by the uses of as many other chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from quality import TINY, convert

from pyhobbit.bench.script import option_parser, table_head, table_row
from pyhobbit.quality.calibration import profile, routes
from pyhobbit.quality.evaluate import Evaluator
from pyhobbit.routing.observe import Observations
from pyhobbit.routing.trace import Simulation, pool_slots, read_trace, simulate
from pyhobbit.settings.config import EngineConfig, EvaluationConfig


@dataclass(frozen=True)
class Case:
    """base: without policy and slots. prior: uses per token before, as of Simulation."""

    name: str
    base: Simulation
    routes: NDArray[Any]
    prior: tuple[float, ...]


def uses_per_token(of: NDArray[Any], base: Simulation) -> tuple[float, ...]:
    """Of the counted tokens."""
    counted = of[of["counted"] != 0]
    numbers = counted["layer"] * base.n_experts + counted["expert"]
    uses = np.bincount(numbers, minlength=base.n_layers * base.n_experts)
    return tuple((uses / len(np.unique(counted["token"]))).tolist())


def of_trace(path: Path) -> Case:
    trace = read_trace(path)
    base = Simulation(trace.n_layers, trace.n_experts, trace.n_used, slots_high=0, floors=True)
    half = trace.n_decoded // 2
    before = uses_per_token(trace.split(0, half), base)
    return Case(path.name.split(".")[0], base, trace.split(half, trace.n_decoded), before)


def _chunk(seen: Observations, first: int, n_tokens: int) -> Iterator[NDArray[Any]]:
    """The first half as the batch of a prompt, and then token by token."""
    of = routes(seen, slice(first, first + n_tokens)).reshape(n_tokens, len(seen.layers), -1)
    of["counted"][: n_tokens // 2] = 0
    yield of[: n_tokens // 2].swapaxes(0, 1).ravel()
    yield of[n_tokens // 2 :].ravel()


def of_tiny(n_chunks: int) -> Case:
    engine = EngineConfig(n_ctx=EvaluationConfig.default_n_ctx, n_threads=1)
    with Evaluator(convert("f16", "q4_0"), EvaluationConfig(engine)) as evaluator:
        chunks = evaluator.chunks((TINY / "heldout.txt").read_text(encoding="utf-8"))[: 2 * n_chunks]
        _, seen = profile(evaluator, chunks)
        info = evaluator.info
    base = Simulation(info.n_layers, info.n_experts, info.n_experts_used, slots_high=0, floors=True)
    n_tokens = len(chunks[0])
    measured = [part for i in range(n_chunks) for part in _chunk(seen, i * n_tokens, n_tokens)]
    others = routes(seen, slice(n_chunks * n_tokens, len(seen.sequences)))
    return Case("tiny", base, np.concatenate(measured), uses_per_token(others, base))


def print_case(case: Case, capacities: list[float]) -> None:
    print("\n" + table_head((case.name, *(f"{capacity:.0%}" for capacity in capacities))))
    rows = {
        "lru": replace(case.base, policy="lru"),
        "echo": replace(case.base, policy="echo"),
        "prompt": replace(case.base, policy="prompt"),
        "static": replace(case.base, policy="static", prior=case.prior),
        "static, hindsight": replace(
            case.base, policy="static", prior=uses_per_token(case.routes, case.base)
        ),
    }
    lru: list[float] = []
    for name, simulation in rows.items():
        found = []
        for capacity in capacities:
            n_all = case.base.n_layers * case.base.n_experts
            slots = pool_slots(n_all, capacity, 0.0, 1.0)[0]
            found.append(simulate(case.routes, replace(simulation, slots_high=slots)).penalty_per_token)
        lru = lru or found
        cells = [f"{loads:.2f} ({loads / most - 1:+.0%})" for loads, most in zip(found, lru, strict=True)]
        print(table_row((name, *cells)), flush=True)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("traces", type=Path, nargs="*", help="of chat --trace")
    parser.add_argument("--capacity", type=float, nargs="+", default=[0.1, 0.2, 0.4], help="of traces")
    parser.add_argument("--tiny-capacity", type=float, nargs="+", default=[0.34, 0.5, 0.75])
    parser.add_argument("--chunks", type=int, default=8, help="of 512 tokens (default: %(default)s)")
    args = parser.parse_args()
    for path in args.traces:
        print_case(of_trace(path), args.capacity)
    print_case(of_tiny(args.chunks), args.tiny_capacity)


if __name__ == "__main__":
    main()
