# SPDX-License-Identifier: MIT
"""Folders of the installed package."""

from importlib.util import find_spec
from pathlib import Path

_PACKAGE_DIR = Path(__file__).resolve().parent.parent
# An editable install keeps what was compiled beside the extension module, apart from the Python sources.
_MODULE = find_spec("pyhobbit._hobbit_c")
_NATIVE_DIR = Path(_MODULE.origin).resolve().parent if _MODULE and _MODULE.origin else _PACKAGE_DIR

LIB_DIR: Path = _NATIVE_DIR / "lib"
"""Shared libraries: libllama, libggml*, libggml-hobbit."""

BIN_DIR: Path = _NATIVE_DIR / "bin"
"""llama-server, llama-quantize, llama-perplexity, llama-bench."""

_INSTALLED = _NATIVE_DIR / "vendor"
VENDOR_DIR: Path = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE_DIR.parent / "vendor" / "llama.cpp"
"""llama.cpp's converter scripts: the installed copy, otherwise the checkout's unpacked tree."""
