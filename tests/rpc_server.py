# SPDX-License-Identifier: MIT
"""ggml's RPC server with the CPU as its device, until it is killed: python rpc_server.py LIB_DIR PORT"""

import contextlib
import ctypes
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ports import free_port


@contextlib.contextmanager
def running(lib_dir: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address of a server, HOST:PORT, and its process."""
    port = free_port()
    with subprocess.Popen([sys.executable, __file__, lib_dir, str(port)]) as process:
        try:
            _wait_for(port)
            yield f"127.0.0.1:{port}", process
        finally:
            process.kill()


def _wait_for(port: int) -> None:
    for _ in range(1200):
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.1)
    raise AssertionError("the RPC server does not listen")


def main() -> None:
    lib_dir, port = Path(sys.argv[1]), int(sys.argv[2])
    ggml = ctypes.CDLL(str(lib_dir / "libggml.so"))
    ggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    cpu = ctypes.c_void_p(ggml.ggml_backend_dev_by_type(0))
    rpc = ctypes.CDLL(str(lib_dir / "libggml-rpc.so"))
    size = ctypes.c_size_t
    rpc.ggml_backend_rpc_start_server(f"127.0.0.1:{port}".encode(), None, size(2), size(1), ctypes.byref(cpu))


if __name__ == "__main__":
    main()
