# SPDX-License-Identifier: MIT
"""The projector (mmproj) of a model that sees or hears: what it takes of memory."""

from pathlib import Path

from pyhobbit.engine.llama import log, opening
from pyhobbit.engine.session import Session, one_sequence
from pyhobbit.errors import HobbitError
from pyhobbit.native.ffi import multimodal
from pyhobbit.native.machine import resident_memory, trimmed_heap
from pyhobbit.settings.config import EngineConfig

_SIMULATED = EngineConfig(n_ctx=32)


def projector_bytes(model: Path, projector: Path) -> int:
    """What it holds of this process's memory, measured by loading it and giving it an image.

    A larger image may take more. Raises HobbitError where the model cannot have it.
    """
    if not projector.is_file():
        raise HobbitError(f"there is no file {projector}; --mmproj takes the model's projector, a GGUF file")
    mtmd = multimodal()
    mtmd.mtmd_helper_log_set(log.callback, None)
    with opening, trimmed_heap(), Session(model, {}, one_sequence(_SIMULATED), simulated=True) as session:
        before = resident_memory()
        params = mtmd.mtmd_context_params_default()
        params.warmup, params.print_timings = True, False
        loaded = mtmd.mtmd_init_from_file(bytes(projector), session.model.pointer, params)
        if not loaded:
            raise HobbitError(
                f"{projector} cannot be loaded: {log.reason() or 'llama.cpp gave no reason'}; "
                f"give the projector that comes with {model.name}"
            )
        taken = resident_memory() - before
        mtmd.mtmd_free(loaded)
    return max(taken, projector.stat().st_size)
