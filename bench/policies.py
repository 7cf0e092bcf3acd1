# SPDX-License-Identifier: MIT
"""Eviction policies on real text: the tiny model's routing of held-out text, replayed as decoding.

    python -m bench.policies

Loads per token, all in high precision, and their difference from LRU. Every chunk is a sequence of its own.
"""

from __future__ import annotations

from dataclasses import replace

from bench.quality import TINY, convert
from bench.tables import option_parser, table_head, table_row
from pyhobbit.quality.calibration import profile, routes
from pyhobbit.quality.evaluate import Evaluator
from pyhobbit.routing.trace import BELADY, Simulation, policy_names, pool_slots, simulate
from pyhobbit.settings.config import EngineConfig, EvaluationConfig


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--capacity", type=float, nargs="+", default=[0.34, 0.5, 0.75])
    parser.add_argument(
        "--chunks", type=int, default=8, help="number of 512-token chunks to replay (default: %(default)s)"
    )
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
