# SPDX-License-Identifier: MIT
"""A device of ggml's with memory of its own, in the build of llama.cpp that the process uses.

    python -m bench.harness.ggml_device LIB_DIR NAME [--rpc HOST:PORT]

writes as JSON what it is.
"""

import ctypes
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.harness.system import option_parser
from pyhobbit.errors import HobbitError
from pyhobbit.native.devices import experts_on_cpu
from pyhobbit.native.rpc_servers import add_rpc_servers

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t


class GgmlDevice:
    """Holds nothing but the process's own libraries."""

    def __init__(self, lib_dir: Path, name: str, rpc: str | None = None) -> None:
        """rpc: server whose devices are added first, HOST:PORT. Raises HobbitError."""
        if rpc is not None:
            add_rpc_servers(rpc, lib_dir)
        self._libraries = [ctypes.CDLL(str(lib_dir / f"lib{part}.so")) for part in ("ggml", "ggml-base")]
        n_devices = self._function("ggml_backend_dev_count", _SIZE, library=0)()
        device_at = self._function("ggml_backend_dev_get", _POINTER, _SIZE, library=0)
        devices = [device_at(i) for i in range(n_devices)]
        names = [self._text("name", device) for device in devices]
        if name not in names:
            there_are = ", ".join(names)
            raise HobbitError(f"llama.cpp in {lib_dir} has no device '{name}': choose one of {there_are}")
        self.pointer: int = devices[names.index(name)]
        buffer_type = self._function("ggml_backend_dev_buffer_type", _POINTER, _POINTER)(self.pointer)
        if self._function("ggml_backend_buft_is_host", ctypes.c_bool, _POINTER)(buffer_type):
            raise HobbitError(f"the device '{name}' computes in host memory; name one with memory of its own")

    def _function(self, name: str, result: Any, *arguments: Any, library: int = 1) -> Any:
        function = self._libraries[library][name]  # an object of our own, unlike an attribute of the library
        function.restype, function.argtypes = result, arguments
        return function

    def _text(self, what: str, device: int) -> str:
        return self._function(f"ggml_backend_dev_{what}", ctypes.c_char_p, _POINTER)(device).decode()

    def memory(self) -> tuple[int, int]:
        """Bytes free, and in all, as far as the device says."""
        free, total = _SIZE(), _SIZE()
        self._function("ggml_backend_dev_memory", None, _POINTER, _POINTER, _POINTER)(
            self.pointer, ctypes.byref(free), ctypes.byref(total)
        )
        return free.value, total.value

    def only(self) -> "ctypes.Array[Any]":
        """The array for params.devices of a model; must live as long as the params."""
        return (_POINTER * 2)(self.pointer)  # NULL ends it

    def experts_on_cpu(self, n_layers: int) -> "ctypes.Array[Any]":
        """The array for params.tensor_buft_overrides, as by --n-cpu-moe; must live as long as the model."""
        return experts_on_cpu(n_layers, self._function("ggml_backend_cpu_buffer_type", _POINTER)())

    def describe(self) -> dict[str, Any]:
        """The device as the first line of a run tells it."""
        return {"description": self._text("description", self.pointer), "total_bytes": self.memory()[1]}


def tell(measure: Callable[[], Mapping[str, Any]]) -> int:
    """Writes the result of `measure` to standard output as JSON.

    Returns the exit status: 1, with a sentence on standard error, where it raises HobbitError.
    """
    try:
        found = measure()
    except HobbitError as e:
        print(f"bench: {e}", file=sys.stderr)
        return 1
    json.dump(found, sys.stdout)
    return 0


def main() -> int:
    """Returns the exit status."""
    parser = option_parser(__doc__)
    parser.add_argument("lib_dir", type=Path)
    parser.add_argument("name")
    parser.add_argument("--rpc")
    args = parser.parse_args()
    return tell(lambda: {"name": args.name, **GgmlDevice(args.lib_dir, args.name, args.rpc).describe()})


if __name__ == "__main__":
    sys.exit(main())
