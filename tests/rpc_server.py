# SPDX-License-Identifier: MIT
"""ggml's RPC server with the CPU as its device, until it is killed: python rpc_server.py LIB_DIR PORT"""

import ctypes
import sys
from pathlib import Path


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
