# SPDX-License-Identifier: MIT
"""ik_llama.cpp by its own package, under llama.cpp's names as far as a measuring process calls them."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any


class IkLlama:
    """The package below a folder, where pip's --target put it. One context at a time."""

    LLAMA_LOAD_MODE_NONE, LLAMA_LOAD_MODE_MMAP = False, True
    LLAMA_FLASH_ATTN_TYPE_DISABLED, LLAMA_FLASH_ATTN_TYPE_ENABLED = False, True

    def __init__(self, folder: Path) -> None:
        sys.path.insert(0, str(folder))
        self._own: Any = import_module("ik_llama_cpp._ctypes_api")
        self._n_past = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def llama_model_load_from_file(self, path: bytes, params: Any) -> Any:
        params.use_mmap, params.repack_tensors = params.load_mode, params.use_extra_bufts
        return self._own.llama_model_load_from_file(path, params)

    def llama_init_from_model(self, model: Any, params: Any) -> Any:
        if hasattr(params, "flash_attn_type"):  # else by its own default
            params.flash_attn = params.flash_attn_type
        return self._own.llama_init_from_model(model, params)

    def llama_get_memory(self, context: Any) -> Any:
        return context

    def llama_memory_clear(self, context: Any, _data: bool) -> None:
        self._own.llama_kv_cache_clear(context)
        self._n_past = 0

    def llama_batch_get_one(self, tokens: Any, n_tokens: int) -> Any:
        at, self._n_past = self._n_past, self._n_past + n_tokens
        return self._own.llama_batch(n_tokens, tokens, all_pos_0=at, all_pos_1=1)

    def llama_get_logits(self, context: Any) -> Any:
        return self._own.llama_get_logits_ith(context, -1)

    def llama_synchronize(self, _context: Any) -> None:
        """On a CPU a decoded batch is computed."""

    def llama_model_free(self, model: Any) -> None:
        self._own.llama_free_model(model)
