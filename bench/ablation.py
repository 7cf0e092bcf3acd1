# SPDX-License-Identifier: MIT
"""Bytes read for each token as HOBBIT's parts are added one by one (its Fig. 16 to 18), on the tiny model.

    python bench/ablation.py

The pools hold 30 % of the high tier's bytes. Settings are calibrated on the first half of the held-out text.
The second is computed token by token, as in decoding, where what is resident serves in place of worse.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from quality import TINY, convert, halves

from pyhobbit.bench.script import option_parser, table_head, table_row
from pyhobbit.quality.calibration import calibrate
from pyhobbit.quality.evaluate import Chunk, Evaluator
from pyhobbit.quality.stored import Calibration
from pyhobbit.settings.config import CacheConfig, CalibrationConfig, EngineConfig, EvaluationConfig

N_CTX = EvaluationConfig.default_n_ctx
COLUMNS = (
    "setting",
    "KiB read per token",
    "us waited per token",
    "high",
    "low",
    "skipped",
    "prefetched and used",
    "perplexity",
    "KL divergence",
)


def fit(path: Path, n_chunks: int, max_kl: float) -> Calibration:
    """Settings from the first half of the text."""
    config = CalibrationConfig(EngineConfig(n_ctx=N_CTX, n_threads=1), max_kl=max_kl, max_chunks=n_chunks)
    text = (TINY / "heldout.txt").read_text(encoding="utf-8")
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as first_half:
        first_half.write(text[: len(text) // 2])
        first_half.flush()
        return calibrate(path, Path(first_half.name), config).calibration


def settings(found: Calibration, pools: int) -> dict[str, CacheConfig]:
    """One more part each."""
    lru = CacheConfig(pools=pools, t1=1.0, t2=1.0, policy="lru", prefetch=0)
    dynamic = replace(lru, t1=found.t1, t2=found.t2, low_share=found.low_share)
    policies = {
        f"+ policy {name}": replace(dynamic, policy=name, weights=found.weights if name == "hobbit" else None)
        for name in dict.fromkeys(("hobbit", found.policy))
    }
    best = policies[f"+ policy {found.policy}"]
    return {
        "demand only, all high, LRU": lru,
        "+ dynamic precision": dynamic,
        **policies,
        **{f"+ prefetch, {n} ahead": replace(best, prefetch=n) for n in (1, 2)},
    }


def row(
    name: str, evaluator: Evaluator, chunks: list[Chunk], cache: CacheConfig, reference: np.ndarray
) -> str:
    quality = evaluator.measure(chunks, cache.t1, cache.t2, reference)
    stats = evaluator.stats
    values = (
        name,
        f"{quality.bytes_read_per_token / 1024:.0f}",
        f"{1e6 * stats.stall_s / sum(map(len, chunks)):.0f}",
        f"{quality.share_high:.1%}",
        f"{quality.share_low:.1%}",
        f"{quality.share_skipped:.1%}",
        f"{stats.prefetched_used / stats.prefetched:.0%}" if stats.prefetched else "-",
        f"{quality.perplexity:.3f}",
        f"{quality.mean_kl:.1e}",
    )
    return table_row(values)


def one_by_one(path: Path, cache: CacheConfig) -> Evaluator:
    """As in decoding."""
    engine = EngineConfig(cache, N_CTX, n_threads=1)
    return Evaluator(path, EvaluationConfig(engine, strict=False, one_by_one=True))


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--high", default="f16")
    parser.add_argument("--low", default="q4_0")
    parser.add_argument(
        "--pool", type=float, default=0.3, help="of the high tier's bytes (default: %(default)s)"
    )
    parser.add_argument(
        "--max-kl", type=float, default=1e-3, help="bound of the calibration (default: %(default)s)"
    )
    parser.add_argument(
        "--chunks", type=int, default=8, help=f"of {N_CTX} tokens, to calibrate and to measure"
    )
    args = parser.parse_args()
    path = convert(args.high, args.low)
    found = fit(path, args.chunks, args.max_kl)
    with one_by_one(path, CacheConfig(t1=1.0)) as evaluator:
        _, chunks = halves(evaluator, args.chunks)
        reference = evaluator.reference(chunks)
        pools = int(args.pool * evaluator.info.tier_bytes_high)
    print(f"{args.high}+{args.low}, pools of {args.pool:.0%}, {args.chunks} x {N_CTX} tokens")
    print(f"t1 = {found.t1:g}, t2 = {found.t2:g}, {found.low_share:.0%} of the pools low\n")
    print(table_head(COLUMNS))
    for name, cache in settings(found, pools).items():
        with one_by_one(path, cache) as evaluator:
            print(row(name, evaluator, chunks, cache, reference), flush=True)


if __name__ == "__main__":
    main()
