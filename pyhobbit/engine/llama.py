# SPDX-License-Identifier: MIT
"""The few things that the engine wants from llama.cpp, on llama-cpp-python's low-level bindings.

The high-level llama_cpp.Llama holds a buffer of n_batch x n_vocab logits (hundreds of MB), which a process
with a bound on its memory cannot afford, and hides how long a token took.
"""

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pyhobbit.engine.cache import Cache
from pyhobbit.engine.stats import ModelInfo
from pyhobbit.errors import ComputeError, ContextError, HobbitError, LoadError
from pyhobbit.model.loading import load_failure, log
from pyhobbit.native.ffi import llama
from pyhobbit.native.files import atomic_output, os_errors
from pyhobbit.settings.config import SamplingConfig, Setting, kv_overrides

_RANDOM_SEED = 0xFFFFFFFF
_USUAL_TOKEN_BYTES = 16  # more than a text has on average
_WATCH_S = 0.1
_PIECE = 1 << 20  # characters
_STATUS_FAILED = -3  # llama_decode's status if a backend, and thus perhaps the expert cache, gave up


@contextlib.contextmanager
def ctrl_c_waits() -> Iterator[Callable[[], bool]]:
    """Delays Ctrl-C in calls of llama.cpp, whose callbacks cannot raise; yields whether it came."""
    came = False

    def note(_signal: int, _frame: object) -> None:
        nonlocal came
        came = True

    is_main = threading.current_thread() is threading.main_thread()
    raises = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if raises:
            signal.signal(signal.SIGINT, note)
        yield lambda: came
    finally:
        if raises:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if came:
            raise KeyboardInterrupt


SetModel = Callable[[Any], None]
"""Fills in llama_model_params, where they are not llama.cpp's own."""

SetContext = Callable[[Any, "Model"], None]
"""Fills in llama_context_params, given the model. Raises HobbitError."""


KeepGoing = Callable[[float], bool]
"""Asked while a model is loaded, with the share that is there; False gives it up."""

Watch = Callable[[int, int], None]
"""Called while a prompt is computed, with the tokens that are done and those of the pass under way."""


