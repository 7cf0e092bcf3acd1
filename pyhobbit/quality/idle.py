# SPDX-License-Identifier: MIT
"""Calibrates while a server has nothing to compute: python -m pyhobbit.quality.idle SOCKET COMMAND ..."""

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pyhobbit.errors import ConfigError
from pyhobbit.model.file_names import calibration_path
from pyhobbit.native.files import read_text
from pyhobbit.settings.config import CacheConfig, format_size

_IDLE_S = 2.0


def calibrate_beside(
    model: Path, text: Path | None, cache: CacheConfig
) -> tuple[dict[str, str], CacheConfig]:
    """Calibrates beside the server to be; returns a row about it, and settings without its memory."""
    if text is None:
        return {}, cache
    stored = calibration_path(model)
    if stored.exists():
        return {"idle": f"does not calibrate: {stored.name} is there; remove it to do so"}, cache
    if cache.memory is None:
        raise ConfigError("--calibrate-idle takes a quarter of --memory; give that")
    from pyhobbit.quality.stored import Calibration  # takes some time to import

    Calibration.check_place(model)
    read_text(text)
    share, log = cache.memory // 4, stored.with_suffix(".log")
    command = [sys.executable, "-m", "pyhobbit", "calibrate", model, "--text", text, "--memory", share]
    _start([*map(str, command), *([f"--sidecar={cache.sidecar}"] if cache.sidecar else [])], log)
    row = f"calibrates on {text.name}, with {format_size(share)}; {log} says how far it is"
    return {"idle": row}, replace(cache, memory=cache.memory - share)


def _start(command: Sequence[str], log: Path) -> None:
    ours, servers = socket.socketpair()
    watcher = [sys.executable, "-m", __name__, str(ours.fileno()), str(log), *command]
    # Ctrl-C is for the server, with which the command ends
    subprocess.Popen(watcher, stdin=subprocess.DEVNULL, pass_fds=[ours.fileno()], start_new_session=True)
    servers.set_inheritable(True)
    os.environ["HOBBIT_BUSY_SOCKET"] = str(servers.detach())  # see server_hobbit_say_busy


def watch(server: socket.socket, log: Path, command: Sequence[str], idle_s: float = _IDLE_S) -> None:
    """Runs the command while the server is idle, until either ends; a request stops it where it is."""
    process: subprocess.Popen[bytes] | None = None
    is_busy = True
    with log.open("wb") as out:
        while process is None or process.poll() is None:
            if not select.select([server], [], [], None if is_busy else idle_s)[0]:
                process = process or subprocess.Popen(["nice", "-n", "19", *command], stdout=out, stderr=out)
                process.send_signal(signal.SIGCONT)
                continue
            said = server.recv(64)
            is_busy = said.endswith(b"1")
            if process is not None:
                process.send_signal(signal.SIGSTOP if said else signal.SIGKILL)
            if not said:
                break
        else:
            done = "failed" if process.returncode else "applies from the next start"
            print(f"pyhobbit: the calibration {done}; see {log}", file=sys.stderr)
    if process is not None:
        process.wait()


if __name__ == "__main__":
    watch(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]), sys.argv[3:])
