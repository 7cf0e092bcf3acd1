# SPDX-License-Identifier: MIT
"""What the rules gate and price read with a cache of bounded size, at equal KL divergence, on the tiny model.

    python bench/cached_quality.py

Text is computed one token at a time, so that resident experts serve in a better precision. Settings and
costs are fitted on the first half of the held-out text under several limits and measured on the second half.
"Without cache" is the divergence of the same numbers on the fitted half, without residency. The bytes at a
divergence lie between two measured settings, on a line over the logarithms of the divergences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from quality import ENGINE, Fitted, convert, evaluators, halves

from pyhobbit.bench.script import option_parser, table_head
from pyhobbit.quality.calibration import profile, routes
from pyhobbit.quality.evaluate import Evaluator, Quality
from pyhobbit.quality.fit import CacheFitter, CacheModel
from pyhobbit.settings.config import CacheConfig, EngineConfig, EvaluationConfig

LIMITS = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
RULES = ("gate", "price")
POLICY = "echo"
HEAD = ("pools", "rule", "t1", "t2", "price", "low share", "KiB read per token", "mean KL")
HEAD += ("without cache", "99 % KL", "same top-1")


def settings(fitted: Fitted, rule: str) -> Iterator[Quality]:
    """The best setting under each limit, each once."""
    seen = set()
    for limit in LIMITS:
        found = fitted.cheapest(rule, limit)
        key = (found.t1, found.t2, found.price)
        if key not in seen:
            seen.add(key)
            yield found


class Bench:
    """One pair of types."""

    def __init__(self, path: Path, engine: EngineConfig, n_chunks: int) -> None:
        self._path, self._engine = path, engine
        with evaluators(path, engine, RULES) as opened:
            chunks, self.measured = halves(opened["gate"], n_chunks)
            self.fitted = Fitted(opened, chunks, engine)
            self.tried = {rule: list(settings(self.fitted, rule)) for rule in RULES}
            self.reference, _ = profile(opened["gate"], self.measured)
            self.info = opened["gate"].info

    def low_share(self, rule: str, quality: Quality, share: float) -> float:
        """The best one for pools of this size, by replay of the fitted text."""
        model = CacheModel.of(self.info, rule, quality, self.fitted.costs["price"])
        fitter = CacheFitter(model, lambda: None, capacities=(share,))
        return fitter.best_share(routes(self.fitted.seen, slice(None)), POLICY)

    def measure(self, rule: str, quality: Quality, share: float, low_share: float) -> Quality:
        pools = int(share * self.info.expert_bytes)
        cache = CacheConfig(pools=pools, policy=POLICY, low_share=low_share, prefetch=0)
        if rule == "gate":
            cache = replace(cache, t1=quality.t1, t2=quality.t2)
        engine = replace(self._engine, cache=cache)
        with Evaluator(self._path, EvaluationConfig(engine, strict=False, rule=rule, one_by_one=True)) as one:
            if rule == "price":
                one.set_costs(self.fitted.costs["price"])
            return one.measure(self.measured, quality.t1, quality.t2, self.reference, price=quality.price)


def bytes_at(qualities: list[Quality], divergence: float) -> float:
    """Bytes read per token at a divergence, nan outside of what was measured."""
    ordered = sorted(qualities, key=lambda q: q.mean_kl)
    kls = [math.log(max(q.mean_kl, 1e-9)) for q in ordered]
    read = [q.bytes_read_per_token for q in ordered]
    return float(np.interp(math.log(divergence), kls, read, left=math.nan, right=math.nan))


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--chunks", type=int, default=8, help="of 512 tokens, to fit and to measure")
    parser.add_argument("--pair", default="q8_0+q2_k", metavar="HIGH+LOW")
    parser.add_argument("--pools", type=float, nargs="+", default=[0.2, 0.3, 0.4], metavar="SHARE")
    parser.add_argument("--kl", type=float, nargs="+", default=[3e-3, 1e-2], metavar="NATS")
    args = parser.parse_args()
    bench = Bench(convert(*args.pair.split("+")), ENGINE, args.chunks)
    print(f"{args.pair}, {args.chunks} x {ENGINE.n_ctx} tokens\n\n{table_head(HEAD)}")
    found: dict[tuple[float, str], list[Quality]] = {}
    for share in args.pools:
        for rule in RULES:
            for quality in bench.tried[rule]:
                low_share = bench.low_share(rule, quality, share)
                q = bench.measure(rule, quality, share, low_share)
                found.setdefault((share, rule), []).append(q)
                print(
                    f"| {share:.0%} | {rule} | {q.t1:.3f} | {q.t2:.3f} | {q.price:.2g} | {low_share:.2f} "
                    f"| {q.bytes_read_per_token / 1024:.0f} | {q.mean_kl:.2e} "
                    f"| {quality.mean_kl:.2e} | {q.p99_kl:.2e} "
                    f"| {q.same_top1:.1%} |",
                    flush=True,
                )
    print(f"\n{table_head(('pools', 'KL', 'gate, KiB', 'price, KiB', 'ratio'))}")
    for share in args.pools:
        for divergence in args.kl:
            gate, price = (bytes_at(found[share, rule], divergence) / 1024 for rule in RULES)
            print(f"| {share:.0%} | {divergence:g} | {gate:.0f} | {price:.0f} | {price / gate:.2f} |")


if __name__ == "__main__":
    main()
