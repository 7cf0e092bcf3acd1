# SPDX-License-Identifier: MIT
"""Runs of programs in Python, as forks of a process that has imported what they import.

A test run starts some of them a thousand times, and imports are most of such a start. Libraries of llama.cpp
are not loaded before the fork: each run loads its own, in its own environment.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_ASKING = threading.Lock()  # answers come in the order of questions


class Running:
    """A run that has begun: as much of subprocess.Popen as its callers need."""

    def __init__(self, parent: subprocess.Popen[bytes], asked: Mapping[str, Any]) -> None:
        self.args: list[str] = asked["args"]
        self.returncode: int | None = None
        self._parent = parent
        self.pid = self._ask(asked)
        self._ended = os.pidfd_open(self.pid)  # the parent keeps its status until it is asked for

    def _ask(self, question: object) -> int:
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        with _ASKING:
            self._parent.stdin.write(f"{json.dumps(question)}\n".encode())
            return int(self._parent.stdout.readline())

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = self._ask(self.pid)
            os.close(self._ended)
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Program:
    """MODULE:FUNCTION that returns an exit status, or "": a script, the first argument of a run.

    imports: modules of Python that it needs. path: the first place where it looks for modules; "" is none.
    """

    def __init__(self, main: str, imports: Sequence[str], path: str | Path = "") -> None:
        self._command = (sys.executable, "-P", __file__, str(path), main, *imports)

    def start(
        self, args: Sequence[object], files: Sequence[str], cwd: Path, env: Mapping[str, str]
    ) -> Running:
        """Begins a run. files: paths of its standard input, output and error output."""
        early = sorted(each for each in env.items() if _is_early(each[0]))
        asked = {"args": [*map(str, args)], "files": files, "cwd": str(cwd), "env": {**env}}
        return Running(_parent(self._command, *early), asked)

    def run(
        self,
        args: Sequence[object],
        stdin: str = "",
        timeout: float = 900,
        cwd: Path | None = None,
        env: Mapping[str, str] = os.environ,
    ) -> subprocess.CompletedProcess[str]:
        """Waits for a run's end, as subprocess.run() with captured output does."""
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / name for name in ("stdin", "stdout", "stderr")]
            files[0].write_text(stdin)
            running = self.start(args, [*map(str, files)], cwd or Path.cwd(), env)
            try:
                status = running.wait(timeout)
            except BaseException:
                running.kill()
                running.wait()
                raise
            out, err = (each.read_text() for each in files[1:])
        return subprocess.CompletedProcess([*map(str, args)], status, out, err)


# llama_cpp itself would load a library
FOR_LLAMA_CPP = [
    "cffi", "diskcache", "jinja2.ext", "jinja2.sandbox", "multiprocessing.context", "numpy.ctypeslib",
    "pprint", "typing_extensions", "uuid",
]  # fmt: skip
PYHOBBIT = Program(
    "pyhobbit.cli.main:main",
    [
        *FOR_LLAMA_CPP,
        "gguf",
        "pyhobbit.cli.options",
        "pyhobbit.cli.verbs",
        "pyhobbit.model.options_file",
        "statistics",
    ],
)

BENCH_WORKER = Program(
    "forked:measure_arm", [*FOR_LLAMA_CPP, "bench.harness.worker", "forked"], Path(__file__).parent
)
CONVERTER = Program("", ["torch", "transformers", "conversion.base"])  # with `conversion` on PYTHONPATH


def start_converter(
    command: Sequence[str], stdout: IO[bytes], stderr: IO[bytes], env: Mapping[str, str]
) -> Running:
    """Begins run_converter.py as subprocess.Popen(command) does."""
    files = [os.devnull, *(f"/proc/{os.getpid()}/fd/{each.fileno()}" for each in (stdout, stderr))]
    return CONVERTER.start(command[1:], files, Path.cwd(), env)


def run_for_bench(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs one of bench.harness.runner's commands as subprocess.run() does."""
    if list(command[1:]) != ["-m", "bench.harness.worker"]:
        return subprocess.run(command, **options)
    return BENCH_WORKER.run([], options["input"], options["timeout"], options["cwd"], options["env"])


def measure_arm() -> int:
    """The program bench.harness.worker."""
    from bench.harness import worker  # loads no library

    return worker.ended(lambda: worker.serve(worker.measure))


def _is_early(name: str) -> bool:
    """True for variables that are read before any line of Python."""
    return name.startswith(("LD_", "MALLOC_", "GLIBC_", "PYTHON"))


@functools.cache
def _parent(command: tuple[str, ...], *early: tuple[str, str]) -> subprocess.Popen[bytes]:
    env = {name: value for name, value in os.environ.items() if not _is_early(name)} | dict(early)
    pipe = subprocess.PIPE
    process = subprocess.Popen(  # without a buffer: select() then sees each line
        command, env=env, stdin=pipe, stdout=pipe, bufsize=0, start_new_session=True
    )
    atexit.register(process.communicate)  # it ends with its input
    return process


def _become(asked: Mapping[str, Any]) -> None:
    """Makes this process one that was started so."""
    for number, path in enumerate(asked["files"]):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)  # two may be one file
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])


def _fork(path: str, main: str, *imports: str) -> int:
    """Forks for each line of standard input and writes the process, or for a process its status; in a fork
    the status itself."""
    sys.path[:0] = [path] if path else []
    with contextlib.suppress(ImportError):  # the run says so
        for name in imports:
            importlib.import_module(name)
    gc.freeze()  # a collection in a fork would write to, and so copy, all of these objects
    for asked in map(json.loads, sys.stdin):
        if isinstance(asked, int):
            print(os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1]), flush=True)
        elif pid := os.fork():
            print(pid, flush=True)
        else:
            _become(asked)
            module, _, name = main.partition(":")
            sys.argv = [module, *asked["args"]] if module else asked["args"]
            if module:
                return getattr(importlib.import_module(module), name)()
            sys.path.insert(0, str(Path(sys.argv[0]).parent))
            runpy.run_path(sys.argv[0], run_name="__main__")
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(_fork(*sys.argv[1:]))
