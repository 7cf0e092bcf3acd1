# SPDX-License-Identifier: MIT
"""Folders of the installed package."""

from importlib.util import find_spec
from pathlib import Path

_PACKAGE_DIR = Path(__file__).resolve().parent.parent


def _native_dir() -> Path:
    # An editable install keeps what was compiled beside the extension module, apart from the Python sources.
    spec = find_spec("pyhobbit._hobbit_c")
    return Path(spec.origin).resolve().parent if spec and spec.origin else _PACKAGE_DIR


LIB_DIR: Path = _native_dir() / "lib"
"""Shared libraries: libllama, libggml*, libggml-hobbit."""

BIN_DIR: Path = _native_dir() / "bin"
"""llama-server, llama-quantize, llama-perplexity, llama-bench."""

_INSTALLED = _native_dir() / "vendor"
VENDOR_DIR: Path = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE_DIR.parent / "vendor" / "llama.cpp"
"""llama.cpp's converter scripts: the installed copy, otherwise the checkout's unpacked tree."""
