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
PLACED, OWN, PRICED = ("stock", "stock-fit"), ("stock", "ours-auto"), ("ours-eq2", "ours-price")
STOCK = (*PLACED, "stock-repacked", "demand")
TIER = ("--low", "q2_k")
LOW = ("demand-rank", "hobbit-cooperative-2", *(f"hobbit-gpu-{n}" for n in range(4)))
NOT_MODELLED = ("stock-repacked", *LOW)  # the model knows one precision and layout
RUNS = (
    Run("many small experts", 9, *SMALL, SHARES, (*STOCK, *MODES), (*TOKENS, *PROMPT, "128")),
    Run("newer llama.cpp", 3, *SMALL, SHARES, ("stock", "stock-cache"), (*TOKENS, *PROMPT), ("newer",)),
    Run("few large experts", 6, *LARGE, ("0.2", "0.3", "0.5"), (*PLACED, *MODES), (*TOKENS, *PROMPT)),
    Run("prompts", 3, *SMALL, ("0.25",), OWN, (*TOKENS, *BATCHES)),
    Run("everything on the device", 2, *SMALL, ("1",), OWN, (*TOKENS, *PROMPT)),
    Run("calibrated", 5, *SMALL, SHARES, PRICED, (*TOKENS, *PROMPT, *TIER), ("calibration",)),
    Run("two precisions", 7, *LARGE, ("0.2",), ("stock", "demand", *LOW), (*TOKENS, *PROMPT, *TIER)),
    Run("Twiddler and DAOP", 5, *SMALL, ("0.25",), ("ours-twiddler", "ours-daop"), (*TOKENS, *PROMPT)),
    Run("gpt-oss", 4, "gpt-oss-120b", 18, "q4_0", ("0.1", "0.25"), OWN, (*TOKENS, *PROMPT)),
)
TRIAL = ("--tokens", "4", "--warm-up", "2", "--seconds", "2", "--prompts", "4", "16")


def commands(run: Run, args: argparse.Namespace) -> list[list[str]]:
    """The commands of a run; --trial uses a tiny model and few tokens in place of its own.

    With --prices there is one for each share, or none where a modelled machine knows no arm of the run.
    """
    shape, layers = ("tiny", 4) if args.trial else (run.shape, run.layers)
    shares = ["0.5"] if args.trial else run.limits
    where = (
        ["device", "--device", args.device] if args.prices is None else ["modelled", "--prices", args.prices]
    )
    words = [sys.executable, "-m", f"bench.{where[0]}", *where[1:], "--shape", shape, "--type", run.type]
    words += ["--folder", str(args.folder)]
    words += ["--layers", str(layers)] if layers else []
    if args.prices is not None:
        arms = [arm for arm in run.arms if arm not in NOT_MODELLED and not run.needs]
        words += ["--stock", str(args.stock)]
        words += ["--tokens", "4", "--warm-up", "2"] if args.trial else []
        return [[*words, "--share", share, "--arms", *arms] for share in shares if arms]
    is_newer = "newer" in run.needs
    stock, rpc = (args.newer, args.newer_rpc or args.rpc) if is_newer else (args.stock, args.rpc)
    words += ["--stock", str(stock), "--reps", str(args.reps)]
    words += ["--limits", *shares, "--arms", *run.arms, *run.options, *(TRIAL if args.trial else ())]
    words += ["--rpc", rpc] if rpc else []
    words += ["--calibration", str(args.calibration)] if "calibration" in run.needs else []
    return [[*words, "--output", str(args.output / run.name.replace(" ", "-"))]]


def measure(run: Run, args: argparse.Namespace, end: float) -> str:
    """The run's part of the page, where each row of a table says where it comes from."""
    lacking = [f"--{name}" for name in run.needs if getattr(args, name) is None]
    if lacking:
        return f"Left out: it needs {' and '.join(lacking)}."
    left_s = end - time.monotonic()
    if left_s < 60 * run.minutes and not args.trial:
        return f"Left out: it may take {run.minutes:g} minutes, and {left_s / 60:.0f} were left."
    parts = [call(words, end - time.monotonic()) for words in commands(run, args)]
    part = "\n\n".join(parts) or "Left out: a modelled machine knows none of its arms."
    source = "measured" if args.prices is None else "modelled"
    starts = {"| ": f"| {source} ", "|-": "|----------"}  # rows, and the rule below the head
    return "\n".join(starts.get(line[:2], "") + line for line in part.splitlines())


def call(words: Sequence[str], left_s: float) -> str:
    """The command and what it writes."""
    shown = shlex.join(["python", *words[1:]])
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            out, err = process.communicate(timeout=max(left_s, 0.0))
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
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--device", metavar="NAME", help="as ggml names it, like CUDA0")
    prices = "predict on this modelled machine (bench/modelled.py) in place of measuring"
    where.add_argument("--prices", metavar="NAME", help=prices)
    add("--rpc", metavar="HOST:PORT", help="ggml-rpc-server that offers it")
    add("--stock", type=Path, required=True, metavar="DIR", help="unpatched llama.cpp for the device")
    add("--newer", type=Path, metavar="DIR", help="newer llama.cpp for the device")
    add("--newer-rpc", metavar="HOST:PORT", help="its ggml-rpc-server (default: that of --rpc)")
    add("--calibration", type=Path, metavar="FILE", help="for the arm by price")
    folder = "folder for generated models (default: %(default)s)"
    add("--folder", type=Path, default=Path("/dev/shm/bench"), metavar="DIR", help=folder)
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
        part = measure(run, args, end)
        failed = failed or "\n\nFailed: " in part
        with page.open("a", encoding="utf-8") as file:
            file.write(f"## {run.name}\n\n{part}\n\n")
    print(page.read_text(encoding="utf-8"))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
