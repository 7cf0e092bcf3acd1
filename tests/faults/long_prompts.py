# SPDX-License-Identifier: MIT
"""The peak of memory by the length of a request: a server and a Python program bounded to 200M.

    python tests/faults/long_prompts.py [MEGABYTES ...]

Each size has a process of its own. One text of so many MB is sent to /completion, or given to Hobbit.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import models  # noqa: E402
import servers  # noqa: E402

SIZES = (0, 1, 5, 20, 50, 80, 100)
BOUND = "200M"
PROGRAM = """
import re, sys
from pyhobbit import Hobbit
from pyhobbit.errors import HobbitError
said = "answered"
with Hobbit(sys.argv[1], memory=sys.argv[3], n_ctx=2048, verbose=False) as model:
    text = "x = 1\\n" * (int(sys.argv[2]) * 10**6 // 6)
    try:
        model(text or "x", max_tokens=4)
    except HobbitError as e:
        said = str(e)[:60]
held = len(text) >> 20
print(int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) >> 10, held, said, sep="|")
"""


def of_server(model: Path, megabytes: int, folder: Path) -> tuple[int, str]:
    with servers.serving(model, folder / "log", "--memory", BOUND, "--ctx-size", 2048) as server:
        said = "connection closed"
        with contextlib.suppress(ConnectionError):
            answer = server.request(
                "/completion", {"prompt": "x = 1\n" * (megabytes * 10**6 // 6) or "x", "n_predict": 4}
            )
            said = str(answer.status)
        assert server.complete(n=4)
        return server.peak() >> 20, said


def of_python(model: Path, megabytes: int) -> tuple[str, ...]:
    command = [sys.executable, "-P", "-c", PROGRAM, str(model), str(megabytes), BOUND]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return tuple(done.stdout.strip().split("|"))


def main() -> None:
    sizes = [int(argument) for argument in sys.argv[1:]] or SIZES
    model = models.tiny_tiers("f16", "q4_0")
    print(f"{'MB':>5} {'server, MiB':>12} {'answer':>18} {'Python, MiB':>12} {'of it the text':>15}  error")
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in sizes:
            served, answer = of_server(model, megabytes, Path(folder))
            peak, text, said = of_python(model, megabytes)
            print(f"{megabytes:5} {served:12} {answer:>18} {peak:>12} {text:>15}  {said}", flush=True)


if __name__ == "__main__":
    main()
