# SPDX-License-Identifier: MIT
"""llama.cpp b11549 (vendor/llama.cpp-b11549.lock), through a llama-cpp-python that is older."""

import ctypes
from pathlib import Path
from typing import Any


def know_newer_fields(llama: Any, lib_dir: Path) -> None:
    """Adds the field of llama_context_params that llama-cpp-python 0.3.36 does not know: moe_cache_size.

    llama: the module llama_cpp.llama_cpp with the libraries of lib_dir. Others than b11549 lack the field.
    """
    ggml = ctypes.CDLL(str(lib_dir / "libggml-base.so"))
    if not hasattr(ggml, "ggml_backend_sched_set_copy_callback"):
        return
    fields = list(llama.llama_context_params._fields_)
    after = [name for name, _ in fields].index("type_v") + 1
    fields.insert(after, ("moe_cache_size", ctypes.c_size_t))
    newer = type("llama_context_params", (ctypes.Structure,), {"_fields_": fields})
    llama.llama_context_default_params.restype = newer
    llama.llama_init_from_model.argtypes = [llama.llama_model_p_ctypes, newer]
