# SPDX-License-Identifier: MIT
"""Overwrites the routers' choices while a model computes, the same in any build of llama.cpp.

The callback is replay.c, compiled on first use: it is asked about every node of the graph, which takes Python
several milliseconds per token.
"""

import ctypes
import os
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.harness.system import FOLDER, ROOT
from pyhobbit.errors import HobbitError

_GGML = (ROOT / "vendor/llama.cpp/ggml", ROOT / "build/stock/vendor/llama.cpp/ggml")
_FLAGS = ("-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall")


def compiled(name: str, compiler: str, sources: Sequence[Path], *headers: Path, flags: Sequence[str]) -> Path:
    """A library, compiled against ggml's headers on first use by the program that the variable names.

    compiler: variable and usual program, like CC=cc.  Raises HobbitError without a compiler or headers.
    """
    path = (
        FOLDER / f"{name}-{zlib.crc32(b''.join(each.read_bytes() for each in (*sources, *headers))):08x}.so"
    )
    if path.exists():
        return path
    trees = [tree for tree in _GGML if (tree / "include/ggml.h").exists()]
    if not trees:
        raise HobbitError(f"{_GGML[0]}/include has no ggml.h; run 'make build' or 'make stock' in {ROOT}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    variable, _, usual = compiler.partition("=")
    program, made = os.environ.get(variable, usual), path.with_suffix(f".{os.getpid()}")
    include = [f"-isystem{trees[0]}/{folder}" for folder in ("include", "src")]
    try:
        subprocess.run([program, *_FLAGS, *flags, *include, *sources, "-o", made], check=True)
    except (OSError, subprocess.CalledProcessError) as e:
        raise HobbitError(f"{name} cannot be compiled with {program} ({e}); set {variable}") from e
    made.replace(path)
    return path


def library() -> Path:
    """The compiled callback. Raises HobbitError."""
    return compiled("replay", "CC=cc", [Path(__file__).with_name("replay.c")], flags=["-Wextra"])


class _State(ctypes.Structure):
    """struct hobbit_replay of replay.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("experts", "weights")),
        *((name, ctypes.c_int64) for name in ("n_rows", "n_layers", "n_used", "first_row", "n_tokens")),
        *((name, ctypes.c_void_p) for name in ("is_host", "get", "set", "probabilities")),
        ("error", ctypes.c_char_p),
    ]


class Replay:
    """The routing of one context: install() before it is made. Must outlive it."""

    def __init__(self, lib_dir: Path) -> None:
        """lib_dir: of the build of llama.cpp that computes."""
        self._library = ctypes.CDLL(str(library()))
        self._base = ctypes.CDLL(str(lib_dir / "libggml-base.so"))
        self._state = _State()
        self._state.is_host, self._state.get, self._state.set = (
            ctypes.cast(self._base[f"ggml_backend_{name}"], ctypes.c_void_p).value
            for name in ("buffer_is_host", "tensor_get", "tensor_set")
        )

    def install(self, llama: Any, params: Any) -> None:
        """Makes it the evaluation callback of a context with these llama_context_params."""
        function = ctypes.cast(self._library.hobbit_replay_eval, llama.ggml_backend_sched_eval_callback)
        params.cb_eval = self._callback = function
        params.cb_eval_user_data = ctypes.addressof(self._state)

    def use(self, experts: NDArray[np.int32], weights: NDArray[np.float32]) -> None:
        """Routes the next tokens by these arrays, [tokens, layers, used]. Weights are positive.

        Each token takes the next row, whatever its position; each row is replayed once.
        """
        self._arrays = np.ascontiguousarray(experts, np.int32), np.ascontiguousarray(weights, np.float32)
        self._state.experts, self._state.weights = (array.ctypes.data for array in self._arrays)
        self._state.n_rows, self._state.n_layers, self._state.n_used = experts.shape
        self._state.first_row = self._state.n_tokens = 0

    def stop(self) -> None:
        """Leaves the next choices to the model."""
        self._state.experts = None

    def begin(self, n_tokens: int) -> None:
        """Announces tokens that are computed at once, of which only the last one's logits are wanted."""
        self._state.first_row += self._state.n_tokens
        self._state.n_tokens = n_tokens

    @property
    def error(self) -> str | None:
        """Why a choice could not be replayed: the first reason."""
        return self._state.error.decode() if self._state.error else None
