# SPDX-License-Identifier: MIT
"""Errors in place of what llama.cpp does: it ends the process, or goes on without a word."""

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Real
from threading import RLock
from typing import Any

import numpy as np

from pyhobbit.engine.llama import LoadedModel
from pyhobbit.errors import ComputeError, HobbitError
from pyhobbit.model.loading import log
from pyhobbit.native.ffi import llama

LlamaGrammar = llama.LlamaGrammar

# Makes new scores from token ids and scores.
Processor = Callable[[Any, Any], Any]


class InputError(HobbitError, ValueError):
    """A model, token or grammar that cannot be used. A ValueError too, which llama_cpp.Llama raises then."""


@contextmanager
def opening_errors() -> Iterator[None]:
    """Within it, a HobbitError becomes an InputError."""
    try:
        yield
    except HobbitError as e:
        raise InputError(str(e)) from e


def explained(decode: Callable[[Any], None], model: LoadedModel) -> Callable[[Any], None]:
    """decode() of a llama_cpp context, whose failures become ComputeErrors."""

    def explain(batch: Any) -> None:
        model.check_process()
        try:
            decode(batch)
        except RuntimeError as e:
            unknown = f"llama.cpp cannot compute the next token: {log.reason() or e}; open the model again"
            raise ComputeError(model.cache.failure() or unknown) from e

    return explain


class Processors:
    """Logits processors whose first exception is kept: llama.cpp's C code would go on without them."""

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


def check_text(text: Any) -> None:
    """Raises InputError for what is no text, or has half of a character."""
    try:
        text.encode()
    except (AttributeError, UnicodeEncodeError) as e:
        raise InputError(f"{text!r:.80} cannot be tokenized; give a str of whole characters") from e


def check_numbers(values: Mapping[str, Any]) -> None:
    """Raises InputError for what cannot steer a sampler, by name."""
    for name, value in values.items():
        if not isinstance(value, Real) or not math.isfinite(value):
            raise InputError(f"{name} is {value!r}; it must be a finite number")


def check_grammar(vocab: Any, grammar: Any) -> None:
    """Raises InputError: llama_cpp.Llama would end the process.  grammar: a LlamaGrammar."""
    if not isinstance(grammar, LlamaGrammar):
        raise InputError(f"the grammar is {grammar!r:.80}; make one with LlamaGrammar.from_string(...)")
    text, root = grammar._grammar.encode(), grammar._root.encode()
    sampler = llama.llama_sampler_init_grammar(vocab, text, root)
    if not sampler:
        raise InputError(f"the grammar cannot be read, or has no rule {grammar._root}")
    llama.llama_sampler_free(sampler)


def sample_allowed(chain: Any, context: Any, i: int = -1) -> int:
    """llama_sampler_sample() for a chain with a grammar. Raises ComputeError where no token is allowed.

    llama.cpp would draw a token all the same, and end the process when the grammar refuses it.
    """
    n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(llama.llama_get_model(context.ctx)))
    tokens = (llama.llama_token_data * n_vocab)()
    rows = np.frombuffer(tokens, np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)]))
    rows["id"] = np.arange(n_vocab)
    rows["logit"] = np.ctypeslib.as_array(llama.llama_get_logits_ith(context.ctx, i), (n_vocab,))
    array = llama.llama_token_data_array(tokens, n_vocab, -1, False)
    llama.llama_sampler_apply(chain, ctypes.byref(array))
    chosen = array.data[max(array.selected, 0)]
    if array.selected < 0 or not math.isfinite(chosen.logit):
        raise ComputeError("no token fits the grammar: it excludes all that the model, or logit_bias, allows")
    llama.llama_sampler_accept(chain, chosen.id)
    return chosen.id


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
