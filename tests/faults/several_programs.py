# SPDX-License-Identifier: MIT
"""Programs that start at the same time in one memory cgroup, without --memory: none is killed.

    python tests/faults/several_programs.py [--programs 1 2 3] [--limit 700M] [--repeat N]      # as root

Each reads a prompt that uses most experts of a model that is larger than what is left for it. Prints the text
and peak of each, or the sentence with which it is refused. Exits with 1 if one ends in another way, or with
another text.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import models  # noqa: E402
import random_moe  # noqa: E402

from pyhobbit.settings.config import parse_size  # noqa: E402

SHAPE = random_moe.Shape(n_layer=4, n_embd=512, n_ff=512, n_expert=192, n_used=8)
CLEAR = ("not enough free memory", "does not fit into memory")
PROGRAM = """
import random, sys
from pyhobbit import Hobbit
numbers = random.Random(1)
options = {"hobbit.enable": True}
with Hobbit(sys.argv[1], n_ctx=512, n_batch=128, verbose=False, kv_overrides=options) as model:
    print("open", flush=True)
    sys.stdin.readline()
    model.eval([numbers.randrange(500) for _ in range(384)])
    tokens = []
    for _ in range(12):
        tokens.append(model.sample(temp=0.0))
        model.eval(tokens[-1:])
    print(tokens, model.stats().peak_rss_bytes >> 20)
"""


@contextlib.contextmanager
def cgroup(limit: int) -> Iterator[Path]:
    """A memory cgroup of v1 or v2; its file of processes."""
    v1 = Path("/sys/fs/cgroup/memory")
    folder = (v1 if v1.exists() else Path("/sys/fs/cgroup")) / f"hobbit-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / ("memory.limit_in_bytes" if v1.exists() else "memory.max")).write_text(str(limit))
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


def start(model: Path, processes: Path) -> subprocess.Popen[str]:
    """In the cgroup whose file of processes this is."""
    command = ["sh", "-c", f'echo $$ > {processes} && exec "$@"', "sh", sys.executable, "-P", "-c", PROGRAM]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*command, str(model)], **pipes, text=True)


def outcome(process: subprocess.Popen[str]) -> str:
    """Outcome of a program that was told to compute: its text, or its last sentence."""
    said, failed = process.communicate()
    if process.returncode == 0:
        text = hashlib.sha256(said.partition("]")[0].encode()).hexdigest()[:8]
        return f"text {text}, peak {said.split()[-1]} MiB"
    if process.returncode == 1 and any(clear in failed for clear in CLEAR):
        return "refused: " + failed.strip().splitlines()[-1].partition(": ")[2]
    return f"BAD, status {process.returncode}: {failed[-300:]}"


def together(model: Path, n: int, limit: int) -> list[str]:
    """Outcomes of n programs: all are open, or refused, before one computes."""
    with cgroup(limit) as processes:
        running = [start(model, processes) for _ in range(n)]
        for process in running:
            process.stdout.readline()
        for process in running:
            with contextlib.suppress(BrokenPipeError):  # one that was refused
                process.stdin.write("\n")
                process.stdin.flush()
        return [outcome(process) for process in running]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--limit", type=parse_size, default=parse_size("700M"))
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args()
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "random.gguf")
        random_moe.write_model(random_moe.declare("qwen3moe", SHAPE, "q8_0"), model, models.stock_dir())
        print(f"a model of {model.stat().st_size >> 20} MiB, a limit of {args.limit >> 20} MiB for all")
        for n in [n for n in args.programs for _ in range(args.repeat)]:
            ended = together(model, n, args.limit)
            print(*(f"{n} at once: {each}" for each in ended), sep="\n", flush=True)
            outcomes += ended
    kinds = Counter(each.partition(" ")[0].strip(",:") for each in outcomes)
    print(f"{len(outcomes)} programs: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items()))
    texts = {each.split()[1] for each in outcomes if each.startswith("text")}
    return 1 if kinds["BAD"] or len(texts) != 1 else 0


if __name__ == "__main__":
    sys.exit(main())
