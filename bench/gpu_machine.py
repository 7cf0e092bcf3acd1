# SPDX-License-Identifier: MIT
"""All measurements on a GPU, one after the other, from builds that are there: docs/gpu-measurements.md.

    python -m bench.gpu_machine --device CUDA0 --stock build/stock-cuda/bin \\
        --newer build/stock-b11549-cuda/bin --folder /dev/shm/bench -o gpu-results

Runs bench/device.py with shapes of many small and of few large experts. Runs that do not fit into --minutes
are left out; the page of results, OUTPUT/tables.md, lists them.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.tables import ROOT, option_parser

MODES = ("ours-gpu", "ours-cooperative", "ours-auto")
TOKENS = ("--tokens", "64", "--warm-up", "32", "--seconds", "8")


@dataclass(frozen=True)
class Run:
    """One call of bench/device.py. minutes: what it takes at most on a GPU machine.

    needs: options that must be given for it, by their names. The most important run comes first.
    """

    name: str
    minutes: float
    shape: str
    layers: int | None
    type: str
    limits: Sequence[str]
    arms: Sequence[str]
    options: Sequence[str] = ()
    needs: Sequence[str] = ()


SMALL = ("qwen3-30b-a3b", None, "q4_0")
LARGE = ("mixtral-8x7b", 10, "q8_0")
SHARES, PROMPT = ("0.1", "0.25", "0.5"), ("--prompts", "16")
BATCHES = ("--prompts", "128", "512", "2048", "--batch", "512", "2048")
STOCK = ("stock", "stock-repacked", "demand")
OWN = ("stock", "ours-auto")
RUNS = (
    Run("many small experts", 8, *SMALL, SHARES, (*STOCK, *MODES), (*TOKENS, *PROMPT, "128")),
    Run("newer llama.cpp", 3, *SMALL, SHARES, ("newer", "newer-cache"), (*TOKENS, *PROMPT), ("newer",)),
    Run("few large experts", 5, *LARGE, ("0.2", "0.3", "0.5"), ("stock", *MODES), (*TOKENS, *PROMPT)),
    Run("prompts", 3, *SMALL, ("0.25",), OWN, (*TOKENS, *BATCHES)),
    Run("everything on the device", 2, *SMALL, ("1",), OWN, (*TOKENS, *PROMPT)),
    Run(
        "by price", 3, *SMALL, SHARES, ("ours-price",), (*TOKENS, *PROMPT, "--low", "q2_k"), ("calibration",)
    ),
    Run("gpt-oss", 4, "gpt-oss-120b", 18, "q4_0", ("0.1", "0.25"), OWN, (*TOKENS, *PROMPT)),
)
TRIAL = ("--tokens", "4", "--warm-up", "2", "--seconds", "2", "--prompts", "4", "16")


def command(run: Run, args: argparse.Namespace) -> list[str]:
    """The command of a run; --trial uses a tiny model and few tokens in place of its own."""
    shape, layers, options = run.shape, run.layers, list(run.options)
    if args.trial:
        shape, layers, options = "tiny", 4, [*options, *TRIAL]
    words = [
        sys.executable,
        "-m",
        "bench.device",
        "--device",
        args.device,
        "--shape",
        shape,
        "--type",
        run.type,
    ]
    words += ["--layers", str(layers)] if layers else []
    words += ["--folder", str(args.folder), "--stock", str(args.stock), "--reps", str(args.reps)]
    words += ["--limits", *(["0.5"] if args.trial else run.limits), "--arms", *run.arms, *options]
    words += ["--rpc", args.rpc] if args.rpc else []
    for name in run.needs:
        words += [f"--{name}", str(getattr(args, name))]
    words += ["--newer-rpc", args.newer_rpc] if args.newer_rpc and "newer" in run.needs else []
    return [*words, "--output", str(args.output / run.name.replace(" ", "-"))]


def measure(run: Run, args: argparse.Namespace, left_s: float) -> str:
    """The run's part of the page."""
    lacking = [f"--{name}" for name in run.needs if getattr(args, name) is None]
    if lacking:
        return f"Left out: it needs {' and '.join(lacking)}."
    if left_s < 60 * run.minutes and not args.trial:
        return f"Left out: it may take {run.minutes:g} minutes, and {left_s / 60:.0f} were left."
    words = command(run, args)
    shown = shlex.join(["python", *words[1:]])
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            out, err = process.communicate(timeout=left_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # bench.device then ends what it has started
            process.communicate()
            return f"    {shown}\n\nStopped: the time was over. Its results.jsonl has what was measured."
    failed = f"\n\nFailed: {err.strip().splitlines()[-1]}" if process.returncode else ""
    return f"    {shown}\n\n{out.strip()}{failed}"


def main() -> int:
    """Returns the exit status: 1 where a run failed."""
    parser = option_parser(__doc__)
    add = parser.add_argument
    add("--device", required=True, metavar="NAME", help="as ggml names it, like CUDA0")
    add("--rpc", metavar="HOST:PORT", help="ggml-rpc-server that offers it")
    add("--stock", type=Path, required=True, metavar="DIR", help="unpatched llama.cpp for the device")
    add("--newer", type=Path, metavar="DIR", help="newer llama.cpp for the device")
    add("--newer-rpc", metavar="HOST:PORT", help="its ggml-rpc-server (default: that of --rpc)")
    add("--calibration", type=Path, metavar="FILE", help="for the arm by price")
    add(
        "--folder",
        type=Path,
        default=Path("/dev/shm/bench"),
        metavar="DIR",
        help="folder for generated models",
    )
    add("--reps", type=int, default=1, metavar="N", help="repetitions (default: 1)")
    add("--minutes", type=float, default=25, metavar="M", help="for everything (default: 25)")
    names = [run.name for run in RUNS]
    add("--runs", nargs="+", choices=names, default=names, metavar="NAME", help="run only these measurements")
    add("--trial", action="store_true", help="a tiny model and few tokens, to try the script")
    add("-o", "--output", type=Path, required=True, metavar="DIR", help="new folder of the results")
    args = parser.parse_args()
    args.output.mkdir(parents=True)
    end = time.monotonic() + 60 * args.minutes
    page = args.output / "tables.md"
    failed = False
    for run in (run for run in RUNS if run.name in args.runs):
        print(f"{run.name} ...", file=sys.stderr, flush=True)
        part = measure(run, args, end - time.monotonic())
        failed = failed or "\n\nFailed: " in part
        with page.open("a", encoding="utf-8") as file:
            file.write(f"## {run.name}\n\n{part}\n\n")
    print(page.read_text(encoding="utf-8"))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
