# SPDX-License-Identifier: MIT
"""A device of ggml's with memory of its own, in the build of llama.cpp that the process uses.

    python -m bench.harness.ggml_device LIB_DIR NAME [--rpc HOST:PORT] [--copies BYTES ...]

writes as JSON what it is, and how fast copies of these sizes reach it from host memory.
"""

import ctypes
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness.job import tell
from bench.tables import option_parser
from pyhobbit.errors import HobbitError
from pyhobbit.native.devices import experts_on_cpu
from pyhobbit.native.rpc_servers import add_rpc_servers

_MIN_BYTES = 64 << 20  # copied one after the other, for one figure
_REPETITIONS = 3
_GGML_TYPE_I8 = 24
_CONTEXT_BYTES = 4096  # one tensor without data
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t


class _InitParams(ctypes.Structure):
    """struct ggml_init_params of ggml.h."""

    _fields_ = [("mem_size", _SIZE), ("mem_buffer", _POINTER), ("no_alloc", ctypes.c_bool)]


class GgmlDevice:
    """Holds nothing but the process's own libraries."""

    def __init__(self, lib_dir: Path, name: str, rpc: str | None = None) -> None:
        """rpc: server whose devices are added first, HOST:PORT. Raises HobbitError."""
        if rpc is not None:
            add_rpc_servers(rpc, lib_dir)
        self._ggml, self._base = (
            ctypes.CDLL(str(lib_dir / f"lib{part}.so")) for part in ("ggml", "ggml-base")
        )
        n_devices = self._function("ggml_backend_dev_count", _SIZE, library=self._ggml)()
        device_at = self._function("ggml_backend_dev_get", _POINTER, _SIZE, library=self._ggml)
        devices = [device_at(i) for i in range(n_devices)]
        names = [self._text("name", device) for device in devices]
        if name not in names:
            there_are = ", ".join(names)
            raise HobbitError(f"llama.cpp in {lib_dir} has no device '{name}': choose one of {there_are}")
        self.pointer: int = devices[names.index(name)]
        self._buffer_type = self._function("ggml_backend_dev_buffer_type", _POINTER, _POINTER)(self.pointer)
        if self._function("ggml_backend_buft_is_host", ctypes.c_bool, _POINTER)(self._buffer_type):
            raise HobbitError(f"the device '{name}' computes in host memory; name one with memory of its own")

    def _function(self, name: str, result: Any, *arguments: Any, library: ctypes.CDLL | None = None) -> Any:
        # a function object of our own, unlike an attribute of the library
        function = (library or self._base)[name]
        function.restype, function.argtypes = result, arguments
        return function

    def _text(self, what: str, device: int) -> str:
        return self._function(f"ggml_backend_dev_{what}", ctypes.c_char_p, _POINTER)(device).decode()

    def description(self) -> str:
        """ggml's name of the device for people."""
        return self._text("description", self.pointer)

    def _cpu_buffer_type(self) -> int:
        return self._function("ggml_backend_cpu_buffer_type", _POINTER)()

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
        return experts_on_cpu(n_layers, self._cpu_buffer_type())

    #
    # copies
    #

    def copy_rate(self, n_bytes: int, *, locked: bool = False) -> float | None:
        """Bytes per second of copies of n_bytes each from host memory to the device, one after the other.

        locked: from memory that the device's driver has page-locked; None where it offers none.
        """
        host_buffer_type = self._function("ggml_backend_dev_host_buffer_type", _POINTER, _POINTER)
        source_type = host_buffer_type(self.pointer) if locked else self._cpu_buffer_type()
        if not source_type:
            return None
        transfer = (_POINTER, _POINTER, _SIZE, _SIZE)
        put, get = (self._function(f"ggml_backend_tensor_{what}", None, *transfer) for what in ("set", "get"))
        n_copies, last = -(-_MIN_BYTES // n_bytes), ctypes.create_string_buffer(1)
        rates = []
        own = self._buffer_type
        with self._bytes_in(source_type, n_bytes) as source, self._bytes_in(own, n_bytes) as there:
            data = self._function("ggml_get_data", _POINTER, _POINTER)(source)
            ctypes.memset(data, 1, n_bytes)
            for _ in range(1 + _REPETITIONS):  # the first one brings in the memory
                start = time.perf_counter()
                for _ in range(n_copies):
                    put(there, data, 0, n_bytes)
                get(there, last, n_bytes - 1, 1)  # RPC returns before the bytes have arrived
                rates.append(n_copies * n_bytes / (time.perf_counter() - start))
        return median(rates[1:])

    @contextmanager
    def _bytes_in(self, buffer_type: int, n_bytes: int) -> Iterator[int]:
        """A tensor in a buffer of its own. Raises HobbitError."""
        context = self._function("ggml_init", _POINTER, _InitParams)(_InitParams(_CONTEXT_BYTES, None, True))
        new_tensor = self._function("ggml_new_tensor_1d", _POINTER, _POINTER, ctypes.c_int, ctypes.c_int64)
        tensor = new_tensor(context, _GGML_TYPE_I8, n_bytes)
        allocate = self._function("ggml_backend_alloc_ctx_tensors_from_buft", _POINTER, _POINTER, _POINTER)
        buffer = allocate(context, buffer_type)
        try:
            if not buffer:
                raise HobbitError(f"there are no {n_bytes} bytes to try copies to the device with")
            yield tensor
        finally:
            self._function("ggml_backend_buffer_free", None, _POINTER)(buffer)
            self._function("ggml_free", None, _POINTER)(context)


def describe(device: GgmlDevice, name: str, sizes: Sequence[int]) -> dict[str, Any]:
    """copies: bytes per second by size; locked: from page-locked memory, of the largest size."""
    free, total = device.memory()
    return {
        "name": name,
        "description": device.description(),
        "free_bytes": free,
        "total_bytes": total,
        "copies": {str(size): device.copy_rate(size) for size in sizes},
        "locked": device.copy_rate(max(sizes), locked=True) if sizes else None,
    }


def main() -> int:
    """Returns the exit status: 1, with a sentence on standard error, where there is no such device."""
    parser = option_parser(__doc__)
    parser.add_argument("lib_dir", type=Path)
    parser.add_argument("name")
    parser.add_argument("--rpc")
    parser.add_argument("--copies", type=int, nargs="+", default=[])
    args = parser.parse_args()
    return tell(lambda: describe(GgmlDevice(args.lib_dir, args.name, args.rpc), args.name, args.copies))


if __name__ == "__main__":
    sys.exit(main())
