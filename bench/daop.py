# SPDX-License-Identifier: MIT
"""What DAOP's approximations cost and save on the tiny model, token by token through the engine.

    lib=$(python -c 'from pyhobbit.native.paths import LIB_DIR; print(LIB_DIR)')
    python tests/rpc_server.py "$lib" 50999 &           # a free port
    python bench/daop.py --rpc 127.0.0.1:50999

"degrade" runs on the CPU, where a missing expert is read from the disk. "early" runs on the RPC server's
device, whose missing experts the CPU computes (mode cooperative). Divergence is that from all-high precision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quality import ENGINE, TINY, convert

from pyhobbit.bench.script import option_parser, table_head
from pyhobbit.engine.stats import CacheStats
from pyhobbit.native.rpc_servers import add_rpc_servers
from pyhobbit.quality.evaluate import Evaluator, Quality
from pyhobbit.settings.config import CacheConfig, EvaluationConfig

HEAD = ("experts in the cache", "option", "selections replaced", "computed early")
HEAD += ("missing experts per token", "mean KL", "99 % KL", "same top-1", "perplexity")


@dataclass(frozen=True)
class Arm:
    name: str
    cache: CacheConfig


_CPU = CacheConfig(policy="echo", prefetch=0)
_DEVICE = CacheConfig(policy="echo", device="RPC0", mode="cooperative", prefetch=1)
ON_CPU = (Arm("none", _CPU), Arm("--degrade", replace(_CPU, degrade=True)))
ON_DEVICE = (Arm("none, on a device", _DEVICE), Arm("--early", replace(_DEVICE, early=True)))


def print_row(share: float, arm: Arm, quality: Quality, stats: CacheStats, n_tokens: int) -> None:
    replaced, early = stats.selections_replaced / stats.selections, stats.selections_early / stats.selections
    print(
        f"| {share:.0%} | {arm.name} | {replaced:.1%} | {early:.1%} "
        f"| {(stats.misses_high + stats.misses_low) / n_tokens:.2f} | {quality.mean_kl:.4f} "
        f"| {quality.p99_kl:.3f} | {quality.same_top1:.1%} | {quality.perplexity:.3f} |",
        flush=True,
    )


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--chunks", type=int, default=8, help="of 512 tokens (default: %(default)s)")
    parser.add_argument("--pools", type=float, nargs="+", default=[0.25, 0.5, 0.75], metavar="SHARE")
    parser.add_argument("--rpc", metavar="HOST:PORT", help="of an RPC server, for --early")
    args = parser.parse_args()
    path = convert("f16", "q4_0")
    with Evaluator(path, EvaluationConfig(ENGINE)) as evaluator:
        chunks = evaluator.chunks((TINY / "heldout.txt").read_text(encoding="utf-8"))[: args.chunks]
        reference, info = evaluator.reference(chunks), evaluator.info
    print(f"{len(chunks)} x {ENGINE.n_ctx} tokens of held-out text\n\n{table_head(HEAD)}")
    for arms in ON_CPU, ON_DEVICE if args.rpc is not None else ():
        if arms is ON_DEVICE:  # llama.cpp puts layers on a device that there is
            add_rpc_servers(args.rpc)
        for share in args.pools:
            for arm in arms:
                cache = replace(arm.cache, pools=int(share * info.tier_bytes_high))
                config = EvaluationConfig(replace(ENGINE, cache=cache), strict=False, one_by_one=True)
                with Evaluator(path, config) as one:
                    quality = one.measure(chunks, 1, 1, reference)
                    print_row(share, arm, quality, one.stats, len(chunks) * ENGINE.n_ctx)


if __name__ == "__main__":
    main()
