# SPDX-License-Identifier: MIT
"""Programs that start at the same time in one memory cgroup, without --memory: none is killed.

    python tests/faults/several_programs.py [--programs 1 2 3] [--limit 700M]      # as root

Each reads a prompt that uses most experts of a model that is larger than what is left for it. Prints the exit
status, peak and text of each.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import models  # noqa: E402
import random_moe  # noqa: E402

from pyhobbit.settings.config import parse_size  # noqa: E402

SHAPE = random_moe.Shape(n_layer=4, n_embd=512, n_ff=512, n_expert=192, n_used=8)
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


@contextmanager
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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--limit", type=parse_size, default=parse_size("700M"))
    args = parser.parse_args()
    n_killed = 0
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "random.gguf")
        random_moe.write_model(random_moe.declare("qwen3moe", SHAPE, "q8_0"), model, models.stock_dir())
        print(f"a model of {model.stat().st_size >> 20} MiB, a limit of {args.limit >> 20} MiB for all")
        for n in args.programs:
            with cgroup(args.limit) as processes:
                command = [
                    "sh",
                    "-c",
                    f'echo $$ > {processes} && exec "$@"',
                    "sh",
                    sys.executable,
                    "-P",
                    "-c",
                ]
                running = [
                    subprocess.Popen(
                        [*command, PROGRAM, str(model)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                    )
                    for _ in range(n)
                ]
                for process in running:  # all are open before one computes
                    process.stdout.readline()
                for process in running:
                    process.stdin.write("\n")
                    process.stdin.close()
                for process in running:
                    said, failed = process.stdout.read(), process.stderr.read()
                    n_killed += process.wait() < 0
                    text = hashlib.sha256(said.partition("]")[0].encode()).hexdigest()[:8]
                    peak = re.findall(r"(\d+)$", said.strip())
                    line = f"{n} at once: status {process.returncode}, peak {peak} MiB, text {text}"
                    print(line, failed[-300:])
    return 1 if n_killed else 0


if __name__ == "__main__":
    sys.exit(main())
