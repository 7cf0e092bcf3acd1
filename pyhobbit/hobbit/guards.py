# SPDX-License-Identifier: MIT
"""Errors in place of what llama.cpp does: it ends the process, or goes on without a word."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import RLock
from typing import Any

from pyhobbit.engine.cache import Cache
from pyhobbit.engine.llama import log
from pyhobbit.errors import HobbitError
from pyhobbit.native.ffi import llama

# Makes new scores from token ids and scores.
Processor = Callable[[Any, Any], Any]


class InputError(HobbitError, ValueError):
    """A model, token or grammar that cannot be used. A ValueError too, which llama_cpp.Llama raises then."""


class ComputeError(HobbitError, RuntimeError):
    """A computation that failed. A RuntimeError too, which llama_cpp.Llama raises then."""


@contextmanager
def opening_errors() -> Iterator[None]:
    """Within it, a HobbitError becomes an InputError."""
    try:
        yield
    except HobbitError as e:
        raise InputError(str(e)) from e


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
                new = processor(ids, scores)
                if new is None:
                    raise TypeError("a logits processor returned None; it must return the new scores")
                scores[:] = new
            except BaseException as e:
                self._error = e
        return scores

    def check(self) -> None:
        """Raises what one of them raised."""
        error, self._error = self._error, None
        if error is not None:
            raise error


def check_grammar(vocab: Any, grammar: Any) -> None:
    """Raises InputError: llama_cpp.Llama would end the process.  grammar: a LlamaGrammar."""
    text, root = grammar._grammar.encode(), grammar._root.encode()
    sampler = llama.llama_sampler_init_grammar(vocab, text, root)
    if not sampler:
        raise InputError(f"the grammar cannot be read, or has no rule {grammar._root}")
    llama.llama_sampler_free(sampler)


class Turns:
    """Admits one thread to a model; two in one context end the process. A thread may enter again."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._n_answers = 0

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Raises ComputeError where another thread is inside, without waiting."""
        if not self._lock.acquire(blocking=False):
            raise ComputeError(
                "another thread computes with this model: "
                "use it from one thread at a time, or open a second Hobbit"
            )
        try:
            yield
        finally:
            self._lock.release()

    def begin_answer(self) -> int:
        """Its number; answers that have not ended are over."""
        with self.alone():
            self._n_answers += 1
            return self._n_answers

    def check(self, answer: int) -> None:
        """Raises ComputeError where another answer was begun since."""
        if answer != self._n_answers:
            raise ComputeError(
                "another answer was begun with this model before this one had ended: "
                "take one after the other, or open a second Hobbit"
            )
