# SPDX-License-Identifier: MIT
"""Commands under a memory limit, measured from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Outcome:
    """peak_rss: bytes, of the command's process, by the kernel's count (what /usr/bin/time -v prints)."""

    returncode: int
    stdout: str
    stderr: str
    peak_rss: int


class NoCgroupError(RuntimeError):
    """No memory cgroup can be made here; the message says why."""


@contextmanager
def memory_cgroup(limit: int) -> Iterator[Path]:
    """A memory cgroup (v1 or v2) of `limit` bytes, page cache included. Yields its list of processes."""
    v2 = (CGROUP_ROOT / "cgroup.controllers").exists()
    parent = CGROUP_ROOT if v2 else CGROUP_ROOT / "memory"
    folder = parent / f"hobbit-{uuid.uuid4().hex[:8]}"
    limits = {"memory.max": limit, "memory.swap.max": 0} if v2 else {"memory.limit_in_bytes": limit}
    try:
        if v2 and "memory" not in (parent / "cgroup.subtree_control").read_text().split():
            (parent / "cgroup.subtree_control").write_text("+memory")
        folder.mkdir()
    except OSError as e:
        raise NoCgroupError(f"cannot make a memory cgroup in {parent}: {e.strerror}") from e
    try:
        for name, value in limits.items():
            if (folder / name).exists() or name == next(iter(limits)):
                (folder / name).write_text(str(value))
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


def run(command: Sequence[object], cgroup: Path | None = None, timeout_s: float = 600) -> Outcome:
    """Runs the command, in the cgroup if one is given, which it joins before it starts."""
    joined = [str(part) for part in command]
    if cgroup is not None:
        joined = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(cgroup), *joined]
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        tempfile.NamedTemporaryFile("r") as report,
    ):
        measured = [sys.executable, "-S", "-c", _MEASURE, report.name, *joined]
        with subprocess.Popen(
            measured, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
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
