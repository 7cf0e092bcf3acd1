# SPDX-License-Identifier: MIT
"""The few things that the engine wants from llama.cpp, on llama-cpp-python's low-level bindings.

The high-level llama_cpp.Llama holds a buffer of n_batch x n_vocab logits (hundreds of MB), which a process
with a bound on its memory cannot afford, and hides how long a token took.
"""

import contextlib
import ctypes
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pyhobbit.engine.cache import Cache
from pyhobbit.errors import HobbitError
from pyhobbit.native.ffi import last_error, lib, llama
from pyhobbit.settings.config import SamplingConfig, Setting
from pyhobbit.settings.overrides import kv_overrides

_LOG_LEVEL_ERROR = 4
_LOG_LEVEL_CONTINUED = 5
_RANDOM_SEED = 0xFFFFFFFF
_STATUS_FAILED = -3  # of llama_decode: a backend, and thus perhaps the expert cache, gave up


class Log:
    """Takes llama.cpp's log, one per process: keeps the error lines, shows everything when verbose."""

    def __init__(self) -> None:
        self.verbose = False
        self.errors: list[str] = []
        self._level = 0
        self._callback = llama.llama_log_callback(self._on_text)
        llama.llama_log_set(self._callback, None)

    def start(self, verbose: bool) -> None:
        """Forgets the errors so far."""
        self.verbose = verbose
        self.errors.clear()

    def reason(self) -> str | None:
        """The first error since start(), without the name of the function that wrote it."""
        for line in self.errors:
            reason = re.sub(r"^(\w+: )+(error loading model: )?(\w+: )*", "", line).strip()
            if reason and not reason.startswith("failed to load model"):
                return reason
        return None

    def _on_text(self, level: int, text: bytes, _user_data: object) -> None:
        line = text.decode("utf-8", "replace")
        if level != _LOG_LEVEL_CONTINUED:
            self._level = level
        if self._level == _LOG_LEVEL_ERROR:
            self.errors.append(line)
        if self.verbose:
            sys.stderr.write(line)


llama.llama_backend_init()
log = Log()

opening = threading.RLock()
"""Held while a model is opened or closed: llama.cpp's log and hobbit's last error belong to the process."""


def _failure(path: Path, hint: str) -> HobbitError:
    reason = log.reason() or "llama.cpp gave no reason"
    return HobbitError(last_error() or f"{path} cannot be loaded: {reason}; {hint}")


@dataclass(frozen=True)
class ContextSize:
    """n_ubatch: tokens computed at once, None for n_batch.  n_outputs: logits held, n_vocab floats each."""

    n_ctx: int
    n_batch: int
    n_threads: int
    n_ubatch: int | None = None
    n_outputs: int = 1


