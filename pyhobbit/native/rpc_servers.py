# SPDX-License-Identifier: MIT
"""Devices of other machines, which llama.cpp's RPC servers offer. Loads only the libraries it is told."""

import contextlib
import ctypes
import socket
from pathlib import Path

from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.native.paths import LIB_DIR

_TIMEOUT_S = 10
_PORTS = range(1, 65536)


def add_rpc_servers(endpoints: str, lib_dir: Path = LIB_DIR) -> None:
    """Makes the devices of "HOST:PORT,..." devices of this process: RPC0, RPC1 and so on, in this order.

    lib_dir: of the build of llama.cpp.  Raises ConfigError, HobbitError: ggml would end the process where a
    server does not answer.
    """
    ggml, base = (ctypes.CDLL(str(lib_dir / name)) for name in ("libggml.so", "libggml-base.so"))
    ggml.ggml_backend_reg_by_name.restype = ctypes.c_void_p
    base.ggml_backend_reg_get_proc_address.restype = ctypes.c_void_p
    rpc = ctypes.c_void_p(ggml.ggml_backend_reg_by_name(b"RPC"))
    address = base.ggml_backend_reg_get_proc_address(rpc, b"ggml_backend_rpc_add_server")
    add_server = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(address)
    for endpoint in endpoints.split(","):
        _check_listening(endpoint)
        server = add_server(endpoint.encode())
        if not server:
            raise HobbitError(f"the RPC server at {endpoint} offers no device; start it with one")
        ggml.ggml_backend_register(ctypes.c_void_p(server))


def _check_listening(endpoint: str) -> None:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or int(port) not in _PORTS:
        raise ConfigError(f"'{endpoint}' is not the address of an RPC server; write it like 10.0.0.2:50052")
    try:
        with contextlib.closing(socket.create_connection((host, int(port)), _TIMEOUT_S)):
            pass
    except OSError as e:
        raise HobbitError(
            f"no RPC server answers at {endpoint} ({e.strerror or e}); start ggml-rpc-server there"
        ) from e
