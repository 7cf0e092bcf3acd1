# SPDX-License-Identifier: MIT
"""How good a low tier is by where it comes from, on the tiny model: with an importance matrix or without, and
from a second file as llama-quantize makes and people publish it.

    python bench/low_tier.py

The importance matrix is of the first half of the held-out text, the figures are of the second.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from quality import ENGINE, FOLDER, halves, imatrix, plain_f16

from pyhobbit.bench.script import option_parser, table_head, table_row
from pyhobbit.model.model_file import read_model_file
from pyhobbit.native.paths import BIN_DIR
from pyhobbit.quality.evaluate import Evaluator, Quality
from pyhobbit.settings.config import EvaluationConfig

CONVERTED = ("q3_k", "q2_k", "iq2_xxs", "iq1_m")
PUBLISHED = ("Q3_K_M", "Q2_K", "IQ2_XXS", "IQ1_M")
HEAD = ("low tier", "bits per weight", "low are", "perplexity", "ratio", "mean KL", "99 % KL", "same top-1")


def published(kind: str) -> Path:
    """The tiny model as llama-quantize makes it with an importance matrix: a mix of types."""
    path = FOLDER / f"tiny-{kind}.gguf"
    if not path.exists():
        command = [BIN_DIR / "llama-quantize", "--imatrix", imatrix(), plain_f16(), path, kind, "1"]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return path


def with_low_tier(name: str, options: Sequence[str | Path]) -> Path:
    """The tiny model with a high tier in q8_0."""
    path = FOLDER / f"tiny-q8_0-{name}.gguf"
    if not path.exists():
        command = [sys.executable, "-P", "-m", "pyhobbit", "convert", plain_f16(), "-o", path]
        subprocess.run([*command, "--high", "q8_0", *options], check=True, stdout=sys.stderr)
    return path


def tiers() -> dict[str, Path]:
    """Models by what their low tiers are called."""
    found = {}
    for kind in CONVERTED:
        if not kind.startswith("iq"):
            found[kind] = with_low_tier(f"{kind}-plain", ["--low", kind, "--imatrix", "none"])
        weighted = with_low_tier(f"{kind}-imatrix", ["--low", kind, "--imatrix", imatrix()])
        found[f"{kind}, importance matrix"] = weighted
    for kind in PUBLISHED:
        found[f"--low-from, {kind}"] = with_low_tier(f"from-{kind}", ["--low-from", published(kind)])
    return found


def row(name: str, bits: float, which: str, quality: Quality) -> str:
    q = quality
    cells = (name, f"{bits:.2f}", which, f"{q.perplexity:.3f}", f"{q.perplexity_ratio:.4f}")
    return table_row([*cells, f"{q.mean_kl:.1e}", f"{q.p99_kl:.1e}", f"{q.same_top1:.1%}"])


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--chunks", type=int, default=16, help="of 512 tokens (default: %(default)s)")
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    print(f"high q8_0, {args.chunks} x {ENGINE.n_ctx} tokens\n")
    print(table_head(HEAD))
    for name, path in tiers().items():
        bits = read_model_file(path).tiers[1].bits_per_weight
        with Evaluator(path, EvaluationConfig(ENGINE)) as gate:
            _, chunks = halves(gate, args.chunks)
            reference = gate.reference(chunks)
            print(row(name, bits, "all but the best", gate.measure(chunks, 0.0, 1.0, reference)))
        with Evaluator(path, EvaluationConfig(ENGINE, rule="random")) as by_chance:
            quality = by_chance.measure(chunks, 0.0, 1.0, reference)
            print(row(name, bits, "all", quality), flush=True)


if __name__ == "__main__":
    main()
