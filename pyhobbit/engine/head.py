# SPDX-License-Identifier: MIT
"""The memory of the draft head (MTP) in a model's own file, which llama-server runs beside the model."""

from pathlib import Path
from typing import Any

from pyhobbit.errors import HobbitError
from pyhobbit.native.ffi import HostMemory, host_memory, keep_head_states, last_error, llama

_GRAPHS = 44 << 10  # bytes by token of a pass: llama.cpp allows graphs of 40 nodes for it, and keeps two
_COPIES = 6  # copies of the states of a pass: llama.cpp's, the server's, and those in the head's batch


def memory_with_head(model: Any, context: Any, params: Any) -> HostMemory:
    """The memory of a model and its context, and what the head and the states of a pass take beside them.

    model, context: pointers of a simulated session.  params: of the context. Raises HobbitError.
    """
    params.ctx_type, params.ctx_other, params.n_rs_seq = llama.LLAMA_CONTEXT_TYPE_MTP, context, 0
    head = llama.llama_init_from_model(model, params)
    if not head:
        raise HobbitError(last_error() or "llama.cpp cannot run this model's draft head; serve it without")
    keep_head_states(context, False)
    keep_head_states(head, True)
    memory, own = host_memory(context), host_memory(head)
    llama.llama_free(head)
    state_bytes = 4 * llama.llama_model_n_embd_out(model)
    own.context += params.n_batch * (_GRAPHS + _COPIES * state_bytes)
    for name in ("context", "compute", "device_compute"):
        setattr(memory, name, getattr(memory, name) + getattr(own, name))
    memory.head = own.context + own.compute
    return memory


def check_head(path: Path) -> None:
    """Raises HobbitError where the file does not hold a draft head."""
    from pyhobbit.model.model_file import holds_head, model_parts  # takes memory that others save

    files = model_parts(path)
    if holds_head(tensor.name for file in files for tensor in file.tensors):
        return
    architecture = files[0].get("general.architecture", "")
    is_announced = files[0].get(f"{architecture}.nextn_predict_layers", 0) > 0
    lacks = "announces a draft head (MTP) and does not hold it" if is_announced else "has no draft head (MTP)"
    raise HobbitError(f"{path.name} {lacks}; run it without, or use a file that holds one")
