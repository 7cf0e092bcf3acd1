# SPDX-License-Identifier: MIT
"""Eviction policies on real text: the tiny model's routing of held-out text, replayed as decoding.

    python -m bench.policies
    python -m bench.policies --start 32    # the first tokens after a start, with and without what is known

Loads per token, all in high precision, and their difference from LRU. Every chunk is a sequence of its own.
With --start the second half of the chunks counts, each from its own start. The first half is what earlier
runs used: it fills the pools and is the policies' prior. The difference is that from empty pools.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bench.quality import TINY, convert
from bench.tables import option_parser, table_head, table_row
from pyhobbit.quality.calibration import profile, routes
from pyhobbit.quality.evaluate import Evaluator
from pyhobbit.routing.observe import Observations
from pyhobbit.routing.trace import BELADY, Simulation, policy_names, pool_slots, simulate
from pyhobbit.settings.config import EngineConfig, EvaluationConfig


def prior(seen: Observations, tokens: slice, n_experts: int) -> tuple[float, ...]:
    """Uses per token, layer by layer."""
    chosen = seen.experts[tokens]
    counts = [np.bincount(chosen[:, layer].ravel(), minlength=n_experts) for layer in range(chosen.shape[1])]
    return tuple((np.concatenate(counts) / len(chosen)).tolist())


def print_starts(seen: Observations, base: Simulation, capacities: list[float], n_tokens: int) -> None:
    """A row per policy: loads per token from empty pools, and with what the first half of the text used."""
    chunks = np.unique(seen.sequences)
    firsts = [int(np.flatnonzero(seen.sequences == chunk)[0]) for chunk in chunks]
    half = firsts[len(firsts) // 2]
    known = prior(seen, slice(0, half), base.n_experts)
    for policy in policy_names(has_prior=False):
        cells = []
        for capacity in capacities:
            slots = pool_slots(base.n_layers * base.n_experts, capacity, 0.0, 1.0)[0]
            case = replace(base, policy=policy, slots_high=slots)
            loads = [
                sum(
                    simulate(routes(seen, slice(first, first + n_tokens)), each).penalty
                    for first in firsts
                    if first >= half
                )
                for each in (case, replace(case, prior=known))
            ]
            n_counted = n_tokens * sum(first >= half for first in firsts)
            cells.append(
                f"{loads[0] / n_counted:.2f} -> {loads[1] / n_counted:.2f} ({loads[1] / loads[0] - 1:+.0%})"
            )
        print(table_row((policy, *cells)), flush=True)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--capacity", type=float, nargs="+", default=[0.34, 0.5, 0.75])
    parser.add_argument(
        "--chunks", type=int, default=8, help="number of 512-token chunks to replay (default: %(default)s)"
    )
    parser.add_argument("--start", type=int, metavar="N", help="the first N tokens after a start")
    args = parser.parse_args()
    engine = EngineConfig(n_ctx=EvaluationConfig.default_n_ctx, n_threads=1)
    with Evaluator(convert("f16", "q4_0"), EvaluationConfig(engine)) as evaluator:
        chunks = evaluator.chunks((TINY / "heldout.txt").read_text(encoding="utf-8"))[: args.chunks]
        _, seen = profile(evaluator, chunks)
        info = evaluator.info
    n_all = info.n_layers * info.n_experts
    print(f"{len(chunks)} x {engine.n_ctx} tokens of held-out text\n")
    print(table_head(("", *(f"{capacity:.0%}" for capacity in args.capacity))))
    base = Simulation(info.n_layers, info.n_experts, info.n_experts_used, slots_high=0, floors=True)
    if args.start is not None:
        print_starts(seen, base, args.capacity, args.start)
        return
    lru: list[float] = []
    names = [*policy_names(has_prior=False), BELADY]
    for policy in sorted(names, key="lru".__ne__):
        penalties = []
        for capacity in args.capacity:
            slots = pool_slots(n_all, capacity, 0.0, 1.0)[0]
            case = replace(base, policy=policy, slots_high=slots)
            penalties.append(simulate(routes(seen, slice(None)), case).penalty_per_token)
        lru = lru or penalties  # the first one
        cells = [f"{p:.2f} ({p / reference - 1:+.0%})" for p, reference in zip(penalties, lru, strict=True)]
        print(table_row((policy, *cells)), flush=True)


if __name__ == "__main__":
    main()
