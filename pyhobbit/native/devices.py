# SPDX-License-Identifier: MIT
"""The GPUs that llama.cpp finds, as its build can."""

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyhobbit.native.paths import LIB_DIR

_APART, _INTEGRATED = 1, 2  # enum ggml_backend_dev_type: GPUs with memory of their own, and others
_DEVICE_FILES = ("nvidia[0-9]*", "kfd", "dri/renderD*")
_BESIDE_GPUS = ("base", "cpu", "hobbit", "rpc")  # libraries of ggml that bring no GPU of this machine
_NAMES = {"cuda": "CUDA", "hip": "ROCm", "vulkan": "Vulkan"}


@dataclass(frozen=True)
class Gpu:
    """A GPU. name: as --device takes it.  description: its driver's."""

    name: str
    description: str
    is_integrated: bool = False


class _BufferTypeOverride(ctypes.Structure):
    """struct llama_model_tensor_buft_override of llama.h."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p)]


def _function(library: str, name: str, result: type, *arguments: type) -> "ctypes._NamedFuncPointer":
    function = ctypes.CDLL(str(LIB_DIR / f"lib{library}.so"))[name]  # a new object, unlike an attribute
    function.restype, function.argtypes = result, arguments
    return function


def gpus() -> tuple[Gpu, ...]:
    """GPUs of this machine, and of the RPC servers that were added."""
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    n_devices = _function("ggml", "ggml_backend_dev_count", ctypes.c_size_t)()
    at = _function("ggml", "ggml_backend_dev_get", pointer, ctypes.c_size_t)
    kind = _function("ggml-base", "ggml_backend_dev_type", ctypes.c_int, pointer)
    name = _function("ggml-base", "ggml_backend_dev_name", text, pointer)
    description = _function("ggml-base", "ggml_backend_dev_description", text, pointer)
    found = [device for device in map(at, range(n_devices)) if kind(device) in (_APART, _INTEGRATED)]
    return tuple(
        Gpu(name(each).decode(), description(each).decode("utf-8", "replace"), kind(each) == _INTEGRATED)
        for each in found
    )


def experts_on_cpu(n_layers: int, cpu: int | None = None) -> "ctypes.Array[Any]":
    """The array for params.tensor_buft_overrides, living as long. cpu: buffer type of another ggml."""
    cpu = cpu or _function("ggml-base", "ggml_backend_cpu_buffer_type", ctypes.c_void_p)()
    overrides = (_BufferTypeOverride * (n_layers + 1))()  # no pattern ends it
    for layer in range(n_layers):
        pattern = rf"blk\.{layer}\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # common/common.h
        overrides[layer] = _BufferTypeOverride(pattern.encode(), cpu)
    return overrides


def gpu_backends() -> tuple[str, ...]:
    """Names of the GPU backends that this build has, like CUDA or Vulkan, with or without a driver."""
    names = (path.stem.removeprefix("libggml-") for path in sorted(LIB_DIR.glob("libggml-*.so")))
    return tuple(_NAMES.get(each, each) for each in names if not each.startswith(_BESIDE_GPUS))


def has_gpu() -> bool:
    """True where llama.cpp finds a GPU, or the kernel has one that this build cannot use."""
    return bool(gpus()) or any(next(Path("/dev").glob(each), None) for each in _DEVICE_FILES)
