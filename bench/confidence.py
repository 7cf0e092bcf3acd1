# SPDX-License-Identifier: MIT
"""MoBiLE's drafts and second passes beside Eq. 2 and the price rule, at equal divergence, on the tiny model.

    python bench/confidence.py

A draft uses the best half of a token's experts: the other half is skipped, or low. A token whose best
probability is not above the confidence is computed again, all high. Text is computed one token at a time, so
that what drafts leave in the KV cache serves the tokens after them. Settings of the other rules are fitted on
the first half of the held-out text under several limits, and everything is measured on the second half.

Asked: bytes of the experts that the passes over a token use, each once, as if none were resident. Read: with
a cache of bounded size. Both are shares of what all high asks for. The bytes of another rule lie between two
measured settings, on a line over the logarithms of the divergences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from cached_quality import POLICY
from cached_quality import Bench as FittedBench
from quality import ENGINE, convert

from pyhobbit.bench.script import option_parser, table_head, table_row
from pyhobbit.quality.evaluate import Evaluator, Quality
from pyhobbit.settings.config import CacheConfig, EngineConfig, EvaluationConfig

RULES = ("gate", "price")
SKIPPING = (0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)  # of Eq. 2, where nothing is low
HALVES = {"skipped": (0.5, 0.5), "low": (0.5, 1.0)}
LOW_SHARE = {"skipped": 0.0, "low": 0.25}  # of the pools: the low version takes a third of the bytes
HIGH = (1.0, 1.0, 0.0)

Numbers = tuple[float, float, float]
"""t1, t2 and price."""


@dataclass(frozen=True)
class Run:
    """One setting. asked: of exact decisions; read: with the cache, which serves what is resident.

    asked_bytes, read_bytes: per token.  repeated: share of the tokens.
    """

    asked: Quality
    asked_bytes: float
    repeated: float
    read: Quality

    @property
    def read_bytes(self) -> float:
        return self.read.bytes_read_per_token


class Bench:
    """One pair of types. share: of the pools, of the high versions of all experts."""

    def __init__(self, path: Path, engine: EngineConfig, n_chunks: int, share: float) -> None:
        self._path, self._engine, self._share = path, engine, share
        self._fitted = FittedBench(path, engine, n_chunks)
        with self._opened("rank", engine.cache) as rank:
            self._reference = rank.reference(self._fitted.measured)

    def _opened(self, rule: str, cache: CacheConfig, *, strict: bool = True) -> Evaluator:
        engine = replace(self._engine, cache=cache)
        return Evaluator(self._path, EvaluationConfig(engine, strict, rule, one_by_one=True))

    def _run(self, rule: str, numbers: Numbers, low_share: float, confidence: float = 0.0) -> Run:
        t1, t2, price = numbers
        pools = int(self._share * self._fitted.info.expert_bytes)
        cache = CacheConfig(
            pools=pools, policy=POLICY, low_share=low_share, prefetch=0, confidence=confidence
        )
        if price == 0.0:
            cache = replace(cache, t1=t1, t2=t2)
        with self._opened(rule, replace(self._engine.cache, confidence=confidence)) as exact:
            asked, n_bytes, repeated = self._measure(exact, numbers)
        with self._opened(rule, cache, strict=False) as cached:
            read, _, _ = self._measure(cached, numbers)
        return Run(asked, n_bytes, repeated, read)

    def _measure(self, evaluator: Evaluator, numbers: Numbers) -> tuple[Quality, float, float]:
        """Also bytes asked for per token, and the share of tokens that were computed twice."""
        chunks, (t1, t2, price) = self._fitted.measured, numbers
        if price > 0.0:
            evaluator.set_costs(self._fitted.fitted.costs["price"])
        before = evaluator.stats
        quality = evaluator.measure(chunks, t1, t2, self._reference, price=price)
        after, n_tokens = evaluator.stats, sum(map(len, chunks))

        def grown(name: str) -> float:
            return (getattr(after, name) - getattr(before, name)) / n_tokens

        sizes = dict(zip(("high", "low"), evaluator.expert_bytes, strict=True))
        asked = sum(size * (grown(f"hits_{t}") + grown(f"misses_{t}")) for t, size in sizes.items())
        return quality, asked, grown("tokens_repeated")

    def all_high(self) -> Run:
        return self._run("gate", HIGH, 0.0)

    def rule(self, name: str) -> Iterator[Run]:
        """The best settings under several limits; "skipping" is Eq. 2 without low precision."""
        if name == "skipping":
            yield from (self._run("gate", (t, t, 0.0), 0.0) for t in SKIPPING)
            return
        for q in self._fitted.tried[name]:
            low_share = self._fitted.low_share(name, q, self._share)
            yield self._run(name, (q.t1, q.t2, q.price), low_share)

    def drafts(self, confidences: list[float]) -> Iterator[tuple[str, float, Run]]:
        for half, (t1, t2) in HALVES.items():
            for confidence in (0.0, *confidences):
                yield half, confidence, self._run("rank", (t1, t2, 0.0), LOW_SHARE[half], confidence)


def share_at(runs: list[Run], divergence: float, name: str, whole: float) -> str:
    """The share of bytes at a divergence; a dash outside of what was measured."""
    ordered = sorted(runs, key=lambda run: getattr(run, name).mean_kl)
    kls = [math.log(getattr(run, name).mean_kl) for run in ordered]
    shares = [getattr(run, f"{name}_bytes") / whole for run in ordered]
    found = float(np.interp(math.log(divergence), kls, shares, left=math.nan, right=math.nan))
    return "-" if math.isnan(found) else f"{found:.2f}"


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--chunks", type=int, default=8, help="of 512 tokens, to fit and to measure")
    parser.add_argument("--pair", default="q8_0+q2_k", metavar="HIGH+LOW")
    parser.add_argument("--pools", type=float, default=0.3, metavar="SHARE")
    parser.add_argument("--confidence", type=float, nargs="+", default=[0.3, 0.5, 0.7], metavar="P")
    args = parser.parse_args()
    bench = Bench(convert(*args.pair.split("+")), ENGINE, args.chunks, args.pools)
    high = bench.all_high()
    others = {name: list(bench.rule(name)) for name in ("skipping", *RULES)}
    whole, share = high.asked_bytes, high.read_bytes / high.asked_bytes
    print(f"{args.pair}, {args.chunks} x {ENGINE.n_ctx} tokens, pools of {args.pools:.0%}:")
    print(f"all high asks for {whole / 1024:.0f} KiB per token and reads {share:.2f} of it\n")
    head = ["other half", "confidence", "computed twice"]
    for name in ("asked", "read"):
        head += [f"KL, {name}", "changed top-1", name, *(f"{rule}, {name}" for rule in others)]
    print(table_head(head))
    for half, confidence, run in bench.drafts(args.confidence):
        row = [half, f"{confidence:g}", f"{run.repeated:.0%}"]
        for name, n_bytes in (("asked", run.asked_bytes), ("read", run.read_bytes)):
            quality: Quality = getattr(run, name)
            row += [
                f"{quality.mean_kl:.4f}",
                f"{1 - quality.same_top1:.1%}",
                f"{n_bytes / whole:.2f}",
            ]
            row += [share_at(runs, quality.mean_kl, name, whole) for runs in others.values()]
        print(table_row(row), flush=True)


if __name__ == "__main__":
    main()
