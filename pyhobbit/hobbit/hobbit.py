# SPDX-License-Identifier: MIT
"""llama-cpp-python's Llama on the expert cache."""

import os
import time
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING, Any

import numpy as np

from pyhobbit.engine.cached import CachedModel, Tally
from pyhobbit.engine.llama import LoadedModel, ctrl_c_waits
from pyhobbit.engine.placement import Placed, choose
from pyhobbit.engine.plan import lay_out
from pyhobbit.engine.stats import ModelInfo
from pyhobbit.errors import ComputeError, HobbitError
from pyhobbit.hobbit import guards, keywords
from pyhobbit.hobbit.params import N_BATCH, N_CTX, given_batch, n_drafts, set_context, set_model, set_own
from pyhobbit.hobbit.text_drafts import TextDrafts
from pyhobbit.model.loading import load_failure, log, opening
from pyhobbit.model.names import check_model_file
from pyhobbit.native import ffi
from pyhobbit.native.rpc_servers import add_rpc_servers
from pyhobbit.quality.stored import low_tier_text
from pyhobbit.settings.config import CacheConfig, EngineConfig, Setting
from pyhobbit.settings.papers import settings_of
from pyhobbit.settings.table import NUMBERS, OPTIONS

if TYPE_CHECKING:
    from llama_cpp import Llama, LlamaState

    class _Llama(Llama):
        """Says Any where Llama says that an answer may be an iterator, which nobody could index."""

        def __call__(self, *arguments: Any, **options: Any) -> Any: ...

        create_completion = create_chat_completion = __call__
else:
    _Llama = ffi.llama.Llama

_RANDOM = (None, -1, ffi.llama.LLAMA_DEFAULT_SEED)  # seeds
# Attributes of Llama that hold native memory: a closed model has none.
_NATIVE = ("_model", "_ctx", "_batch", "_weights", "tokenizer_")


