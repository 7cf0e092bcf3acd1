# SPDX-License-Identifier: MIT
"""The draft head (MTP) in a model's own file, which names tokens that the model may choose next."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pyhobbit.errors import HobbitError
from pyhobbit.native.ffi import HostMemory, head_states, host_memory, last_error, llama

_GRAPHS = 44 << 10  # bytes by token of a pass: llama.cpp allows graphs of 40 nodes for it, and keeps two
_COPIES = 6  # copies of the states of a pass: llama.cpp's, ours, and those in the batch that the head reads


class Head:
    """A head in a context of its own, beside the context whose text it follows.

    It reads each token with the state that the model had before. Works for one sequence.
    """

    def __init__(self, model: Any, context: Any, params: Any) -> None:
        """model, context: pointers, which must outlive it.  params: of the context. Raises HobbitError."""
        params.ctx_type, params.ctx_other, params.n_rs_seq = llama.LLAMA_CONTEXT_TYPE_MTP, context, 0
        self.pointer = llama.llama_init_from_model(model, params)
        if not self.pointer:
            raise HobbitError(last_error() or "llama.cpp cannot run this model's draft head; open it without")
        self._context, self._n_batch = context, params.n_batch
        self._most = 1 if llama.llama_model_n_layer_nextn(model) > 1 else params.n_ctx  # one step for each
        self._shape = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self._state = np.zeros(llama.llama_model_n_embd_out(model), np.float32)  # before the next token
        self._states = self._state[:0].reshape(0, len(self._state))  # those of the last pass
        self._start = self._end = 0  # its positions
        keep, self._get_state = head_states()
        keep(context, False)
        keep(self.pointer, True)

    def added_to(self, memory: HostMemory) -> HostMemory:
        """The memory of a model and its context, and what the head and the states of a pass take."""
        own = host_memory(self.pointer)
        own.context += self._n_batch * (_GRAPHS + _COPIES * self._state.nbytes)
        for name in ("context", "compute", "device_compute"):
            setattr(memory, name, getattr(memory, name) + getattr(own, name))
        memory.head = own.context + own.compute
        return memory

    def read(self, tokens: Sequence[int], start: int) -> int:
        """Follows a pass of the model; llama.cpp's status.  start: position of the first token."""
        n = len(tokens)
        states = np.ctypeslib.as_array(self._get_state(self._context, 0), (n, len(self._state))).copy()
        if start != self._end:
            self._forget(0)  # an image, or a state of elsewhere, lies between
        status = self._compute(tokens, np.vstack((self._state, states[:-1])), start, False)
        self._states, self._start, self._end, self._state = states, start, start + n, states[-1]
        return status

    def draft(self, n: int, token: int, start: int) -> list[int]:
        """At most n tokens after one that the model has not read.  start: its position."""
        found: list[int] = []
        state = self._state
        while start == self._end and len(found) < min(n, self._most):
            if self._compute([token], state, start + len(found), True):
                break
            logits = np.ctypeslib.as_array(llama.llama_get_logits(self.pointer), (self._shape,))
            token = int(logits.argmax())
            state = np.ctypeslib.as_array(self._get_state(self.pointer, 0), state.shape).copy()
            found.append(token)
        self._forget(start)
        return found

    def truncate(self, n_positions: int) -> None:
        """Forgets all but the first positions."""
        self._forget(n_positions)
        self._end = min(self._end, n_positions)
        i = n_positions - self._start - 1
        self._state = self._states[i] if 0 <= i < len(self._states) else np.zeros_like(self._state)

    def close(self) -> None:
        llama.llama_free(self.pointer)

    def _forget(self, start: int) -> None:
        llama.llama_memory_seq_rm(llama.llama_get_memory(self.pointer), 0, start, -1)

    def _compute(self, tokens: Sequence[int], states: np.ndarray, start: int, is_output: bool) -> int:
        n = len(tokens)
        array = (llama.llama_token * n)(*tokens)
        batch = llama.llama_batch_get_one(array, n)
        batch.embd = states.ctypes.data_as(type(batch.embd))
        batch.pos = (llama.llama_pos * n)(*range(start, start + n))
        batch.logits = (type(batch.logits)._type_ * n)(*[is_output] * n)
        return llama.llama_decode(self.pointer, batch)


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
