# SPDX-License-Identifier: MIT
"""Commands measured from outside, under a memory limit if need be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# The kernel counts what a process held before its exec: without a small one between, the tests' own memory.
_MEASURE = """
import os, sys
report, *command = sys.argv[1:]
pid = os.spawnvp(os.P_NOWAIT, command[0], command)
_, status, usage = os.wait4(pid, 0)
with open(report, "w") as file:
    file.write(f"{os.waitstatus_to_exitcode(status)} {usage.ru_maxrss}")
"""


@dataclass(frozen=True)
class Outcome:
    """peak_rss: bytes, of the command's process, by the kernel's count (what /usr/bin/time -v prints)."""

    returncode: int
    stdout: str
    stderr: str
    peak_rss: int


def run(command: Sequence[object], cgroup: Path | None = None, timeout_s: float = 600) -> Outcome:
    """Runs the command, which joins the cgroup with this list of processes, if given, before it starts."""
    joined = [str(part) for part in command]
    if cgroup is not None:
        joined = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(cgroup), *joined]
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        tempfile.NamedTemporaryFile("r") as report,
    ):
        measured = [sys.executable, "-S", "-c", _MEASURE, report.name, *joined]
        users = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
        with subprocess.Popen(
            measured, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True, env=users
        ) as process:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        returncode, peak_rss = map(int, report.read().split())
        out.seek(0)
        err.seek(0)
        unit = 1 if sys.platform == "darwin" else 1024
        return Outcome(
            returncode,
            out.read().decode(errors="replace"),
            err.read().decode(errors="replace"),
            peak_rss * unit,
        )
