# SPDX-License-Identifier: MIT
"""The declarations of hobbit.h, parsed once where a process forks others."""

from pathlib import Path

from cffi import FFI

from pyhobbit.native.build import declarations

HEADER = Path(__file__).resolve().parent.parent / "ggml_ext/include/hobbit.h"
ffi = FFI()
ffi.cdef(declarations(HEADER.read_text(encoding="utf-8")))
