# SPDX-License-Identifier: MIT
"""What llama_cpp.Llama says about a failure, replaced by the reason that the native code gave."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from pyhobbit.engine.cache import Cache
from pyhobbit.engine.llama import log
from pyhobbit.errors import ContextError, HobbitError
from pyhobbit.native.ffi import last_error, lib


class LoadError(HobbitError, ValueError):
    """A model that cannot be opened. A ValueError too, which llama_cpp.Llama raises then."""


class ComputeError(HobbitError, RuntimeError):
    """A computation that failed. A RuntimeError too, which llama_cpp.Llama raises then."""


class PromptError(ContextError, ValueError):
    """A prompt that is too long. A ValueError too, which llama_cpp.Llama raises then."""


@contextmanager
def engine_errors(experts: Cache) -> Iterator[None]:
    """experts: of the model that computes."""
    try:
        yield
    except RuntimeError as e:
        if not str(e).startswith("llama_decode "):
            raise
        reason = experts.failure() if str(e).endswith(" -3") else None  # GGML_STATUS_FAILED
        raise ComputeError(
            reason or f"llama.cpp cannot compute the next token: {log.reason() or e}; open the model again"
        ) from e


@contextmanager
def prompt_errors(n_ctx: int, trained: int) -> Iterator[None]:
    """n_ctx: tokens of context that were opened, of `trained` that the model knows."""
    try:
        yield
    except ValueError as e:
        match = re.match(r"Requested tokens \((\d+)\) exceed context window", str(e))
        if match is None:
            raise
        larger = f", or open the model with a larger n_ctx, at most {trained}" if trained > n_ctx else ""
        raise PromptError(
            f"the prompt has {match[1]} tokens, and the context window of {n_ctx} must hold an answer too; "
            f"shorten it{larger}"
        ) from e


def closed_error() -> HobbitError:
    return HobbitError("the model is closed; open it again with Hobbit(...)")


def load_error(path: str, generic: str) -> LoadError:
    """generic: what Llama says, which tells only whether model or context failed."""
    hint = (
        "a smaller n_ctx needs less memory"
        if "context" in generic
        else "if the file is incomplete or damaged, download or convert it again"
    )
    reason = log.reason() or "llama.cpp gave no reason"
    error = LoadError(last_error() or f"{path} cannot be loaded: {reason}; {hint}")
    lib.hobbit_clear_last_error()
    return error
