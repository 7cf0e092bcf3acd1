# SPDX-License-Identifier: MIT
"""Locality and predictability of routing: of recorded traces, and of generated models.

    python -m bench.routing qwen3-30b-a3b.route.csv bench-models/qwen3-30b-a3b-24x-q4_0.gguf --used 6

A model computes random tokens, drawn as bench.compare draws them, by its own routers. The columns:

    reused    share of a token's experts that the next token uses again in the same layer
    LRU       hits in one pool of so many of all experts; the first 28 tokens, or the prompt of a trace, fill
              it and are not counted
    ahead     share of the experts that a layer's router names, if it is applied to the router input of the
              layer so many before it
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.analysis.figures import MAX_AHEAD, prediction, reuse
from bench.harness.tokens import random_tokens
from bench.tables import option_parser, table_head, table_row
from pyhobbit.errors import HobbitError
from pyhobbit.model.model_file import read_model_file
from pyhobbit.quality.calibration import profile, routes
from pyhobbit.quality.evaluate import Evaluator
from pyhobbit.routing.trace import Simulation, pool_slots, read_trace, simulate
from pyhobbit.settings.config import CacheConfig, EngineConfig, EvaluationConfig, parse_size

CAPACITIES = (0.15, 0.25, 0.4)
N_FIRST, N_COUNTED = 28, 128  # tokens of the Qwen3 trace
COLUMNS = ("reused", *(f"LRU {c:.0%}" for c in CAPACITIES), *(f"{i + 1} ahead" for i in range(MAX_AHEAD)))


@dataclass(frozen=True)
class Routed:
    """sequences: for each an array of ROUTE, n_used for each token and layer, best first.

    ahead: [MAX_AHEAD], share of the experts that are named; NaN where it is not known.
    """

    n_layers: int
    n_experts: int
    n_used: int
    sequences: list[NDArray[Any]]
    ahead: NDArray[np.float64]


def recorded(path: Path) -> Routed:
    """Raises HobbitError."""
    trace = read_trace(path)
    unknown = np.full(MAX_AHEAD, np.nan)
    return Routed(trace.n_layers, trace.n_experts, trace.n_used, [trace.routes], unknown)


def computed(path: Path, n_sequences: int, memory: int | None) -> Routed:
    """A model's own routing. Raises HobbitError."""
    file, n_tokens = read_model_file(path), N_FIRST + N_COUNTED
    draw = random_tokens(file.tensors["token_embd.weight"].ne[1])
    chunks = [list(islice(draw, n_tokens)) for _ in range(n_sequences)]
    engine = EngineConfig(CacheConfig(memory=memory), n_ctx=n_tokens)
    with Evaluator(path, EvaluationConfig(engine)) as evaluator:
        info, seen = evaluator.info, profile(evaluator, chunks)[1]
    sequences = []
    for start in range(0, n_sequences * n_tokens, n_tokens):
        chosen = routes(seen, slice(start, start + n_tokens))
        chosen["counted"] = chosen["token"] >= start + N_FIRST
        sequences.append(chosen)
    routers = file.routers([file.blocks[layer] for layer in seen.layers])
    if routers is None or seen.inputs is None:
        raise HobbitError(f"{path} routes in a way that is not known here; give a model of bench.compare")
    counted = seen.input_tokens % n_tokens >= N_FIRST
    chosen = seen.experts[seen.input_tokens[counted]]
    ahead = prediction(seen.inputs[counted], chosen, routers).top_k
    known = [row[np.isfinite(row)] for row in ahead]
    means = np.array([row.mean() if row.size else np.nan for row in known])
    return Routed(info.n_layers, info.n_experts, info.n_experts_used, sequences, means)


def figures(routed: Routed, n_used: int) -> list[float]:
    """By COLUMNS, means of all sequences; reuse and LRU of the n_used best experts of each token."""
    base = Simulation(routed.n_layers, routed.n_experts, n_used, slots_high=0)
    n_all = routed.n_layers * routed.n_experts
    slots = [pool_slots(n_all, capacity, 0.0, 1.0)[0] for capacity in CAPACITIES]
    rows = []
    for sequence in routed.sequences:
        chosen = sequence.reshape(-1, routed.n_used)[:, :n_used]
        counted = chosen[chosen["counted"][:, 0] != 0]["expert"].reshape(-1, routed.n_layers, n_used)
        again = reuse(counted, np.zeros(len(counted)), routed.n_experts).share.mean()
        hits = [simulate(chosen.ravel(), replace(base, slots_high=n)).hit_rate for n in slots]
        rows.append([again, *hits])
    return [*np.mean(rows, axis=0).tolist(), *routed.ahead.tolist()]


def run(args: argparse.Namespace) -> None:
    """Raises HobbitError."""
    if args.sequences < 1:
        raise HobbitError(f"--sequences is {args.sequences}; it must be positive")
    print(table_head(("", *COLUMNS)))
    for path in args.files:
        is_trace = path.suffix == ".csv"
        routed = recorded(path) if is_trace else computed(path, args.sequences, args.memory)
        n_used = routed.n_used if args.used is None else args.used
        if not 0 < n_used <= routed.n_used:
            raise HobbitError(f"--used is {n_used}; {path.name} uses {routed.n_used} experts for each token")
        values = figures(routed, n_used)
        cells = ["-" if np.isnan(value) else f"{value:.3f}" for value in values]
        print(table_row((path.stem, *cells)), flush=True)


def main() -> None:
    parser = option_parser(__doc__)
    add = parser.add_argument
    add("files", type=Path, nargs="+", metavar="FILE", help="traces (.csv) and models (.gguf)")
    add("--used", type=int, metavar="N", help="best experts of a token that count (default: all)")
    add("--sequences", type=int, default=4, metavar="N", help="sequences of a model (default: %(default)s)")
    add("--memory", type=parse_size, metavar="SIZE", help="limit for a model, like 8G")
    try:
        run(parser.parse_args())
    except HobbitError as error:
        sys.exit(f"routing: error: {error}")


if __name__ == "__main__":
    main()
