# SPDX-License-Identifier: MIT
"""Costs of the rule price from the output errors of one run, on the tiny model, beside measured ones.

    python bench/short_costs.py

Costs come from the first half of the held-out text, bytes and divergences from the second. "Measured: N" are
the costs of N layers measured on one chunk, with output errors between them, or on a line over the logarithms
of the costs. The rank correlation is with the divergence of each expert measured alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from quality import ENGINE, Fitted, convert, evaluators, halves

from pyhobbit.bench.script import option_parser
from pyhobbit.model.expert_weights import ExpertWeights
from pyhobbit.model.model_file import read_model_file
from pyhobbit.quality.costs import CostRuns, output_errors
from pyhobbit.quality.evaluate import Chunk, Costs, Evaluator, Quality
from pyhobbit.quality.output_error import OutputErrors
from pyhobbit.settings.config import EngineConfig

PRICES = tuple(np.geomspace(1e-5, 0.1, 15))
LIMITS = (2e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)  # of gate's settings


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    ranks = [np.argsort(np.argsort(values.ravel())) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def arms(runs: CostRuns, errors: np.ndarray) -> Iterator[tuple[str, Costs]]:
    yield "measured: all", runs.by_layer()
    one = replace(runs, chunks=runs.chunks[:1], reference=runs.reference[:1], seen=runs.seen.first(512))
    yield "measured on one chunk: all", one.by_layer()
    for n in (2, 3):
        left = iter([True] * (n - 2))
        costs, _ = one.refined(errors, lambda left=left: next(left, False))
        yield f"measured: {n}, output errors", costs
        left = iter([True] * (n - 2))
        costs, _ = one.refined(np.ones(errors.shape), lambda left=left: next(left, False))
        yield f"measured: {n}, line", costs
    yield "output errors alone", Costs(*map(tuple, errors.T.tolist()))


def bytes_at(points: Sequence[Quality], kl: float) -> float:
    """KiB per token at this divergence, between measured settings; nan outside of them."""
    known = sorted((math.log(max(q.mean_kl, 1e-9)), q.bytes_per_token / 1024) for q in points)
    return float(np.interp(math.log(kl), *zip(*known, strict=True), left=math.nan, right=math.nan))


def by_price(evaluator: Evaluator, costs: Costs, chunks: list[Chunk], reference: np.ndarray) -> list[Quality]:
    """The rule price from nearly all high to the lowest bytes."""
    evaluator.set_costs(costs)
    scale = 50 * max(costs.low)  # prices are in units of the costs
    return [evaluator.measure(chunks, 1.0, 1.0, reference, price=scale * price) for price in PRICES]


def compare(path: Path, n_chunks: int, kls: list[float], engine: EngineConfig) -> None:
    head = "".join(f" KL {kl:g} |" for kl in kls)
    print(f"\n{path.stem}\n\n| rule, costs |{head}\n|{'---|' * (1 + len(kls))}")
    with evaluators(path, engine, ["gate", "price"]) as opened:
        fitted_on, measured = halves(opened["gate"], n_chunks)
        reference = opened["gate"].reference(measured)
        fitted = Fitted(opened, fitted_on, engine)
        found = [fitted.cheapest("gate", limit) for limit in LIMITS]
        points = [opened["gate"].measure(measured, q.t1, q.t2, reference) for q in found]
        print(f"| gate |{''.join(f' {bytes_at(points, kl):.0f} |' for kl in kls)}", flush=True)
        runs = CostRuns(opened["price"], fitted_on, fitted.reference, fitted.seen)
        outputs = OutputErrors(ExpertWeights(path), read_model_file(path).blocks, fitted.seen)
        sums = outputs.sums(opened["price"].info.n_experts)
        errors = output_errors(sums, fitted.seen)
        for name, costs in arms(runs, errors):
            points = by_price(opened["price"], costs, measured, reference)
            print(f"| price, {name} |{''.join(f' {bytes_at(points, kl):.0f} |' for kl in kls)}", flush=True)
        divergences = runs.by_expert()
        print(f"\nrank correlation: experts {rank_correlation(sums[..., 0], divergences):.2f}", end="")
        for i, name in enumerate(("low", "skip")):
            by_layer = np.array(getattr(fitted.costs["price"], name))
            print(f", {name} by layer {rank_correlation(errors[:, i], by_layer):.2f}", end="")
        print(flush=True)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--chunks", type=int, default=4, help="of 512 tokens, for costs and to measure")
    parser.add_argument("--pairs", nargs="+", default=["q8_0+q2_k", "f16+q4_0"], metavar="HIGH+LOW")
    parser.add_argument("--kl", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2], metavar="NATS")
    args = parser.parse_args()
    for pair in args.pairs:
        compare(convert(*pair.split("+")), args.chunks, args.kl, ENGINE)


if __name__ == "__main__":
    main()