class LoadedModel:
    """A llama_model that is in memory, with its expert cache and vocabulary."""

    def __init__(self, path: Path, pointer: Any) -> None:
        self.path = path
        self.pointer = pointer
        self.cache = Cache(pointer)
        self.vocab = llama.llama_model_get_vocab(pointer)
        self._piece = ctypes.create_string_buffer(256)
        self._process = os.getpid()

    def check_process(self) -> None:
        """Raises HobbitError in a child of fork(), which has none of the threads that compute."""
        if os.getpid() != self._process:
            raise ComputeError(f"{self.path} was opened before fork(); open it in this process")

    def check_finite(self, logits: np.ndarray) -> np.ndarray:
        """The logits. Raises HobbitError where they are no numbers, of which a sampler would take any."""
        if not np.isfinite(logits.max(axis=-1)).all():
            raise ComputeError(
                f"{self.path} computes NaN: some of its weights are no finite numbers; take another file of "
                "the model"
            )
        return logits

    def info(self, n_ctx: int, n_threads: int, memory: int | None) -> ModelInfo:
        """Facts about the opened model. memory: the bound on the process, in bytes."""
        architecture = self.metadata("general.architecture")
        return ModelInfo(
            model=str(self.path),
            description=self._description(),
            n_ctx=n_ctx,
            n_ctx_train=self.n_ctx_train(),
            n_threads=n_threads,
            cached=bool(self.cache),
            has_experts=int(self.metadata(f"{architecture}.expert_count") or 0) > 0,
            memory=memory,
            **self.cache.info(),
        )

    def _description(self) -> str:
        """Architecture, size and type; llama.cpp names the size of well-known models alone."""
        buffer = ctypes.create_string_buffer(256)
        llama.llama_model_desc(self.pointer, buffer, len(buffer))
        n = llama.llama_model_n_params(self.pointer)
        size = f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.1f}M"
        return buffer.value.decode("utf-8", "replace").replace(" ?B ", f" {size} ")

    def metadata(self, key: str) -> str | None:
        """A value of the GGUF's metadata as text, None where it has no such key."""
        size = llama.llama_model_meta_val_str(self.pointer, key.encode(), None, 0)
        if size < 0:
            return None
        buffer = ctypes.create_string_buffer(size + 1)
        llama.llama_model_meta_val_str(self.pointer, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    def n_vocab(self) -> int:
        return llama.llama_vocab_n_tokens(self.vocab)

    def has_state(self) -> bool:
        """True if a sequence has a state that cannot go back to an earlier token."""
        is_recurrent = llama.llama_model_is_recurrent(self.pointer)
        return is_recurrent or llama.llama_model_is_hybrid(self.pointer)

    def n_ctx_train(self) -> int:
        return llama.llama_model_n_ctx_train(self.pointer)

    def tokenize(self, text: str, begins_text: bool = True) -> list[int]:
        """Tokens of a text, special ones too. begins_text: a whole prompt gets the model's own in front."""
        data = text.encode("utf-8", "surrogateescape")
        n_tokens = -(len(data) + 16)  # more, where the vocabulary spells a space or a character in bytes
        while n_tokens < 0:
            tokens = (llama.llama_token * -n_tokens)()
            n_tokens = llama.llama_tokenize(
                self.vocab, data, len(data), tokens, len(tokens), begins_text, True
            )
        return tokens[:n_tokens]

    def piece(self, token: int, is_control_shown: bool = False) -> bytes:
        """The bytes a token writes: a character may take several tokens. Control tokens may write nothing."""
        buffer = self._piece
        size = llama.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, is_control_shown)
        if size < 0:
            self._piece = ctypes.create_string_buffer(-size)
            return self.piece(token, is_control_shown)
        return self._piece.raw[:size]

    def ends_answer(self, token: int) -> bool:
        return llama.llama_vocab_is_eog(self.vocab, token)

    def check_size(self, text: str, n_ctx: int) -> None:
        """Raises ContextError for a prompt that cannot fit. Tokenizing takes 75 bytes per byte of text."""
        pieces = range(0, len(text), _PIECE)  # a copy of the whole text may not fit into memory
        n_bytes = sum(len(text[i : i + _PIECE].encode("utf-8", "surrogateescape")) for i in pieces)
        if n_bytes <= _USUAL_TOKEN_BYTES * n_ctx:  # spares each turn of a chat a look at the whole vocabulary
            return
        longest = max(len(llama.llama_vocab_get_text(self.vocab, each)) for each in range(self.n_vocab()))
        if n_bytes > n_ctx * longest:
            raise self.too_long(n_bytes, "bytes", n_ctx)

    def too_long(self, size: int, unit: str, n_ctx: int) -> ContextError:
        """The error of a prompt with no room for it or for an answer; the server has the same sentence."""
        trained = self.n_ctx_train()
        larger = f", or open the model with a larger context, at most {trained}" if trained > n_ctx else ""
        holds = f"more than the context of {n_ctx} tokens can hold"
        return ContextError(f"the prompt has {size} {unit}, {holds}; shorten it{larger}")


class Model(LoadedModel):
    """A model that is loaded here. Raises HobbitError, or KeyboardInterrupt where keep_going said False."""

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Setting],
        keep_going: KeepGoing,
        set_model: SetModel | None = None,
        simulated: bool = False,
        has_head: bool = False,
    ) -> None:
        if has_head:
            _check_head(path)
        overrides = kv_overrides(llama, settings)
        params = llama.llama_model_default_params()
        if set_model is not None:
            set_model(params)
        if simulated:
            params.no_alloc = True
            params.load_mode = llama.LLAMA_LOAD_MODE_NONE  # a mapping cannot be simulated
        params.kv_overrides, params.load_mtp = overrides, has_head
        stopped = False

        def on_progress(share: float, _user_data: object) -> bool:
            nonlocal stopped
            stopped = not keep_going(share)
            return not stopped

        params.progress_callback = llama.llama_progress_callback(on_progress)
        pointer = llama.llama_model_load_from_file(bytes(path), params)
        if not pointer:
            if stopped:
                raise KeyboardInterrupt
            raise LoadError(load_failure(path))
        super().__init__(path, pointer)
        if not simulated and llama.llama_vocab_type(self.vocab) == llama.LLAMA_VOCAB_TYPE_NONE:
            self.close()
            raise HobbitError(
                f"{path} has no vocabulary, so it cannot read or write text; use a complete model"
            )

    def close(self) -> None:
        self.cache.close()
        llama.llama_model_free(self.pointer)


