# SPDX-License-Identifier: MIT
"""The noise floor of quality: how far two ways of computing the same model diverge, all in high precision.

    python bench/noise.py

The tiny model, by the type of its experts. Stock llama.cpp has the same bits as each of these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quality import halves
from residual import ENGINE, original

from pyhobbit.bench.script import option_parser, table_head, table_row
from pyhobbit.quality.evaluate import Evaluator
from pyhobbit.settings.config import EvaluationConfig, Setting

KINDS = ("f16", "q8_0", "q4_0", "q4_k", "q2_k")
HEAD = ("experts", "beside 512 tokens at once", "ratio", "mean KL", "99 % KL", "same top-1")
AT_ONCE = EvaluationConfig(ENGINE)


@dataclass(frozen=True)
class NotRepacked(EvaluationConfig):
    """The layout of the file in place of the one that the CPU multiplies fastest."""

    def settings(self) -> dict[str, Setting]:
        return {**super().settings(), "hobbit.pack": False}


OTHERS = {
    "one token at a time": replace(AT_ONCE, one_by_one=True),
    "not repacked": NotRepacked(ENGINE),
    "two threads": replace(AT_ONCE, engine=replace(ENGINE, n_threads=2)),
}


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--chunks", type=int, default=16, help="of 512 tokens (default: %(default)s)")
    args = parser.parse_args()
    print(f"{args.chunks} x {ENGINE.n_ctx} tokens\n")
    print(table_head(HEAD))
    for kind in KINDS:
        path = original(kind)
        with Evaluator(path, AT_ONCE) as evaluator:
            _, chunks = halves(evaluator, args.chunks)
            reference = evaluator.reference(chunks)
        for name, config in OTHERS.items():
            with Evaluator(path, config) as evaluator:
                q = evaluator.measure(chunks, 1.0, 1.0, reference)
            cells = (kind, name, f"{q.perplexity_ratio:.5f}", f"{q.mean_kl:.1e}", f"{q.p99_kl:.1e}")
            print(table_row([*cells, f"{q.same_top1:.2%}"]), flush=True)


if __name__ == "__main__":
    main()
