# SPDX-License-Identifier: MIT
"""Ports for the servers of tests."""

import contextlib
import os
import random
import socket
from itertools import count

# Below the ports that the kernel gives to anybody, a block for each worker of pytest.
_N = 2000
_FIRST = 10_000 + _N * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 10)
_numbers = count(random.randrange(_N))


def free_port() -> int:
    """One that nobody takes before a server listens there."""
    while True:
        port = _FIRST + next(_numbers) % _N
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port