class Model:
    """The loaded weights and the vocabulary. `keep_going` is asked now and then; False ends the loading.

    Raises HobbitError when the file cannot be loaded, KeyboardInterrupt when keep_going said False.
    """

    def __init__(self, path: Path, settings: Mapping[str, Setting], keep_going: Callable[[], bool]) -> None:
        self.path = path
        overrides = kv_overrides(llama, settings)
        params = llama.llama_model_default_params()
        params.kv_overrides = overrides
        params.progress_callback = llama.llama_progress_callback(lambda _progress, _user_data: keep_going())
        lib.hobbit_clear_last_error()
        self.pointer = llama.llama_model_load_from_file(bytes(path), params)
        if not self.pointer:
            if not keep_going():
                raise KeyboardInterrupt
            raise _failure(path, "if the file is incomplete or damaged, download or convert it again")
        self.vocab = llama.llama_model_get_vocab(self.pointer)
        if llama.llama_vocab_type(self.vocab) == llama.LLAMA_VOCAB_TYPE_NONE:
            self.close()
            raise HobbitError(
                f"{path} has no vocabulary, so it cannot read or write text; use a complete model"
            )
        self._piece = ctypes.create_string_buffer(256)

    def close(self) -> None:
        llama.llama_model_free(self.pointer)

    def failure(self) -> str | None:
        """Why its experts cannot be computed any more, None where they can."""
        with contextlib.closing(Cache(self.pointer)) as cache:
            return cache.failure()

    def description(self) -> str:
        buffer = ctypes.create_string_buffer(256)
        llama.llama_model_desc(self.pointer, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

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

    def n_ctx_train(self) -> int:
        return llama.llama_model_n_ctx_train(self.pointer)

    def tokenize(self, text: str) -> list[int]:
        """Tokens of a whole prompt: special tokens in the text count, the model's own are put in front."""
        data = text.encode("utf-8", "surrogateescape")
        n_tokens = -(len(data) + 16)  # more, where the vocabulary spells a space or a character in bytes
        while n_tokens < 0:
            tokens = (llama.llama_token * -n_tokens)()
            n_tokens = llama.llama_tokenize(self.vocab, data, len(data), tokens, len(tokens), True, True)
        return tokens[:n_tokens]

    def piece(self, token: int) -> bytes:
        """The bytes a token writes: a character may take several tokens. Control tokens write nothing."""
        size = llama.llama_token_to_piece(self.vocab, token, self._piece, len(self._piece), 0, False)
        if size < 0:
            self._piece = ctypes.create_string_buffer(-size)
            return self.piece(token)
        return self._piece.raw[:size]

    def special_text(self, token: int) -> str:
        """How a special token is spelled; empty where the model has none."""
        return llama.llama_vocab_get_text(self.vocab, token).decode("utf-8", "replace") if token >= 0 else ""

    def ends_answer(self, token: int) -> bool:
        return llama.llama_vocab_is_eog(self.vocab, token)


class Context:
    """One sequence and its KV cache. Holds the model, which must outlive it. Raises HobbitError."""

    def __init__(self, model: Model, size: ContextSize, aborted: Callable[[], bool]) -> None:
        self.model = model
        params = llama.llama_context_default_params()
        params.n_ctx = size.n_ctx
        params.n_batch = min(size.n_batch, size.n_ctx)
        params.n_ubatch = min(size.n_ubatch or params.n_batch, params.n_batch)
        params.n_outputs_max = size.n_outputs
        params.n_threads = params.n_threads_batch = size.n_threads
        self._n_batch = params.n_batch
        self._abort = llama.ggml_abort_callback(lambda _user_data: aborted())
        self._no_abort = llama.ggml_abort_callback()
        lib.hobbit_clear_last_error()
        self.pointer = llama.llama_init_from_model(model.pointer, params)
        if not self.pointer:
            raise _failure(model.path, "a smaller --ctx needs less memory")
        self.tokens: list[int] = []  # in the KV cache

    def close(self) -> None:
        llama.llama_free(self.pointer)

    def evaluate(self, tokens: Sequence[int]) -> bool:
        """Appends tokens to the KV cache and computes the logits after the last; False when aborted.

        Only passes of several tokens can be aborted: asking costs too much beside a single one.
        """
        llama.llama_set_abort_callback(self.pointer, self._abort if len(tokens) > 1 else self._no_abort, None)
        for start in range(0, len(tokens), self._n_batch):
            if not self._decode(tokens[start : start + self._n_batch]):
                return False
        return True

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Forgets what was and computes tokens, at most n_batch and n_outputs; returns the logits after each.

        float32 [len(tokens), n_vocab], valid until the next computation. Cannot be aborted.
        """
        self.truncate(0)
        llama.llama_set_abort_callback(self.pointer, self._no_abort, None)
        self._decode(tokens, all_logits=True)
        shape = (len(tokens), self.model.n_vocab())
        return np.ctypeslib.as_array(llama.llama_get_logits(self.pointer), shape)

    def _decode(self, tokens: Sequence[int], all_logits: bool = False) -> bool:
        """Appends at most n_batch tokens; computes the logits after the last, or all. False when aborted."""
        array = (llama.llama_token * len(tokens))(*tokens)  # the batch only points to it
        batch = llama.llama_batch_get_one(array, len(tokens))
        if all_logits:
            batch.logits = (ctypes.c_int8 * len(tokens))(*[1] * len(tokens))
        status = llama.llama_decode(self.pointer, batch)
        if status != 0:
            self.truncate(len(self.tokens))
        if status == 2:
            return False
        if status != 0:
            reason = self.model.failure() if status == _STATUS_FAILED else None
            raise HobbitError(reason or f"llama.cpp cannot compute the next token: {log.reason()}")
        self.tokens.extend(tokens)
        return True

    def truncate(self, n_tokens: int) -> None:
        """Forgets all but the first n_tokens, or everything where the architecture cannot keep a part."""
        memory = llama.llama_get_memory(self.pointer)
        if llama.llama_memory_seq_rm(memory, 0, n_tokens, -1):
            del self.tokens[n_tokens:]
        else:
            llama.llama_memory_clear(memory, True)
            self.tokens.clear()


class Sampler:
    """Draws the next token from the logits of a context, in the order of llama.cpp's own default chain."""

    def __init__(self, config: SamplingConfig, n_vocab: int) -> None:
        self.pointer = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        for stage in self._stages(config, n_vocab):
            llama.llama_sampler_chain_add(self.pointer, stage)

    @staticmethod
    def _stages(config: SamplingConfig, n_vocab: int) -> list[int]:
        repeat = (config.repeat_last_n, config.repeat_penalty, 0.0, 0.0)
        penalties = (
            [llama.llama_sampler_init_penalties(n_vocab, *repeat)] if config.repeat_penalty != 1 else []
        )
        if config.temp == 0:
            return [*penalties, llama.llama_sampler_init_greedy()]
        return [
            *penalties,
            llama.llama_sampler_init_top_k(config.top_k),
            llama.llama_sampler_init_top_p(config.top_p, 1),
            llama.llama_sampler_init_min_p(config.min_p, 1),
            llama.llama_sampler_init_temp(config.temp),
            llama.llama_sampler_init_dist(_RANDOM_SEED if config.seed is None else config.seed),
        ]

    def sample(self, context: Context) -> int:
        return llama.llama_sampler_sample(self.pointer, context.pointer, -1)

    def close(self) -> None:
        llama.llama_sampler_free(self.pointer)
