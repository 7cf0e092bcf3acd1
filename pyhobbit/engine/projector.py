# SPDX-License-Identifier: MIT
"""The memory of the projector (mmproj) of a model that sees, which llama-server runs beside it."""

from pathlib import Path

from pyhobbit.engine.session import simulated
from pyhobbit.errors import HobbitError
from pyhobbit.model.loading import log
from pyhobbit.native.ffi import llama, multimodal, projector_sizes

_LIBRARY_BYTES = 12 << 20  # libmtmd, its threads and a prepared picture, beside any projector


def projector_bytes(model: Path, projector: Path) -> int:
    """Bytes that the projector takes with a usual image; loads nothing. Raises HobbitError."""
    if not projector.is_file():
        raise HobbitError(f"there is no file {projector}; --mmproj takes the model's projector, a GGUF file")
    with simulated(model, {}) as opened:
        multimodal().mtmd_helper_log_set(log.callback, None)
        log.start(False)
        n_bytes, n_embd = projector_sizes(bytes(projector))
        if not n_bytes:
            raise _unfit(projector, model, log.reason() or "it holds no projector")
        if n_embd != llama.llama_model_n_embd_inp(opened.pointer):
            reason = f"it makes {n_embd} numbers of a part of an image, the model takes another number"
            raise _unfit(projector, model, reason)
    return n_bytes + _LIBRARY_BYTES


def _unfit(path: Path, model: Path, reason: str) -> HobbitError:
    return HobbitError(f"{path} cannot be loaded: {reason}; give the projector that comes with {model.name}")
