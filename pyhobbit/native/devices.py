# SPDX-License-Identifier: MIT
"""The GPUs that llama.cpp finds, as its build can, and calls of its ggml."""

import ctypes
from collections.abc import Mapping
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


class Ggml:
    """Functions of one build's ggml, called by their names without ggml_, and by the types of their values.

    types: a letter for the result and one for each argument.
    """

    _TYPES: Mapping[str, Any] = {
        "p": ctypes.c_void_p, "i": ctypes.c_int, "n": ctypes.c_int64, "z": ctypes.c_size_t,
        "s": ctypes.c_char_p, "b": ctypes.c_bool, "v": None,
    }  # fmt: skip

    def __init__(self, folder: Path = LIB_DIR) -> None:
        names = (f"libggml{part}.so" for part in ("", "-base", "-cpu"))
        self._libraries = [ctypes.CDLL(str(folder / name)) for name in names if (folder / name).exists()]

    def __call__(self, name: str, types: str, *arguments: Any) -> Any:
        return self.function(name, types)(*arguments)

    def function(self, name: str, types: str) -> Any:
        library = next(each for each in self._libraries if hasattr(each, f"ggml_{name}"))
        function = library[f"ggml_{name}"]  # an object of our own, unlike an attribute of the library
        function.restype, *function.argtypes = (self._TYPES[letter] for letter in types)
        return function

    def devices(self) -> list[int]:
        """Pointers to all devices, the CPU included."""
        return [self("backend_dev_get", "pz", i) for i in range(self("backend_dev_count", "z"))]

    def text(self, what: str, device: int) -> str:
        """The name or description of a device."""
        return self(f"backend_dev_{what}", "sp", device).decode("utf-8", "replace")


def gpus() -> tuple[Gpu, ...]:
    """GPUs of this machine, and of the RPC servers that were added."""
    ggml = Ggml()
    kinds = {device: ggml("backend_dev_type", "ip", device) for device in ggml.devices()}
    return tuple(
        Gpu(ggml.text("name", device), ggml.text("description", device), kind == _INTEGRATED)
        for device, kind in kinds.items()
        if kind in (_APART, _INTEGRATED)
    )


def experts_on_cpu(n_layers: int, folder: Path = LIB_DIR) -> "ctypes.Array[Any]":
    """The array for params.tensor_buft_overrides, living as long. folder: of the ggml that computes."""
    cpu = Ggml(folder)("backend_cpu_buffer_type", "p")
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
