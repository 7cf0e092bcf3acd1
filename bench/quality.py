# SPDX-License-Identifier: MIT
"""What low precision costs: perplexity of the tiny model on its held-out text, by the low tier's type.

    python bench/quality.py --chunks 16

Runs the package's llama-perplexity with one token per micro-batch, as in decoding: in a larger batch an
expert gets the best precision that any of its tokens asks for.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from pyhobbit._paths import BIN_DIR

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "tests/tiny_moe"
FOLDER = ROOT / "build/bench"
ARMS = {
    "high only": {},
    "mixed, t1 = 0.6": {"t1": 0.6},
    "mixed and skipped, t1 = 0.6, t2 = 0.9": {"t1": 0.6, "t2": 0.9},
    "all but the top expert low, t1 = 0": {"t1": 0.0},
}


def convert(high: str, low: str) -> Path:
    path = FOLDER / f"tiny-{high}-{low}.gguf"
    if not path.exists():
        command = [sys.executable, "-P", "-m", "pyhobbit", "convert", "--high", high, "--low", low]
        subprocess.run([*command, TINY / "model", "-o", path], check=True, stderr=subprocess.DEVNULL)
    return path


def perplexity(model: Path, chunks: int, pools: int, thresholds: dict[str, float]) -> float:
    settings = [f"hobbit.pools=int:{pools}", *(f"hobbit.{k}=float:{v}" for k, v in thresholds.items())]
    command = [BIN_DIR / "llama-perplexity", "-m", model, "-f", TINY / "heldout.txt", "-c", "512", "-ub", "1"]
    command += ["--chunks", str(chunks), "--override-kv", ",".join(settings)]
    quiet = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=quiet)
    found = re.search(r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr)
    if not found:
        raise SystemExit(f"no perplexity in the output of {command[0]}: {done.stderr[-1000:]}")
    return float(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chunks", type=int, default=16, help="of 512 tokens")
    parser.add_argument("--low", nargs="+", default=["q4_0", "q2_k"])
    parser.add_argument("--pools", type=int, default=5_000_000, help="bytes; the experts take 18.9 MB in f16")
    args = parser.parse_args()

    FOLDER.mkdir(parents=True, exist_ok=True)
    print(f"| experts | {' | '.join('low ' + low for low in args.low)} |\n|---|{'---|' * len(args.low)}")
    for name, thresholds in ARMS.items():
        values = [perplexity(convert("f16", low), args.chunks, args.pools, thresholds) for low in args.low]
        print(f"| {name} | {' | '.join(f'{value:.2f}' for value in values)} |", flush=True)
    values = [perplexity(convert(low, low), args.chunks, args.pools, {}) for low in args.low]
    print(f"| low only | {' | '.join(f'{value:.2f}' for value in values)} |")


if __name__ == "__main__":
    main()
