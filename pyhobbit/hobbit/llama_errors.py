# SPDX-License-Identifier: MIT
"""Failures of llama_cpp.Llama, with the reason that the native code gave. Its own sentences are not read."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pyhobbit.engine.cache import Cache
from pyhobbit.engine.llama import log
from pyhobbit.errors import ContextError, HobbitError
from pyhobbit.native.ffi import llama

# From token ids and scores to new scores.
Processor = Callable[[Any, Any], Any]


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


class Processors:
    """Logits processors whose first exception is kept.

    llama.cpp calls them from C, where Python would print an exception, and the text would go on without them.
    """

    def __init__(self, processors: Sequence[Processor]) -> None:
        self._processors = processors
        self._error: BaseException | None = None

    def guarded(self) -> list[Processor]:
        return [partial(self._call, processor) for processor in self._processors]

    def _call(self, processor: Processor, ids: Any, scores: Any) -> Any:
        if self._error is None:
            try:
                return processor(ids, scores)
            except BaseException as e:
                self._error = e
        return scores

    def check(self) -> None:
        """Raises what one of them raised."""
        error, self._error = self._error, None
        if error is not None:
            raise error


class GrammarError(HobbitError, ValueError):
    """A grammar that llama.cpp cannot read."""


def check_grammar(vocab: Any, grammar: Any) -> None:
    """Raises GrammarError: llama_cpp.Llama would end the process.  grammar: a LlamaGrammar."""
    text, root = grammar._grammar.encode(), grammar._root.encode()
    sampler = llama.llama_sampler_init_grammar(vocab, text, root)
    if not sampler:
        raise GrammarError(f"the grammar cannot be read, or has no rule {grammar._root}")
    llama.llama_sampler_free(sampler)


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
