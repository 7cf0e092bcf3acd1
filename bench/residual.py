# SPDX-License-Identifier: MIT
"""Which pairs of a low type and a residual are worth their bits, on the tiny model, all in high precision.

    python bench/residual.py    # pairs for originals of 16, 8 and 6 bits, beside types that stand alone
    python bench/residual.py --originals f16 --low q4_0 --residual q4_0 q5_0

Figures are of the second half of the held-out text. The divergence is from the original, whatever its type.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from quality import ENGINE, FOLDER, halves, plain_f16

from pyhobbit.bench.script import option_parser, table_head, table_row
from pyhobbit.model.model_file import read_model_file
from pyhobbit.native.paths import BIN_DIR
from pyhobbit.quality.evaluate import Evaluator
from pyhobbit.settings.config import EvaluationConfig

ORIGINALS = ("f16", "q8_0", "q6_k")
LOW = ("q2_k", "iq3_s", "q3_k", "q4_0", "q4_k")
RESIDUAL = ("q2_k", "q3_k", "q4_0", "q5_0", "q8_0")
ALONE = ("q8_0", "q6_k", "q5_k", "q5_0", *reversed(LOW))
HEAD = ("low", "residual", "bits, low", "bits, both", "perplexity", "KL divergence")


def original(kind: str) -> Path:
    """The tiny model with its experts in `kind` and everything else in f16."""
    source = plain_f16()
    if kind == "f16":
        return source
    path = FOLDER / f"tiny-{kind}.gguf"
    if not path.exists():
        others = ("--tensor-type", "attn=f16", "--token-embedding-type", "f16", "--output-tensor-type", "f16")
        # q8_0 stands for "quantise at all"; every matrix is named
        command = [
            BIN_DIR / "llama-quantize",
            "--tensor-type",
            f"exps={kind}",
            *others,
            source,
            path,
            "q8_0",
            "1",
        ]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return path


def with_residual(source: Path, low: str, residual: str) -> Path:
    """The tiny model with experts of two parts."""
    path = FOLDER / f"{source.stem}-{low}+{residual}.gguf"
    if not path.exists():
        command = [sys.executable, "-P", "-m", "pyhobbit", "convert", source, "-o", path]
        command += ["--low", low, "--high", f"residual:{residual}", "--imatrix", "none"]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return path


def measured(path: Path, reference: Path, n_chunks: int) -> tuple[float, float]:
    """Perplexity, and divergence from the reference, with everything in high precision."""
    with Evaluator(reference, EvaluationConfig(ENGINE)) as evaluator:
        _, chunks = halves(evaluator, n_chunks)
        wanted = evaluator.reference(chunks)
    with Evaluator(path, EvaluationConfig(ENGINE)) as evaluator:
        quality = evaluator.measure(chunks, 1.0, 1.0, wanted)
    return quality.perplexity, quality.mean_kl


def rows(kind: str, args: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """The original, coarser types that stand alone, then the pairs that are smaller than two originals."""
    source = original(kind)
    bits = read_model_file(source).tiers[0].bits_per_weight
    for alone in dict.fromkeys((kind, *ALONE)):
        path = original(alone)
        own = read_model_file(path).tiers[0].bits_per_weight
        if own <= bits:
            yield row(alone, "", own, own, *measured(path, source, args.chunks))
    for low in args.low:
        for residual in args.residual:
            high = read_model_file(original(residual)).tiers[0].bits_per_weight
            if max(high, read_model_file(original(low)).tiers[0].bits_per_weight) >= bits:
                continue  # the converter refuses it
            path = with_residual(source, low, residual)
            parts = [tier.bits_per_weight for tier in read_model_file(path).tiers]
            yield row(low, residual, parts[1], sum(parts), *measured(path, source, args.chunks))


def row(
    low: str, residual: str, low_bits: float, bits: float, perplexity: float, kl: float
) -> tuple[str, ...]:
    return low, residual, f"{low_bits:.2f}", f"{bits:.2f}", f"{perplexity:.3f}", f"{kl:.1e}"


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--chunks", type=int, default=16, help="of 512 tokens (default: %(default)s)")
    parser.add_argument("--originals", nargs="+", default=ORIGINALS, metavar="TYPE")
    parser.add_argument("--low", nargs="+", default=LOW, metavar="TYPE")
    parser.add_argument("--residual", nargs="+", default=RESIDUAL, metavar="TYPE")
    args = parser.parse_args()
    for kind in args.originals:
        print(f"\noriginal {kind}, {args.chunks} x {ENGINE.n_ctx} tokens\n")
        print(table_head(HEAD))
        for cells in rows(kind, args):
            print(table_row(cells), flush=True)


if __name__ == "__main__":
    main()