def _check_head(path: Path) -> None:
    """Raises HobbitError where the file does not hold a draft head."""
    from pyhobbit.model.model_file import holds_head, model_parts  # takes memory that others save

    files = model_parts(path)
    if holds_head(tensor.name for file in files for tensor in file.tensors):
        return
    architecture = files[0].get("general.architecture", "")
    is_announced = files[0].get(f"{architecture}.nextn_predict_layers", 0) > 0
    lacks = "announces a draft head (MTP) and does not hold it" if is_announced else "has no draft head (MTP)"
    raise HobbitError(f"{path.name} {lacks}; run it without, or use a file that holds one")


class Context:
    """One sequence and its KV cache. Holds the model, which must outlive it. Raises HobbitError."""

    def __init__(self, model: Model, set_context: SetContext, aborted: Callable[[], bool]) -> None:
        self.model = model
        params = llama.llama_context_default_params()
        set_context(params, model)
        self.n_ctx, self.n_threads = params.n_ctx, params.n_threads
        self.n_ubatch, self._n_batch = params.n_ubatch, params.n_batch
        self._aborted = aborted
        self._came: Callable[[], bool] = lambda: False  # Ctrl-C
        self._watch: Callable[[], None] | None = None
        self._watched_s = 0.0
        self._abort = llama.ggml_abort_callback(lambda _user_data: self._is_aborted())
        self._no_abort = llama.ggml_abort_callback()
        self.pointer = llama.llama_init_from_model(model.pointer, params)
        if not self.pointer:
            raise HobbitError(load_failure(model.path, "a smaller context needs less memory"))
        self.tokens: list[int] = []  # in the KV cache

    def close(self) -> None:
        llama.llama_free(self.pointer)

    def evaluate(self, tokens: Sequence[int], watch: Watch | None = None) -> bool:
        """Appends tokens to the KV cache and computes the logits after the last; False when aborted.

        watch: is told now and then.  Only passes of several tokens can be watched and aborted: asking costs
        too much beside a single one.
        """
        for i in range(0, len(tokens), self._n_batch):
            batch = tokens[i : i + self._n_batch]
            self._watch = None if watch is None else partial(watch, i, len(batch))
            if not self._decode(batch, may_abort=len(tokens) > 1):
                return False
        return True

    def verify(self, tokens: Sequence[int]) -> bool:
        """As evaluate(), with the logits after each token; the context must have been made for so many."""
        return self._decode(tokens, may_abort=True, all_logits=True)

    def _is_aborted(self) -> bool:
        now = time.monotonic()
        if self._watch is not None and now - self._watched_s > _WATCH_S:
            self._watched_s = now
            self._watch()
        return self._came() or self._aborted()

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Forgets what was and computes tokens; the logits after each, float32 [len(tokens), n_vocab]."""
        self.truncate(0)
        self._decode(tokens, may_abort=False, all_logits=True)
        return self.last_logits(len(tokens))

    def _decode(self, tokens: Sequence[int], may_abort: bool, all_logits: bool = False) -> bool:
        """Appends at most n_batch tokens; computes the logits after the last, or all. False when aborted."""
        self.model.check_process()
        llama.llama_set_abort_callback(self.pointer, self._abort if may_abort else self._no_abort, None)
        array = (llama.llama_token * len(tokens))(*tokens)  # the batch only points to it
        batch = llama.llama_batch_get_one(array, len(tokens))
        start = len(self.tokens)
        batch.pos = (llama.llama_pos * len(tokens))(*range(start, start + len(tokens)))
        if all_logits:
            batch.logits = (ctypes.c_int8 * len(tokens))(*[1] * len(tokens))
        with ctrl_c_waits() as self._came:
            status = _STATUS_FAILED
            try:
                status = llama.llama_decode(self.pointer, batch)
            finally:
                if status != 0:
                    self.truncate(len(self.tokens))
            if status == 2:
                return False
            self._check(status)
            self.tokens.extend(tokens)
        return True

    def _check(self, status: int) -> None:
        if status != 0:
            reason = self.model.cache.failure() if status == _STATUS_FAILED else None
            raise HobbitError(reason or f"llama.cpp cannot compute the next token: {log.reason()}")

    def last_logits(self, n: int = 1) -> np.ndarray:
        """Logits of the last n tokens: float32 [n, n_vocab], until the next pass. Raises HobbitError."""
        found = np.ctypeslib.as_array(llama.llama_get_logits(self.pointer), (n, self.model.n_vocab()))
        return self.model.check_finite(found)

    def extend(self, tokens: Sequence[int], position: int, sequences: Sequence[int]) -> np.ndarray:
        """Appends a token to each sequence, at one position; returns last_logits(). Is not aborted."""
        self.model.check_process()
        llama.llama_set_abort_callback(self.pointer, self._no_abort, None)
        batch = llama.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for i, (token, sequence) in enumerate(zip(tokens, sequences, strict=True)):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, True
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            self._check(llama.llama_decode(self.pointer, batch))
        finally:
            llama.llama_batch_free(batch)
        return self.last_logits(len(tokens))

    def copy_sequence(self, source: int, target: int) -> None:
        """The target then has the source's tokens, and what it had before is forgotten."""
        memory = llama.llama_get_memory(self.pointer)
        llama.llama_memory_seq_rm(memory, target, -1, -1)
        llama.llama_memory_seq_cp(memory, source, target, -1, -1)

    def save(self, path: Path) -> None:
        """Writes tokens and KV cache, all or nothing. Raises HobbitError."""
        array, n = (llama.llama_token * len(self.tokens))(*self.tokens), len(self.tokens)
        with os_errors(f"the KV cache cannot be written to {path}"), atomic_output(path) as temporary:
            if not llama.llama_state_seq_save_file(self.pointer, bytes(temporary), 0, array, n):
                raise OSError(0, log.reason())

    def load(self, path: Path) -> bool:
        """Replaces tokens and KV cache by those of a file; False, and empty, where it does not fit."""
        self.clear()
        array, n = (llama.llama_token * self.n_ctx)(), ctypes.c_size_t()
        to = self.pointer, bytes(path), 0, array, len(array), ctypes.byref(n)
        if not llama.llama_state_seq_load_file(*to):
            self.clear()
            return False
        self.tokens[:] = array[: n.value]
        return True

    def clear(self) -> None:
        """Forgets all sequences."""
        self.tokens.clear()  # first: a signal may raise behind it, and the cache may then hold more, not less
        llama.llama_memory_clear(llama.llama_get_memory(self.pointer), True)

    def truncate(self, n_tokens: int) -> None:
        """Forgets all but the first n_tokens, or everything where the architecture cannot keep a part."""
        del self.tokens[n_tokens:]  # first, as in clear()
        memory = llama.llama_get_memory(self.pointer)
        if not llama.llama_memory_seq_rm(memory, 0, len(self.tokens), -1):
            self.clear()


