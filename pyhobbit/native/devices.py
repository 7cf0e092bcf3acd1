# SPDX-License-Identifier: MIT
"""The GPUs that llama.cpp finds, as its build can."""

import ctypes
from dataclasses import dataclass

from pyhobbit.native.paths import LIB_DIR

_GPU_TYPES = (1, 2)  # enum ggml_backend_dev_type: with memory of its own, and integrated
_BESIDE_GPUS = {"CPU", "RPC", "HOBBIT"}  # backends that bring no GPU of this machine


@dataclass(frozen=True)
class Gpu:
    """name: as --device takes it.  description: of its driver."""

    name: str
    description: str


def _function(library: str, name: str, result: type, *arguments: type) -> "ctypes._NamedFuncPointer":
    function = ctypes.CDLL(str(LIB_DIR / f"lib{library}.so"))[name]  # a new object, unlike an attribute
    function.restype, function.argtypes = result, arguments
    return function


def gpus() -> tuple[Gpu, ...]:
    """Those of this machine, and of the RPC servers that were added."""
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    n_devices = _function("ggml", "ggml_backend_dev_count", ctypes.c_size_t)()
    at = _function("ggml", "ggml_backend_dev_get", pointer, ctypes.c_size_t)
    kind = _function("ggml-base", "ggml_backend_dev_type", ctypes.c_int, pointer)
    name = _function("ggml-base", "ggml_backend_dev_name", text, pointer)
    description = _function("ggml-base", "ggml_backend_dev_description", text, pointer)
    found = [device for device in map(at, range(n_devices)) if kind(device) in _GPU_TYPES]
    return tuple(Gpu(name(each).decode(), description(each).decode("utf-8", "replace")) for each in found)


def gpu_backends() -> tuple[str, ...]:
    """Names of the GPU backends of this build, like CUDA or Vulkan."""
    n_backends = _function("ggml", "ggml_backend_reg_count", ctypes.c_size_t)()
    at = _function("ggml", "ggml_backend_reg_get", ctypes.c_void_p, ctypes.c_size_t)
    name = _function("ggml-base", "ggml_backend_reg_name", ctypes.c_char_p, ctypes.c_void_p)
    names = (name(at(i)).decode() for i in range(n_backends))
    return tuple(each for each in names if each not in _BESIDE_GPUS)
