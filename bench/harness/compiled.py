# SPDX-License-Identifier: MIT
"""Libraries of C and C++ that the benches compile on first use, against ggml's headers."""

import os
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path

from bench.tables import FOLDER, ROOT
from pyhobbit.errors import HobbitError

_GGML = (ROOT / "vendor/llama.cpp/ggml", ROOT / "build/stock/vendor/llama.cpp/ggml")
_FLAGS = ("-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall")
_COMPILERS = {".c": ("CC", "cc"), ".cpp": ("CXX", "c++")}


def compiled(
    name: str, sources: Sequence[Path], headers: Sequence[Path] = (), flags: Sequence[str] = ()
) -> Path:
    """The library. Raises HobbitError without a compiler, or without llama.cpp's sources.

    sources: all of C, or all of C++.  headers: their own ones.
    """
    text = b"".join(path.read_bytes() for path in (*sources, *headers))
    path = FOLDER / f"{name}-{zlib.crc32(text):08x}.so"
    if path.exists():
        return path
    trees = [tree for tree in _GGML if (tree / "include/ggml.h").exists()]
    if not trees:
        raise HobbitError(f"{_GGML[0]}/include has no ggml.h; run 'make build' or 'make stock' in {ROOT}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    made = path.with_suffix(f".{os.getpid()}")
    variable, usual = _COMPILERS[sources[0].suffix]
    compiler = os.environ.get(variable, usual)
    include = [f"-isystem{trees[0]}/{folder}" for folder in ("include", "src")]
    try:
        subprocess.run([compiler, *_FLAGS, *flags, *include, *sources, "-o", made], check=True)
    except (OSError, subprocess.CalledProcessError) as e:
        raise HobbitError(f"{name} cannot be compiled with {compiler} ({e}); set {variable}") from e
    made.replace(path)
    return path
