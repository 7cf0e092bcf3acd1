# SPDX-License-Identifier: MIT
"""A model opened for generating text."""

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Literal

from pyhobbit._tables import Latency
from pyhobbit.engine.beams import Branches, Hypothesis, search
from pyhobbit.engine.cached import CachedModel, Tally
from pyhobbit.engine.chat_format import ChatFormat, ChatPrompt, ChatReader, Message, TextReader
from pyhobbit.engine.drafts import Decoder, Governor
from pyhobbit.engine.llama import LoadedModel, Sampler, Watch
from pyhobbit.engine.placement import Placed, choose
from pyhobbit.engine.plan import open_session
from pyhobbit.engine.session import Session
from pyhobbit.engine.stats import ModelInfo
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.native.ffi import chat_library
from pyhobbit.native.files import head_and_tail
from pyhobbit.settings.config import EngineConfig, SamplingConfig
from pyhobbit.settings.resolve import check_settings

Prompt = str | Sequence[Message]
"""A text to continue, or the turns of a conversation."""

Finish = Literal["stop", "length", "context", "interrupted"]


chat_library()  # takes 20 MiB, which a plan of the memory has to find in this process

_ANY_QUESTION = ({"role": "user", "content": "Hello"},)
_PART = 1 << 16


@dataclass(frozen=True)
class Piece:
    """One generated token, or the end of the answer."""

    text: str
    """Text that the token adds to the answer; "" within a character."""
    token: int | None
    """Its number in the vocabulary; None where the model ended its answer, or interrupt() was called."""
    time_s: float
    """Seconds since generate() began."""
    finish: Finish | None = None
    """Set in the last piece: the model ended its answer (stop), max_tokens are there (length), the
    context is full (context), or interrupt() was called (interrupted)."""
    thinking: str = ""
    """Text that the token adds to the model's thoughts before an answer in a conversation."""


@dataclass(frozen=True)
class Beam:
    """A continuation that a search found."""

    text: str
    """The continuation."""
    tokens: tuple[int, ...]
    """Numbers in the vocabulary."""
    score: float
    """Sum of the log probabilities of the tokens, and of the end of the model's answer if it came."""
    finish: Finish
    """Why it ends, as Piece.finish; the end of the model's answer (stop) is no token."""


