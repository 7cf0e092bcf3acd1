# SPDX-License-Identifier: MIT
"""Files without the least sensitive high versions, on the tiny model: their size, and the rule price on both.

    python bench/drop_high.py

Costs and sensitivities are measured on the first half of the held-out text, divergences on the second. The
divergence is from the full file in high precision, and beside it stands that of the full file at equal bytes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from quality import ENGINE, FOLDER, convert, evaluators, halves

from pyhobbit.bench.script import option_parser, table_head
from pyhobbit.model.model_file import read_model_file
from pyhobbit.quality.calibration import profile
from pyhobbit.quality.costs import CostRuns
from pyhobbit.quality.evaluate import Chunk, Costs, Evaluator, Quality
from pyhobbit.quality.stored import Calibration
from pyhobbit.settings.config import EngineConfig

PRICES = (0.0, *np.geomspace(1e-5, 0.3, 24))
LEAST_KL = 5e-4  # about the noise floor: a ratio of less says nothing
HEAD = ("high / low / skipped, %", "KiB/token", "mean KL", "full file at equal bytes", "ratio")


def calibrated(path: Path, evaluator: Evaluator, chunks: list[Chunk]) -> Costs:
    """The costs by layer; the sensitivities of the experts are stored beside the file."""
    reference, seen = profile(evaluator, chunks)
    runs = CostRuns(evaluator, chunks, reference, seen)
    costs = runs.by_layer()
    Calibration(
        model_bytes=path.stat().st_size,
        low_bytes=evaluator.info.tier_bytes_low,
        t1=1.0,
        t2=1.0,
        low_share=0.3,
        policy="lru",
        weights=(1.0, 0.0, 0.0, 0.0),
        costs=costs,
        divergences=tuple(np.nan_to_num(runs.by_expert()).ravel().tolist()),
    ).write(path)
    return costs


def without_high(path: Path, share: float) -> Path:
    """The file without this share of its high versions."""
    output = FOLDER / f"{path.stem}-without-{share:g}.gguf"
    command = [sys.executable, "-P", "-m", "pyhobbit", "convert", "--force", "--drop-high", str(share)]
    subprocess.run([*command, path, "-o", output], check=True, stdout=sys.stderr)
    return output


def curve(evaluator: Evaluator, costs: Costs, chunks: list[Chunk], reference: np.ndarray) -> list[Quality]:
    """The rule price from all high to the lowest bytes."""
    evaluator.set_costs(costs)
    return [evaluator.measure(chunks, 1.0, 1.0, reference, price=price) for price in PRICES]


def at_bytes(points: Sequence[Quality], n_bytes: float) -> float:
    """The mean KL divergence of a curve there, between its points on a scale of logarithms; NaN outside."""
    known = sorted((q.bytes_per_token, np.log(q.mean_kl)) for q in points if q.mean_kl > 0)
    return float(np.exp(np.interp(n_bytes, *zip(*known, strict=True), left=np.nan, right=np.nan)))


def expert_bytes(path: Path) -> int:
    return sum(tier.n_bytes for tier in read_model_file(path).tiers)


def row(q: Quality, full: float) -> str:
    ratio = f"{q.mean_kl / full:.2f}" if full >= LEAST_KL else "-"
    mix = " / ".join(f"{100 * share:.3g}" for share in (q.share_high, q.share_low, q.share_skipped))
    return f"| {mix} | {q.bytes_per_token / 1024:.0f} | {q.mean_kl:.2g} | {full:.2g} | {ratio} |"


def compare(path: Path, shares: list[float], n_chunks: int, engine: EngineConfig) -> None:
    with evaluators(path, engine, ["price"]) as opened:
        whole = opened["price"]
        fitted_on, measured = halves(whole, n_chunks)
        costs = calibrated(path, whole, fitted_on)
        reference = whole.reference(measured)
        full = curve(whole, costs, measured, reference)
    for share in shares:
        smaller = without_high(path, share)
        with evaluators(smaller, engine, ["price"]) as opened:
            points = curve(opened["price"], costs, measured, reference)
        size = smaller.stat().st_size / path.stat().st_size
        experts = expert_bytes(smaller) / expert_bytes(path)
        print(f"\n{path.stem}, {share:.0%} dropped: {size:.3f} of the file, {experts:.3f} of its experts\n")
        print(table_head(HEAD))
        for q in points:
            print(row(q, at_bytes(full, q.bytes_per_token)), flush=True)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--chunks", type=int, default=8, help="of 512 tokens, to calibrate and to measure")
    parser.add_argument("--pairs", nargs="+", default=["q8_0+q2_k", "f16+q4_0"], metavar="HIGH+LOW")
    parser.add_argument("--share", type=float, nargs="+", default=[0.5], help="of the high versions to drop")
    args = parser.parse_args()
    for pair in args.pairs:
        compare(convert(*pair.split("+")), args.share, args.chunks, ENGINE)


if __name__ == "__main__":
    main()
