# SPDX-License-Identifier: MIT
"""Failures of llama_cpp.Llama, with the reason that the native code gave. Its own sentences are not read."""

from collections.abc import Callable
from typing import Any

from pyhobbit.engine.cache import Cache
from pyhobbit.engine.llama import log
from pyhobbit.errors import ContextError, HobbitError


class LoadError(HobbitError, ValueError):
    """A model that cannot be opened. A ValueError too, which llama_cpp.Llama raises then."""


class ComputeError(HobbitError, RuntimeError):
    """A computation that failed. A RuntimeError too, which llama_cpp.Llama raises then."""


class PromptError(ContextError, ValueError):
    """A prompt that is too long. A ValueError too, which llama_cpp.Llama raises then."""


class TokenError(HobbitError, ValueError):
    """A token that the vocabulary does not have."""


def explained(decode: Callable[[Any], None], experts: Cache) -> Callable[[Any], None]:
    """decode() of a llama_cpp context, whose failures become ComputeErrors.  experts: of its model."""

    def explain(batch: Any) -> None:
        try:
            decode(batch)
        except RuntimeError as e:
            unknown = f"llama.cpp cannot compute the next token: {log.reason() or e}; open the model again"
            raise ComputeError(experts.failure() or unknown) from e

    return explain


def prompt_error(n_tokens: int, n_ctx: int, trained: int) -> PromptError:
    """n_ctx: tokens of context that were opened, of `trained` that the model knows."""
    larger = f", or open the model with a larger n_ctx, at most {trained}" if trained > n_ctx else ""
    return PromptError(
        f"the prompt has {n_tokens} tokens, and the context window of {n_ctx} must hold an answer too; "
        f"shorten it{larger}"
    )


def size_error(n_bytes: int, n_ctx: int) -> PromptError:
    """A text that is not even tokenized."""
    return PromptError(
        f"the prompt has {n_bytes} bytes, more than the context window of {n_ctx} tokens can hold; shorten it"
    )


def closed_error() -> HobbitError:
    return HobbitError("the model is closed; open it again with Hobbit(...)")
