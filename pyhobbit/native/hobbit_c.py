# SPDX-License-Identifier: MIT
"""The C interfaces of hobbit and of ggml's types through cffi, without llama.cpp."""

from pyhobbit.errors import HobbitError

REINSTALL = "reinstall pyhobbit with: pip install ."
try:
    from pyhobbit._hobbit_c import ffi as ffi
    from pyhobbit._hobbit_c import lib as lib
except ImportError as e:
    raise HobbitError(f"pyhobbit's native module cannot be loaded ({e}); {REINSTALL}") from e
