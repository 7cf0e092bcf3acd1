# SPDX-License-Identifier: MIT
"""Parameters that llama_cpp.Llama derives from its keywords."""

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pyhobbit.errors import HobbitError
from pyhobbit.hobbit.text_drafts import TextDrafts
from pyhobbit.native.ffi import llama

if TYPE_CHECKING:
    from pyhobbit.engine.llama import Model, SetContext, SetModel

N_CTX = N_BATCH = 512  # Llama's defaults
_ALL_LAYERS = 0x7FFFFFFF
# Keywords that go to llama.cpp as they are.
_KEYWORDS = ("offload_kqv", "op_offload", "swa_full", "type_k", "type_v")


def given_batch(arguments: Mapping[str, Any]) -> int | None:
    """Tokens per pass; None where they are chosen. arguments: of Hobbit."""
    given = [arguments.get(name) for name in ("n_batch", "n_ubatch")]
    if given == [None, None] and _logits_read(arguments) is not None:
        return None
    return min(each or N_BATCH for each in given)


def set_context(arguments: Mapping[str, Any]) -> "SetContext":
    """As Llama does it, for what decides how much memory a context takes. arguments: of Hobbit."""

    def fill(params: Any, model: "Model") -> None:
        if arguments.get("draft_model") and not n_drafts(arguments) and model.has_state():
            raise HobbitError(
                f"{model.path.name} has layers whose state cannot go back, as drafts need; "
                "leave draft_model out, or use TextDrafts"
            )
        n_ctx = arguments.get("n_ctx", N_CTX) or model.n_ctx_train()
        params.n_ctx = n_ctx
        params.n_batch = min(n_ctx, arguments.get("n_batch", N_BATCH))
        params.n_ubatch = min(params.n_batch, arguments.get("n_ubatch", N_BATCH))
        params.embeddings = bool(arguments.get("embedding"))
        if params.embeddings:
            params.n_seq_max = min(params.n_batch, llama.llama_max_parallel_sequences())
            params.kv_unified = True
        enabled, disabled = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED, llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.flash_attn_type = enabled if arguments["flash_attn"] else disabled
        for name in _KEYWORDS:
            if arguments.get(name) is not None:
                setattr(params, name, arguments[name])
        set_own(params, arguments)

    return fill


def set_model(arguments: Mapping[str, Any]) -> "SetModel":
    """As Llama does it, for what decides which devices have layers. arguments: of Hobbit."""
    split = arguments.get("tensor_split")
    c_split = None if split is None else (ctypes.c_float * llama.LLAMA_MAX_DEVICES)(*split)

    def fill(params: Any) -> None:
        n_layers = arguments.get("n_gpu_layers", 0)
        params.n_gpu_layers = _ALL_LAYERS if n_layers == -1 else n_layers
        params.split_mode = arguments.get("split_mode", llama.LLAMA_SPLIT_MODE_LAYER)
        params.main_gpu = arguments.get("main_gpu", 0)
        if c_split is not None:
            params.tensor_split = c_split

    return fill


def set_own(params: Any, arguments: Mapping[str, Any]) -> None:
    """Sets the parameters in which a Hobbit's context differs from a Llama's with the same keywords."""
    n_read = _logits_read(arguments)
    if n_read is not None:
        # Logits of n_batch tokens would take memory from the experts.
        params.n_outputs_max = n_read
    params.n_rs_seq = n_drafts(arguments)
    if arguments["flash_attn"] is None:
        params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_AUTO


def _logits_read(arguments: Mapping[str, Any]) -> int | None:
    """Tokens of a pass whose logits may be read; None: all."""
    if any(arguments.get(name) for name in ("logits_all", "embedding")):
        return None
    return None if arguments.get("draft_model") and not n_drafts(arguments) else 1 + n_drafts(arguments)


def n_drafts(arguments: Mapping[str, Any]) -> int:
    """Tokens that a pass may have to take back; 0 without a draft model that says how many these are."""
    drafts = arguments.get("draft_model")
    return drafts.num_pred_tokens if isinstance(drafts, TextDrafts) else 0
