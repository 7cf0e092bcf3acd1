# SPDX-License-Identifier: MIT
"""Devices of other machines, which llama.cpp's RPC servers offer. Loads only the libraries it is told."""

import ctypes
import select
import socket
import struct
from contextlib import closing, suppress
from pathlib import Path

from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.native.devices import Ggml
from pyhobbit.native.paths import LIB_DIR

PROTOCOL = (7, 0, 0)  # RPC_PROTO_*_VERSION of ggml-rpc.h
_HELLO = 14  # RPC_CMD_HELLO
_CAPABILITIES = 24  # bytes, RPC_CONN_CAPS_SIZE
_START = "start 'pyhobbit worker' there"
_TIMEOUT_S = 10
_PORTS = range(1, 65536)
_added: set[str] = set()  # endpoints that gave this process their devices


def add_rpc_servers(endpoints: str, lib_dir: Path = LIB_DIR) -> None:
    """Makes the devices of "HOST:PORT,..." this process's RPC0, RPC1 ... Raises ConfigError, HobbitError."""
    ggml = Ggml(lib_dir)
    rpc = ggml("backend_reg_by_name", "ps", b"RPC")
    address = ggml("backend_reg_get_proc_address", "pps", rpc, b"ggml_backend_rpc_add_server")
    add_server = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(address)
    check_rpc_servers(endpoints)
    for endpoint in endpoints.split(","):
        if endpoint in _added:
            continue
        server = add_server(endpoint.encode())
        if not server:
            raise HobbitError(f"the machine at {endpoint} offers no device; {_START}")
        ggml("backend_register", "vp", server)
        _added.add(endpoint)


def check_rpc_servers(endpoints: str) -> None:
    """Says hello to each server of "HOST:PORT,...". Raises ConfigError, HobbitError."""
    for endpoint in endpoints.split(","):
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal() or int(port) not in _PORTS:
            raise ConfigError(
                f"'{endpoint}' is not the address of another machine; write it like 10.0.0.2:50052"
            )
        try:
            with closing(socket.create_connection((host, int(port)), _TIMEOUT_S)) as connection:
                found = _hello(connection)
        except OSError as e:
            why = e.strerror or f"{e} after {_TIMEOUT_S} s; a worker serves one program at a time"
            raise HobbitError(f"no machine answers at {endpoint} ({why}); {_START}") from e
        if found is None:
            raise HobbitError(f"the program at {endpoint} is no pyhobbit worker; {_START}")
        if found != PROTOCOL:
            theirs, ours = (".".join(map(str, each)) for each in (found, PROTOCOL))
            raise HobbitError(
                f"the machine at {endpoint} speaks version {theirs} of the protocol, and this one {ours}; "
                "install the same pyhobbit on both"
            )


def _hello(connection: socket.socket) -> tuple[int, int, int] | None:
    """The server's version of the protocol; None where it answers in another one."""
    answer, size = b"", 8 + 4 + _CAPABILITIES
    start = struct.pack("<Q", size - 8)
    with suppress(ConnectionError):
        connection.sendall(struct.pack(f"<BQ{_CAPABILITIES}x", _HELLO, _CAPABILITIES))
        if not select.select([connection], [], [], _TIMEOUT_S / 2)[0]:
            connection.settimeout(_TIMEOUT_S / 2)
            connection.shutdown(socket.SHUT_WR)  # a program that waits for the rest of a line ends then
        while start.startswith(answer[:8]) and (part := connection.recv(size - len(answer))):
            answer += part
    is_worker = len(answer) == size and answer.startswith(start)
    return (answer[8], answer[9], answer[10]) if is_worker else None
