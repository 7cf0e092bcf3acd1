# SPDX-License-Identifier: MIT
"""A command that runs while a server is idle."""

import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from servers import wait_until

from pyhobbit.quality.idle import watch

COUNTING = """
import os, sys, time
print(os.getpid(), file=open(sys.argv[1] + ".pid", "w"))
while True:
    print("x", end="", file=open(sys.argv[1], "a"))
    time.sleep(0.01)
"""


def test_it_runs_while_the_server_is_idle_and_ends_with_it(tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    ours, servers = socket.socketpair()

    def size() -> int:
        return out.stat().st_size if out.exists() else 0

    def is_stopped() -> bool:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    with ours, servers, ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch, ours, log, [sys.executable, "-c", COUNTING, str(out)], 0.05)
        time.sleep(0.3)
        assert size() == 0, "it does not wait until the server is idle"
        servers.send(b"0")
        wait_until(lambda: size() > 0)
        pid = (tmp_path / "out.pid").read_text().strip()
        servers.send(b"1")
        wait_until(is_stopped)
        before = size()
        time.sleep(0.3)
        assert size() == before
        servers.send(b"01")  # a request in between
        time.sleep(0.3)
        assert size() == before
        servers.send(b"0")
        wait_until(lambda: size() > before)
        servers.send(b"1")
        wait_until(is_stopped)
        servers.close()
        watching.result(120)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(("status", "said"), [(0, "applies from the next start"), (1, "failed")])
def test_its_end_is_told_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], status: int, said: str
) -> None:
    ours, servers = socket.socketpair()
    script = f"print('what it says'); raise SystemExit({status})"
    with ours, servers:
        servers.send(b"0")
        watch(ours, tmp_path / "log", [sys.executable, "-c", script], 0.05)
    assert capfd.readouterr().err == f"pyhobbit: the calibration {said}; see {tmp_path / 'log'}\n"
    assert (tmp_path / "log").read_text() == "what it says\n"