class Sampler:
    """Draws the next token from the logits of a context, in the order of llama.cpp's own default chain."""

    def __init__(self, config: SamplingConfig, model: Model, grammar: str = "") -> None:
        first = llama.llama_sampler_init_grammar(model.vocab, grammar.encode(), b"root") if grammar else None
        if grammar and not first:
            raise HobbitError("the grammar is no GBNF with a root")
        self.pointer = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        for stage in [*([first] if first else []), *self._stages(config, model.n_vocab())]:
            llama.llama_sampler_chain_add(self.pointer, stage)

    @staticmethod
    def _stages(config: SamplingConfig, n_vocab: int) -> Iterator[int]:
        if config.repeat_penalty != 1:
            repeat = (config.repeat_last_n, config.repeat_penalty, 0.0, 0.0)
            yield llama.llama_sampler_init_penalties(n_vocab, *repeat)
        if config.temp == 0:
            yield llama.llama_sampler_init_greedy()
            return
        yield llama.llama_sampler_init_top_k(config.top_k)
        yield llama.llama_sampler_init_top_p(config.top_p, 1)
        yield llama.llama_sampler_init_min_p(config.min_p, 1)
        yield llama.llama_sampler_init_temp(config.temp)
        yield llama.llama_sampler_init_dist(_RANDOM_SEED if config.seed in (None, -1) else config.seed)

    def sample(self, context: Context, i: int = -1) -> int:
        """From the logits after token i of the last computation. Raises HobbitError: they are no numbers."""
        row = llama.llama_get_logits_ith(context.pointer, i)
        context.model.check_finite(np.ctypeslib.as_array(row, (context.model.n_vocab(),)))
        return llama.llama_sampler_sample(self.pointer, context.pointer, i)

    def close(self) -> None:
        llama.llama_sampler_free(self.pointer)