class Engine(CachedModel):
    """A GGUF model, its expert cache and one sequence. A context manager: entering loads the model.

    Not thread-safe, but for interrupt(). The only routed experts in memory are those in the cache's pools.
    on_loading: called while it is opened, with the share of the model that is loaded.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        config: EngineConfig | None = None,
        on_loading: Callable[[float], None] | None = None,
    ) -> None:
        self._path = Path(path)
        self._config = config or EngineConfig()
        self._on_loading = on_loading
        self._format: ChatFormat | None = None
        self._interrupted = False
        self._answer: object | None = None  # token of the generator that the KV cache belongs to
        self._tally = Tally()
        self._session: Session | None = None
        self._opened_parts = ExitStack()
        self._governor = Governor(self._config.n_drafts) if self._config.n_drafts else None
        self._load_s = 0.0
        self.placement: Placed | None = None
        """The placement of the experts, since open()."""

    def __enter__(self) -> "Engine":
        self.open()
        return self

    def open(self) -> ModelInfo:
        """Loads what stays, and allocates pools. Raises ConfigError, HobbitError, KeyboardInterrupt."""
        if self._session is not None:
            raise HobbitError("the engine is open already; close it first")
        check_settings(self._config.cache.settings())
        start = time.perf_counter()
        try:
            self.placement = placed = choose(self._path, self._config, None, lambda: not self._interrupted)
            config = replace(self._config, cache=placed.cache)
            self._session = open_session(
                self._path, config, placed.set_model, self._keep_going, lambda: self._interrupted
            )
            self._opened_parts.callback(self._session.close)
        except BaseException:
            self.close()
            raise
        self._load_s = time.perf_counter() - start
        return self.info()

    def _keep_going(self, share: float) -> bool:
        if self._on_loading is not None:
            self._on_loading(share)
        return not self._interrupted

    def close(self) -> None:
        """Frees everything; the second call does nothing. Raises HobbitError where a trace is incomplete."""
        self._session = self._format = self._answer = None
        self._interrupted = False
        self._opened_parts.close()

    def interrupt(self) -> None:
        """Ends the loading or the answer under way; callable from a signal handler or another thread."""
        self._interrupted = True

    def take_interrupt(self) -> bool:
        """True if interrupt() was called and has ended nothing yet. Forgets the call."""
        late, self._interrupted = self._interrupted, False
        return late

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of the GGUF, or None: such a model only continues text."""
        return self._opened().model.metadata("tokenizer.chat_template")

    def info(self) -> ModelInfo:
        """Figures of the opened model."""
        return self._opened().info(self._config.cache.memory)

    def devices(self) -> tuple[str, ...]:
        """Names of the devices that compute the experts, the CPU among them; none without a cache."""
        return tuple(each.name for each in self._opened().cache.devices())

    def latencies(self) -> tuple[Latency, ...]:
        """Times of one expert on the first GPU, on the CPU beside it, and of its upload, by tokens."""
        return self._opened().cache.latencies()

    @property
    def n_context_tokens(self) -> int:
        """Tokens in the KV cache, of ModelInfo.n_ctx that it holds."""
        return len(self._opened().context.tokens)

    def metadata(self, key: str) -> str | None:
        """A value of the GGUF's metadata as text, None where it has no such key."""
        return self._opened().model.metadata(key)

    def state_mark(self, path: Path) -> str:
        """Tells a whole file of save_state(), of this model and settings, from others. Raises HobbitError."""
        mark = hashlib.sha256(str((sorted(self.live().items()), self._config.cache_types)).encode())
        try:
            mark.update(head_and_tail(self._path))
            with path.open("rb") as file:
                while part := file.read(_PART):
                    mark.update(part)
        except OSError as e:
            raise HobbitError(f"{e.filename} cannot be read: {e.strerror}") from e
        return mark.hexdigest()

    def save_state(self, path: Path) -> int:
        """Writes the KV cache, unless it is empty; returns its bytes. Raises HobbitError."""
        context = self._opened().context
        path.unlink(missing_ok=True)
        if not context.tokens:
            return 0
        context.save(path)
        return path.stat().st_size

    def load_state(self, path: Path) -> bool:
        """The KV cache becomes that of the file, if it fits. The file's state_mark() is known to be right."""
        self._answer = None
        return self._opened().context.load(path)

    def always_thinks(self) -> bool:
        """True if the chat template knows of thinking and cannot switch it off. Raises HobbitError."""
        usual, without = (self._chat_format().render(_ANY_QUESTION, think) for think in (True, False))
        return usual.thinks and usual.text == without.text

    def n_prompt_tokens(self, prompt: Prompt, think: bool = True) -> int:
        """Tokens of a prompt as generate() would read it. Raises HobbitError, ContextError for a huge one."""
        return len(self._tokens(self._rendered(prompt, think)))

    def generate(
        self,
        prompt: Prompt,
        max_tokens: int | None = None,
        sampling: SamplingConfig | None = None,
        think: bool = True,
        on_prompt: Callable[[int, int], None] | None = None,
        grammar: str = "",
    ) -> Iterator[Piece]:
        """Yields the continuation of a text, or the answer to messages put into the model's chat template.

        max_tokens: None goes on until the model ends its answer or the context is full. Tokens that a prompt
        shares with the last one are not evaluated again. A later prompt or close() takes the sequence away.
        think: whether the model may think before it answers, where its template leaves the choice.
        on_prompt: called now and then with the tokens of the prompt that are read, and that are to be read.
        grammar: in GBNF, which the answer follows, without thoughts.
        Raises HobbitError: empty or long prompt, bad disk, sequence taken away, a wrong grammar.
        """
        session = self._opened()
        model, context = session.model, session.context
        start = time.perf_counter()
        rendered = self._rendered(prompt, think and not grammar)
        pending = self._tokens_to_evaluate(self._tokens(rendered))
        reader = TextReader(model) if grammar else self._reader(rendered)
        watch = None if on_prompt is None else self._watch(len(pending), on_prompt)
        answer = self._answer = object()
        n_free = context.n_ctx - len(context.tokens) - len(pending) + 1
        limit = n_free if max_tokens is None else min(max_tokens, n_free)
        sampler = Sampler(sampling or SamplingConfig(), model, grammar)
        decoder = Decoder(context, sampler, self._governor)
        previous_s = 0.0
        finish: Finish | None
        try:
            for n in count(1):
                token = decoder.next(pending, limit - n + 1, watch)
                now_s = time.perf_counter() - start
                if token is None or self._interrupted:
                    token, said, finish = None, reader.end(False), "interrupted"
                elif model.ends_answer(token):
                    token, said, finish = None, reader.end(True), "stop"
                else:
                    self._tally.add_token(now_s - previous_s, is_first=n == 1)
                    finish = None if n < limit else "length" if n == max_tokens else "context"
                    said = reader.add(token, finish is not None)
                    finish = "stop" if reader.has_ended else finish
                yield Piece(said.text, token, now_s, finish, said.thinking)
                if token is None or finish:
                    return
                self._check_current(answer)
                pending, previous_s = [token], now_s
        finally:
            if self._answer is answer:
                self._interrupted = False
            self._tally.counts.update(drafted_tokens=decoder.n_drafted, accepted_tokens=decoder.n_accepted)
            sampler.close()

    def _watch(self, n_tokens: int, on_prompt: Callable[[int, int], None]) -> Watch:
        """Counts the layers of the pass under way, too: a pass may take a minute."""
        session, n_layers = self._opened(), self.info().n_run_layers
        n_before = session.cache.stats().layers_computed

        def watch(n_done: int, n_batch: int) -> None:
            if n_layers:
                n_passes = n_done // session.context.n_ubatch
                n_computed = session.cache.stats().layers_computed - n_before - n_passes * n_layers
                n_done += n_batch * min(max(n_computed, 0), n_layers) // n_layers
            on_prompt(n_done, n_tokens)

        return watch

    def beam_search(self, prompt: str, n_beams: int, max_tokens: int | None = None) -> list[Beam]:
        """The n_beams likeliest continuations of a text that a beam search finds, the likeliest first.

        n_beams: at most EngineConfig.n_beams.  max_tokens: None lets the context decide, which all beams
        share.  interrupt() ends the search with what was found so far; within the prompt that is nothing.
        Stats count a step of all beams as one token. Raises ConfigError, and HobbitError as generate() does.
        """
        if not 0 < n_beams <= self._config.n_beams:
            raise ConfigError(
                f"the engine was opened for 1 to {self._config.n_beams} beams, not for {n_beams}; open it "
                "with EngineConfig(n_beams=...)"
            )
        session, start = self._opened(), time.perf_counter()
        model, context = session.model, session.context
        pending = self._tokens_to_evaluate(self._tokens(prompt))
        self._answer = object()
        n_steps = (context.n_ctx - len(context.tokens) - len(pending)) // n_beams + 1
        limit = n_steps if max_tokens is None else min(max_tokens, n_steps)
        times: list[float] = []

        def goes_on() -> bool:
            times.append(time.perf_counter() - start)
            self._tally.add_token(times[-1] - sum(times[-2:-1]), is_first=len(times) == 1)
            return not self._interrupted

        try:
            if not context.evaluate(pending) or not goes_on():
                return []
            with closing(Branches(context, session.cache, n_beams, goes_on)) as branches:
                logits = context.last_logits().copy()
                found = search(logits, branches.extend, model.ends_answer, n_beams, limit)
            cut: Finish = (
                "interrupted" if self._interrupted else "length" if limit == max_tokens else "context"
            )
            return [self._beam(each, "stop" if each.ended else cut) for each in found]
        finally:
            self._interrupted = False

    def _beam(self, found: Hypothesis, finish: Finish) -> Beam:
        text = b"".join(map(self._opened().model.piece, found.tokens)).decode("utf-8", "replace")
        return Beam(text, found.tokens, found.score, finish)

    def _check_current(self, answer: object) -> None:
        if self._answer is None:
            raise HobbitError("the engine was closed while it generated; open it and generate again")
        if self._answer is not answer:
            raise HobbitError(
                "a newer prompt has replaced the one of this answer: an engine holds one sequence; "
                "finish an answer before the next, or open a second engine"
            )

    def _rendered(self, prompt: Prompt, think: bool) -> str | ChatPrompt:
        return prompt if isinstance(prompt, str) else self._chat_format().render(prompt, think)

    def _tokens(self, prompt: str | ChatPrompt) -> list[int]:
        session = self._opened()
        model = session.model
        text = prompt if isinstance(prompt, str) else prompt.text
        model.check_size(text, session.context.n_ctx)
        return model.tokenize(text)

    def _tokens_to_evaluate(self, tokens: list[int]) -> list[int]:
        """The tokens of the prompt that the KV cache lacks, at least the last one. Removes tokens that
        differ from the cache."""
        session = self._opened()
        context = session.context
        if not tokens:
            raise HobbitError("the prompt is empty; give some text to continue")
        if (n_ctx := context.n_ctx) < len(tokens):
            raise session.model.too_long(len(tokens), "tokens", n_ctx)
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(tokens[:-1], context.tokens, strict=False))
        n_before = len(context.tokens)
        n_shared = sum(1 for _ in shared)
        context.truncate(n_shared)
        session.cache.keep(context.pointer, len(context.tokens), n_before)
        pending = tokens[len(context.tokens) :]
        self._tally.add_prompt(len(tokens), len(pending))
        return pending

    def _chat_format(self) -> ChatFormat:
        session, template = self._opened(), self.chat_template
        if template is None:
            raise HobbitError("the model has no chat template; give it text to continue instead of messages")
        if self._format is None:
            self._format = ChatFormat(session.model.pointer, template)
            self._opened_parts.callback(self._format.close)
        return self._format

    def _reader(self, prompt: str | ChatPrompt) -> TextReader:
        model = self._opened().model
        if isinstance(prompt, str):
            return TextReader(model)
        return ChatReader(model, self._chat_format(), prompt)

    @property
    def _loaded(self) -> LoadedModel:
        return self._opened().model

    def _opened(self) -> Session:
        if self._session is None:
            raise HobbitError("the engine is not open; use it in a with statement or call open()")
        return self._session
