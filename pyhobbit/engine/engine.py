# SPDX-License-Identifier: MIT
"""A model opened for generating text."""

import codecs
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Literal

from pyhobbit.engine.closing import Closing
from pyhobbit.engine.llama import Sampler, can_fit, opening
from pyhobbit.engine.plan import fitting_settings
from pyhobbit.engine.session import Session, one_sequence
from pyhobbit.engine.stats import ModelInfo, Stats, peak_rss_bytes
from pyhobbit.errors import ContextError, HobbitError
from pyhobbit.native.ffi import llama
from pyhobbit.settings.config import EngineConfig, SamplingConfig

Message = Mapping[str, str]
"""One turn of a conversation: {"role": "system" | "user" | "assistant", "content": text}."""

Finish = Literal["stop", "length", "context", "interrupted"]


@dataclass(frozen=True)
class Piece:
    """One generated token. text: what it adds, "" within a character.  time_s: seconds since generate began.

    finish is None but for the last piece: the model ended its answer (stop), max_tokens are there (length),
    the context is full (context) or interrupt() was called (interrupted); stop and interrupted have no token.
    """

    text: str
    token: int | None
    time_s: float
    finish: Finish | None = None


class Engine(Closing):
    """A GGUF model, its expert cache and one sequence. A context manager: entering loads the model.

    Not thread-safe, but for interrupt(). The only routed experts in memory are those in the cache's pools.
    """

    def __init__(self, path: str | os.PathLike[str], config: EngineConfig | None = None) -> None:
        self._path = Path(path)
        self._config = config or EngineConfig()
        self._interrupted = False
        self._answer: object | None = None  # of the generator that the KV cache belongs to
        self._counters: Counter[str] = Counter()  # fields of Stats
        self._session: Session | None = None
        self._load_s = 0.0

    def __enter__(self) -> "Engine":
        self.open()
        return self

    def open(self) -> ModelInfo:
        """Loads what stays resident and allocates the pools. Raises HobbitError, KeyboardInterrupt."""
        if self._session is not None:
            raise HobbitError("the engine is open already; close it first")
        start = time.perf_counter()
        try:
            with opening:
                # What does not fit is said before anything is loaded.
                settings = fitting_settings(self._path, self._config)
                self._session = Session(
                    self._path,
                    settings,
                    one_sequence(self._config),
                    keep_going=lambda: not self._interrupted,
                    aborted=lambda: self._interrupted,
                    verbose=self._config.verbose,
                )
        except BaseException:
            self._interrupted = False
            raise
        self._load_s = time.perf_counter() - start
        return self.info()

    def close(self) -> None:
        """Frees everything; the second call does nothing. Raises HobbitError where a trace is incomplete."""
        session, self._session = self._session, None
        self._answer, self._interrupted = None, False
        if session is not None:
            session.close()

    def interrupt(self) -> None:
        """Ends the loading or the answer under way; callable from a signal handler or another thread."""
        self._interrupted = True

    def take_interrupt(self) -> bool:
        """Whether interrupt() has been called and has ended nothing yet; what comes next then goes on."""
        late, self._interrupted = self._interrupted, False
        return late

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of the GGUF, or None: such a model only continues text."""
        return self._opened().model.metadata("tokenizer.chat_template")

    def info(self) -> ModelInfo:
        """What was opened."""
        return self._opened().info(self._config.cache.memory)

    def stats(self) -> Stats:
        """Counters and times since opening; Stats.since() gives those between two moments."""
        cache = self._opened().cache.stats()
        return Stats(self.info(), cache, self._load_s, peak_rss_bytes(), **self._counters)

    @property
    def n_context_tokens(self) -> int:
        """Tokens in the KV cache, of ModelInfo.n_ctx that it holds."""
        return len(self._opened().context.tokens)

    def set_thresholds(self, t1: float, t2: float) -> None:
        """Replaces CacheConfig's t1 and t2 from the next layer on. Raises ConfigError, HobbitError."""
        self._opened().cache.set_thresholds(t1, t2)

    def set_price(self, price: float) -> None:
        """Replaces CacheConfig's price from the next layer on. Raises ConfigError, HobbitError."""
        self._opened().cache.set_thresholds(price=price)

    def generate(
        self,
        prompt: str | Sequence[Message],
        max_tokens: int | None = None,
        sampling: SamplingConfig | None = None,
    ) -> Iterator[Piece]:
        """Yields the continuation of a text, or the answer to messages put into the model's chat template.

        max_tokens: None goes on until the model ends its answer or the context is full. Tokens that a prompt
        shares with the last one are not evaluated again. A later prompt or close() takes the sequence away.
        Raises HobbitError: empty or long prompt, bad disk, sequence taken away.
        """
        session = self._opened()
        model, context = session.model, session.context
        start = time.perf_counter()
        pending = self._tokens_to_evaluate(prompt)
        answer = self._answer = object()
        n_free = context.n_ctx - len(context.tokens) - len(pending) + 1
        limit = n_free if max_tokens is None else min(max_tokens, n_free)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        sampler = Sampler(sampling or SamplingConfig(), model.n_vocab())
        previous_s = None
        try:
            for n in count(1):
                if not context.evaluate(pending) or self._interrupted:
                    yield Piece(decoder.decode(b"", True), None, time.perf_counter() - start, "interrupted")
                    return
                token = sampler.sample(context)
                now_s = time.perf_counter() - start
                if model.ends_answer(token):
                    yield Piece(decoder.decode(b"", True), None, now_s, "stop")
                    return
                self._count(now_s, previous_s)
                finish: Finish | None = None if n < limit else "length" if n == max_tokens else "context"
                yield Piece(decoder.decode(model.piece(token), finish is not None), token, now_s, finish)
                if finish:
                    return
                self._check_current(answer)
                pending, previous_s = [token], now_s
        finally:
            if self._answer is answer:
                self._interrupted = False
            sampler.close()

    def _count(self, piece_s: float, previous_s: float | None) -> None:
        """A token that was there piece_s seconds after its prompt, its predecessor after previous_s."""
        if previous_s is None:
            self._counters.update(generated_tokens=1, answers=1, first_tokens_s=piece_s)
        else:
            self._counters.update(generated_tokens=1, decoded_tokens=1, decode_s=piece_s - previous_s)

    def _check_current(self, answer: object) -> None:
        if self._answer is None:
            raise HobbitError("the engine was closed while it generated; open it and generate again")
        if self._answer is not answer:
            raise HobbitError(
                "a newer prompt has replaced the one of this answer: an engine holds one sequence; "
                "finish an answer before the next, or open a second engine"
            )

    def _tokens_to_evaluate(self, prompt: str | Sequence[Message]) -> list[int]:
        """What the KV cache lacks of the prompt, at least its last token; the cache forgets what differs."""
        session = self._opened()
        model, context = session.model, session.context
        text = prompt if isinstance(prompt, str) else self._render(prompt)
        n_bytes = len(text.encode("utf-8", "surrogateescape"))
        if not can_fit(model.vocab, n_bytes, context.n_ctx):
            raise ContextError(
                f"the prompt has {n_bytes} bytes, more than the context of {context.n_ctx} tokens can hold; "
                "shorten it"
            )
        tokens = model.tokenize(text)
        if not tokens:
            raise HobbitError("the prompt is empty; give some text to continue")
        self._check_length(len(tokens), session)
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(tokens[:-1], context.tokens, strict=False))
        n_before = len(context.tokens)
        context.truncate(sum(1 for _ in shared))
        if 2 * len(context.tokens) < n_before:
            self._opened().cache.begin_sequence()  # another text, though it may begin alike
        pending = tokens[len(context.tokens) :]
        self._counters.update(prompt_tokens=len(tokens), prompt_tokens_evaluated=len(pending))
        return pending

    @staticmethod
    def _check_length(n_tokens: int, session: Session) -> None:
        n_ctx, trained = session.context.n_ctx, session.model.n_ctx_train()
        if n_tokens > n_ctx:
            larger = f" or use a larger --ctx, at most {trained}" if trained > n_ctx else ""
            raise ContextError(
                f"the prompt has {n_tokens} tokens, more than the context of {n_ctx}; shorten it{larger}"
            )

    def _render(self, messages: Sequence[Message]) -> str:
        model = self._opened().model
        template = self.chat_template
        if template is None:
            raise HobbitError("the model has no chat template; give it text to continue instead of messages")
        bos = model.special_text(llama.llama_vocab_bos(model.vocab))
        eos = model.special_text(llama.llama_vocab_eos(model.vocab))
        try:
            formatter = llama.llama_chat_format.Jinja2ChatFormatter(template, eos_token=eos, bos_token=bos)
            text = formatter(messages=list(messages)).prompt
        except Exception as e:  # a template is somebody's program
            raise HobbitError(f"the model's chat template refuses this conversation: {e}") from e
        # The tokenizer puts the first special token in front by itself.
        return text.removeprefix(bos) if bos and llama.llama_vocab_get_add_bos(model.vocab) else text

    def _opened(self) -> Session:
        if self._session is None:
            raise HobbitError("the engine is not open; use it in a with statement or call open()")
        return self._session