class Hobbit(CachedModel, _Llama):
    """A GGUF model that may be larger than memory, with the interface of llama_cpp.Llama.

    Everything that Llama offers is inherited. The routed experts stay on disk; those in use lie in a cache.
    A model without experts runs as in Llama.

    All settings have defaults, and a model that has been calibrated brings its own. A file of options beside
    the model (MODEL.toml) sets memory, context, threads and the cache where no keyword does:

    model_path: GGUF file; of a split model its first file.

    SETTINGS

    Sizes are bytes, or text like "8G".

    cache: the same settings as one CacheConfig; what is given by name comes before it.

    paper: the configuration of a paper: hobbit, edgemoe, mobile, twiddler or daop. Settings that are given
    come before it.

    rpc: other machines as HOST:PORT,..., which run `pyhobbit worker`: the devices RPC0, RPC1 and so on.

    flash_attn: None leaves it to llama.cpp, as its own programs do.  n_batch, n_ubatch: if neither is given,
    the tokens of a prompt per pass are chosen by memory, from 512 to 4096.  llama: every other keyword of
    llama_cpp.Llama; n_threads and n_threads_batch are one per processor core where they are not given, and
    verbose, which shows llama.cpp's log, is off. draft_model also takes TextDrafts, whose drafts
    are as many as pay.

    A context manager. Any number of models may be open, each with a cache of its own. One thread at a time
    may use a model, for one answer; a second one gets HobbitError. So does all but close() of a closed model.
    As in llama_cpp.Llama there is no async interface; a program with an event loop uses a thread.

    Where the engine cannot compute (an error of the disk, a model file that has changed), methods raise
    HobbitError with its reason, a RuntimeError too. Close such a model.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        cache: CacheConfig | None = None,
        paper: str | None = None,
        flash_attn: bool | None = None,
        rpc: str | None = None,
        **llama: Any,
    ) -> None:
        """Opens a model. Raises ConfigError or HobbitError, also ValueErrors; TypeError for a keyword."""
        self._turns = guards.Turns()
        keywords.check(llama, Hobbit.__init__, _Llama.__init__)
        given = {name: llama.pop(name) for name in OPTIONS if llama.get(name) is not None}
        if paper is not None:
            own = {each: value for each in OPTIONS if (value := getattr(cache, each, None)) is not None}
            given |= settings_of(paper, {**own, **given})
        stored, stored_llama = keywords.of_model(Path(model_path), cache, given, llama)
        stored_rpc = stored_llama.pop("rpc", None)
        if machines := rpc or stored_rpc:
            add_rpc_servers(machines)
        llama = {"verbose": False, **stored_llama, **llama}
        self.cache_config = keywords.cache_config(cache, {**stored, **given})
        own = {"model_path": os.fspath(model_path), "cache": self.cache_config, "flash_attn": flash_attn}
        own |= {"rpc": machines} if machines else {}
        self._arguments = {**llama, **own}
        self._tally = Tally()
        self._n_kept = 0  # tokens in the KV cache after the last computation
        self._is_whole = True  # nothing that computes has broken off
        start = time.perf_counter()
        self._open(llama)
        self._load_s = time.perf_counter() - start
        if self.cache_config.settings() and not self._loaded.cache and self.placement.n_cpu is None:
            warnings.warn(
                f"{model_path} is a dense model: it runs as in llama_cpp.Llama, "
                "and the settings of the expert cache do not apply to it",
                stacklevel=2,
            )
        info = self.info()
        is_stored = info.precision and not any(f"hobbit.{n}" in (self.kv_overrides or {}) for n in NUMBERS)
        if is_stored and (used := low_tier_text(Path(model_path), info, self.cache_config)):
            warnings.warn(f"{model_path}: {used.replace('--quality ', 'quality=')}", stacklevel=2)

    def _open(self, llama: Mapping[str, Any]) -> None:
        path = self._arguments["model_path"]
        with guards.opening_errors():
            check_model_file(Path(path))
            self.placement = self._placed(path, llama)
        with opening:
            self._load(path, llama)

    def _placed(self, path: str, llama: Mapping[str, Any]) -> Placed:
        fill = set_model(self._arguments)
        if llama.get("vocab_only"):
            return Placed(self.cache_config, fill)
        config = EngineConfig(
            self.cache_config,
            n_ctx=llama.get("n_ctx", N_CTX) or None,
            n_threads=llama.get("n_threads") or None,
            overrides=llama.get("kv_overrides") or {},
        )
        return choose(Path(path), config, fill)

    def _fit(self, path: str, llama: Mapping[str, Any]) -> tuple[dict[str, Setting], int]:
        """The cache's settings, and tokens per pass, once it is known that weights and context fit."""
        if llama.get("vocab_only"):
            return self.cache_config.settings(), N_BATCH
        own = self._arguments
        config = EngineConfig(self.placement.cache, n_batch=given_batch(own), n_drafts=n_drafts(own))
        config = replace(config, overrides=llama.get("kv_overrides") or {})
        fill = set_context(own), self.placement.set_model
        with guards.opening_errors():
            plan = lay_out(Path(path), config, *fill)
        return {**config.cache.settings(), "hobbit.process": plan.process}, plan.n_batch

    def _load(self, path: str, llama: Mapping[str, Any]) -> None:
        settings, n_batch = self._fit(path, llama)
        is_chosen = given_batch(self._arguments) is None
        batch = {"n_batch": n_batch, "n_ubatch": n_batch} if is_chosen else {}
        own = {
            **batch,
            "n_threads": EngineConfig.computing_threads(llama.get("n_threads")),
            "n_threads_batch": EngineConfig.computing_threads(llama.get("n_threads_batch")),
            "flash_attn": bool(self._arguments["flash_attn"]),
            "kv_overrides": {**(llama.get("kv_overrides") or {}), **settings},
            "n_gpu_layers": self.placement.fill(ffi.llama.llama_model_default_params()).n_gpu_layers,
        }
        log.start(llama["verbose"])
        try:
            with ctrl_c_waits():
                super().__init__(path, **{**llama, **own})
            if self.lora_path and not self._lora_adapter:  # a null pointer, which Llama takes for one
                raise RuntimeError("the LoRA adapter cannot be loaded")
        except BaseException as e:
            has_model, has_context = "_model" in self.__dict__, "_ctx" in self.__dict__
            self._free()
            # Errors of Llama's own, such as for a keyword, leave no trace in the native code.
            if not isinstance(e, ValueError | RuntimeError) or not (log.errors or ffi.last_error()):
                raise
            hint = "a smaller n_ctx needs less memory" if has_model and not has_context else None
            lora = self.lora_path if has_context else None
            raise guards.InputError(load_failure(lora or path, hint)) from e
        self._weights = LoadedModel(Path(path), self._model.model)
        self._ctx.decode = guards.explained(self._ctx.decode, self._weights)  # type: ignore[assignment, method-assign]
        if isinstance(self.draft_model, TextDrafts):
            self._logits_all = bool(self._arguments.get("logits_all"))  # Llama sets it for any draft model
            self._batch.set_batch = self.draft_model.with_logits(self._batch.set_batch)
            remove = self._ctx.kv_cache_seq_rm
            # Llama says all sequences, where a recurrent state cannot go back
            self._ctx.kv_cache_seq_rm = lambda _, *span: remove(0, *span)
        self._n_ctx = self.n_ctx()
        self.set_seed(llama.get("seed"))
        self.kv_overrides = llama.get("kv_overrides")

    @property
    def _loaded(self) -> LoadedModel:
        return self._weights

    @property
    def model_params(self) -> Any:
        """llama.cpp's parameters of the model."""
        return self.__dict__["model_params"]

    @model_params.setter
    def model_params(self, params: Any) -> None:
        self.placement.fill(params)
        self.__dict__["model_params"] = params

    @property
    def _model(self) -> Any:
        return self.__dict__["_model"] if "_model" in self.__dict__ else self.__getattr__("_model")

    @_model.setter
    def _model(self, model: Any) -> None:
        self.__dict__["_model"] = model
        # Llama sets this between preparing context_params and using them, and there is no other moment.
        set_own(self.context_params, self._arguments)

    def __getattr__(self, name: str) -> Any:
        if name in _NATIVE:
            raise HobbitError("the model is closed; open it again with Hobbit(...)")
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    # --- the end

    def __repr__(self) -> str:
        state = f"n_ctx={self.n_ctx()}" if "_model" in self.__dict__ else "closed"
        return f"<Hobbit {self._arguments['model_path']}, {state}>"

    def __enter__(self) -> "Hobbit":
        _ = self._model
        return self

    def close(self) -> None:
        """Frees everything, once. Raises HobbitError if a trace is incomplete, or another thread computes."""
        is_traced = "_weights" in self.__dict__ and self.cache_config.trace is not None
        # the constructor may not have begun
        with (self.__dict__.get("_turns") or guards.Turns()).alone(), opening if is_traced else nullcontext():
            if is_traced:
                ffi.lib.hobbit_clear_last_error()
            self._free()
            if is_traced and (error := ffi.last_error()):
                raise HobbitError(error)

    def _free(self) -> None:
        if "_stack" in self.__dict__:
            super().close()
        if "_weights" in self.__dict__:
            self._weights.cache.close()
        for name in _NATIVE:
            self.__dict__.pop(name, None)
        self._sampler = None

    def __getstate__(self) -> dict[str, Any]:
        """The constructor's arguments: a copy or an unpickled model is opened anew."""
        is_random = self._arguments.get("seed") in _RANDOM
        return self._arguments if is_random else {**self._arguments, "seed": self._seed}

    def n_ctx(self) -> int:
        """Tokens of context: as many as were asked for, though llama.cpp rounds them up."""
        asked, n = self.__dict__.get("input_ids"), super().n_ctx()
        return n if asked is None else min(n, len(asked))

    def set_seed(self, seed: int | None) -> None:
        """Sets what the following answers are drawn with. A number drawn at random stands for None and -1."""
        super().set_seed(SystemRandom().randrange(_RANDOM[-1]) if seed in _RANDOM else seed)

    # --- computing

    def eval(self, tokens: Sequence[int]) -> None:
        """Computes tokens behind those in the KV cache. Raises HobbitError: no room, or the engine failed."""
        self._check_ids(tokens)
        n_free = len(self.input_ids) - self.n_tokens
        if len(tokens) > n_free:
            raise ComputeError(
                f"{len(tokens)} more tokens do not fit: the context has room for {len(self.input_ids)} "
                f"and holds {self.n_tokens}; open the model with a larger n_ctx, or start over with reset()"
            )
        with self._turns.alone():
            self._make_whole()
            self._weights.cache.keep(self._ctx.ctx, self.n_tokens, self._n_kept)
            start = time.perf_counter()
            self._is_whole = False
            super().eval(tokens)
            self._is_whole = True
            if isinstance(self.draft_model, TextDrafts):
                self.draft_model.note_pass(len(tokens), time.perf_counter() - start)
        self._tally.add_prompt(len(tokens), len(tokens))
        self._n_kept = self.n_tokens

    def _make_whole(self) -> None:
        """Makes good what broke off, wherever a signal raised: the KV cache may hold more than n_tokens."""
        if not self._is_whole:
            self._requires_eval = True  # the logits may be another computation's
            if not self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1):  # a recurrent state cannot go back
                super().reset()

    def _create_completion(self, prompt: str | list[int], *args: Any, **kwargs: Any) -> Iterator[Any]:
        n_ctx, text = self.n_ctx(), prompt if isinstance(prompt, str) else None
        if text is not None:
            guards.check_text(text)
            self._weights.check_size(text, n_ctx)
        elif not isinstance(prompt, list) or not all(isinstance(i, int | np.integer) for i in prompt):
            raise guards.InputError(f"the prompt is {prompt!r:.80}; give a text or a list of tokens")
        try:
            yield from super()._create_completion(prompt, *args, **kwargs)
        except ValueError as e:
            n_tokens = len(prompt if text is None else self.tokenize(text.encode(), special=True))
            if n_tokens < n_ctx:
                raise
            raise self._weights.too_long(n_tokens, "tokens", n_ctx) from e

    def _init_sampler(self, *args: Any, logits_processor: Sequence[Any] | None = None, **kwargs: Any) -> Any:
        guards.check_numbers({name: value for name, value in kwargs.items() if name != "grammar"})
        if kwargs.get("grammar") is not None:
            guards.check_grammar(self._model.vocab, kwargs["grammar"])
        self._processors = guards.Processors(logits_processor or ())
        guarded: Any = self._processors.guarded() or None
        sampler = super()._init_sampler(*args, logits_processor=guarded, **kwargs)  # type: ignore[misc]
        if kwargs.get("grammar") is not None:
            sampler.sample = partial(guards.sample_allowed, sampler.sampler)
        return sampler

    def sample(self, *args: Any, **kwargs: Any) -> int:
        """Llama's own. Raises what a logits processor raises, and HobbitError where nothing was computed."""
        with self._turns.alone():
            idx = kwargs.get("idx")
            row = -1 if idx is None else idx - self.n_tokens
            # llama.cpp ends the process for a row that it does not have
            logits = self.n_tokens and self._is_whole and ffi.llama.llama_get_logits_ith(self.ctx, row)
            if not logits:
                raise ComputeError("there is nothing to sample from: compute tokens first, with eval()")
            self._weights.check_finite(np.ctypeslib.as_array(logits, (self.n_vocab(),)))
            token = super().sample(*args, **kwargs)
        self._processors.check()
        return token

    def _check_ids(self, tokens: Sequence[int]) -> None:
        """llama.cpp ends the process for an id that its vocabulary does not have."""
        last = self.n_vocab() - 1
        if len(tokens) and not 0 <= min(tokens) <= max(tokens) <= last:
            wrong = min(tokens) if min(tokens) < 0 else max(tokens)
            raise guards.InputError(f"there is no token {wrong}: this model's lie between 0 and {last}")

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """Llama's own. Raises HobbitError, also a ValueError, for an id that the vocabulary does not have."""
        self._check_ids(tokens)  # prev_tokens may hold places of an image, which have no ids
        given: Any = {"tokens": tokens, "prev_tokens": prev_tokens, "special": special}  # it takes sequences
        return super().detokenize(**given)

    def embed(
        self,
        input: str | list[str],  # noqa: A002
        normalize: bool = False,
        truncate: bool = True,
        return_count: bool = False,
    ) -> Any:
        """Embeds texts as Llama does, and warns of a text that it cuts. Raises HobbitError."""
        for text in [input] if isinstance(input, str) else input:
            guards.check_text(text)
            if truncate and (n := len(self.tokenize(text.encode()))) > self.n_batch:
                cut = f"a text of {n} tokens is cut to {self.n_batch}: open the model with a larger n_batch"
                warnings.warn(f"{cut} and n_ubatch", stacklevel=2)
        with self._turns.alone():
            super().reset()  # first: the KV cache is overwritten
            self._is_whole = False
            output, n_tokens = super().embed(input, normalize, truncate, return_count=True)
        self._tally.add_prompt(n_tokens, n_tokens)
        self._n_kept = 0
        return (output, n_tokens) if return_count else output

    def reset(self) -> None:
        """The next tokens begin a text, as in Llama."""
        with self._turns.alone():
            super().reset()

    def save_state(self) -> "LlamaState":
        """The state that load_state() goes back to, as in Llama. Raises HobbitError."""
        with self._turns.alone():
            self._make_whole()
            if (state := super().save_state()).llama_state_size:
                return state
        raise ComputeError("the state cannot be saved: there is not enough memory")

    def load_state(self, state: "LlamaState") -> None:
        """Goes back to a saved state. Raises HobbitError, and holds no tokens, for another model's."""
        with self._turns.alone():
            ids = self.input_ids
            try:
                super().load_state(state)
                ids[: self.n_tokens] = state.input_ids[: self.n_tokens]
            except BaseException as e:
                self.reset()
                if not isinstance(e, RuntimeError | ValueError):
                    raise
                raise ComputeError(f"the state does not fit this model and its context: {e}") from e
            finally:
                self.input_ids = ids  # Llama takes the state's, whose length is another context's
            self._n_kept = self.n_tokens
            self._weights.cache.begin_sequence(self._ctx.ctx)

    def generate(
        self, tokens: Sequence[int], *args: Any, **kwargs: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        """Yields token after token, as in Llama. Raises HobbitError, also where another answer was begun."""
        answer = self._turns.begin_answer()
        with self._turns.alone():
            self._make_whole()
        stream = super().generate(tokens, *args, **kwargs)
        sent, is_first, counts = None, True, self._tally.counts
        try:
            while True:
                self._turns.check(answer)
                start, before = time.perf_counter(), counts["prompt_tokens_evaluated"]
                try:
                    with self._turns.alone():
                        token = stream.send(sent)
                except StopIteration:
                    return
                except BaseException:
                    self._is_whole = False
                    raise
                seconds, n_evaluated = time.perf_counter() - start, counts["prompt_tokens_evaluated"] - before
                if is_first:
                    self._tally.add_prompt(len(tokens) - n_evaluated, 0)  # still in the KV cache
                else:
                    # tokens of the answer, not of the prompt
                    self._tally.add_prompt(-n_evaluated, -n_evaluated)
                if not self._weights.ends_answer(token):
                    self._tally.add_token(seconds, is_first)
                is_first = False
                sent = yield token
        finally:
            stream.close()

    # --- the expert cache

    def info(self) -> ModelInfo:
        """Figures of the opened model."""
        return self._loaded.info(self.n_ctx(), self.n_threads, self.cache_config.memory)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, repo_id: str, filename: str | None = None, **arguments: Any
    ) -> "Hobbit":
        """Opens a model from Hugging Face, downloaded unless it is there.

        repo_id: USER/NAME[:QUANT] as for all commands. All parts of a split model come along, and its low
        tier and calibration where they lie beside it.  filename: a name or pattern, which leaves the download
        to Llama: it takes that file alone.  arguments: of the constructor, or of Llama's from_pretrained().
        Raises as the constructor, and HobbitError: nothing to download, no network.
        """
        if filename is not None:
            return super().from_pretrained(repo_id, filename, **arguments)  # type: ignore[return-value]
        from pyhobbit.model.download import fetch  # takes half a second

        return cls(fetch(repo_id), **arguments)


if Hobbit.__doc__:  # not with python -OO
    Hobbit.__doc__ = Hobbit.__doc__.replace("SETTINGS", keywords.text())
Hobbit.__init__.__signature__ = keywords.signature(Hobbit.__init__)  # type: ignore[attr-defined]
