# SPDX-License-Identifier: MIT
"""Settings of a user. Making a dataclass checks its values and raises ConfigError."""

import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar

from pyhobbit._tables import CacheSettings
from pyhobbit._tables import Setting as Spec
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.native.threads import processor_cores
from pyhobbit.settings.table import OPTIONS

Setting = bool | int | float | str

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"([0-9]*\.?[0-9]+)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)

# llama.cpp carries a text setting in a field of 128 bytes, terminated.
_MAX_TEXT_BYTES = 127
_MAX_SEED = 2**32 - 2
_MAX_INT32 = 2**31 - 1
_MAX_FLOAT = sys.float_info.max


def parse_size(text: str) -> int:
    """Bytes of a size such as "2G", "512MiB", "1.5g" or "1000000"; units are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size <= 0:
        raise ConfigError(f"'{text}' is not a size; write it like 2G, 512M or as a number of bytes")
    if size < 1000 and text.strip().isdecimal():
        raise ConfigError(f"'{text}' is {size} bytes; for GiB write {size}G")
    return size


def format_size(n_bytes: float) -> str:
    """A size for people, e.g. "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} GiB"


def format_duration(seconds: float) -> str:
    """A time for people, e.g. "2 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def counted_tokens(n: int, kind: str = "") -> str:
    """A number of tokens for people, e.g. "1 token".  kind: a word before the noun."""
    return f"{n} {kind}{' ' if kind else ''}token{'' if n == 1 else 's'}"


def value_text(name: str, value: Any) -> str:
    """An option's value for people; "-" for None."""
    if value is None:
        return "-"
    if name in OPTIONS and OPTIONS[name][0].kind == "size":
        return format_size(value)
    if isinstance(value, tuple):
        return ", ".join(f"{each:g}" for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


@dataclass(frozen=True)
class CacheConfig(CacheSettings):
    """The expert cache. A value of None leaves a setting to the model file or to the engine.

    Each value is checked here. The engine refuses values that contradict each other, when it opens a model.
    Sizes are bytes. docs/quality.md explains t1 and t2, docs/gpu.md what concerns GPUs.
    """

    def __post_init__(self) -> None:
        for name, spec, value in _given(self):
            _check(name, spec, value)

    def settings(self) -> dict[str, Setting]:
        """Settings for hobbit_open (hobbit.h), by key."""
        given = given_settings(self)
        # Whoever sets up the cache wants it, even for a file that fits into memory.
        is_set_up = given.keys() - {"hobbit.quality", "hobbit.placement"}
        return {"hobbit.enable": True, **given} if is_set_up else given


def given_settings(cache: CacheSettings) -> dict[str, Setting]:
    """The settings that are not None, by key. Raises ConfigError for a wrong number of weights."""
    return {spec.key: _native(spec, value) for _, spec, value in _given(cache)}


def kv_overrides(llama: Any, settings: Mapping[str, Setting]) -> Any:
    """The array for params.kv_overrides, by the bindings of any build; must live as long as the params."""
    overrides = (llama.llama_model_kv_override * (len(settings) + 1))()  # an empty key ends it
    for override, (key, setting) in zip(overrides, settings.items(), strict=False):
        override.key = key.encode()
        if isinstance(setting, bool):
            override.tag, override.value.val_bool = llama.LLAMA_KV_OVERRIDE_TYPE_BOOL, setting
        elif isinstance(setting, int):
            override.tag, override.value.val_i64 = llama.LLAMA_KV_OVERRIDE_TYPE_INT, setting
        elif isinstance(setting, float):
            override.tag, override.value.val_f64 = llama.LLAMA_KV_OVERRIDE_TYPE_FLOAT, setting
        else:
            override.tag, override.value.val_str = llama.LLAMA_KV_OVERRIDE_TYPE_STR, os.fsencode(setting)
    return overrides


def _given(cache: CacheSettings) -> Iterator[tuple[str, Spec, Any]]:
    """The settings that are not None, by option. Raises ConfigError for a wrong number of weights."""
    for name, specs in OPTIONS.items():
        if (value := getattr(cache, name)) is not None:
            values = value if len(specs) > 1 else (value,)
            keys = ", ".join(spec.key.removeprefix("hobbit.") for spec in specs)
            wrong = f"{name} has {len(values)} numbers; give {len(specs)}: {keys}"
            _require(len(values) == len(specs), wrong)
            for spec, each in zip(specs, values, strict=True):
                yield name, spec, each


def _check(name: str, spec: Spec, value: Any) -> None:
    """Raises ConfigError where the setting cannot have this value."""
    if spec.kind in ("number", "count", "size"):
        _require_number(name, value, "number" if spec.kind == "number" else "whole number")
        if spec.kind == "size":
            _require(value > 0, f"{name} is {value}; it must be positive")
        is_within = spec.min <= value <= spec.max
        _require(is_within, f"{name} is {value}; it must lie between {spec.min:g} and {spec.max:g}")
    elif spec.kind == "flag":
        _require(isinstance(value, bool), f"{name} is {value!r}; it must be True or False")
    elif spec.kind == "choice":
        _require(value in spec.choices, f"{name} is '{value}'; choose one of {', '.join(spec.choices)}")
    elif spec.kind == "path":
        _path_text(value)
    else:
        is_text = 0 < len(os.fsencode(value)) <= _MAX_TEXT_BYTES
        _require(is_text, f"{name} is '{value}'; it takes 1 to {_MAX_TEXT_BYTES} bytes")


def _native(spec: Spec, value: Any) -> Setting:
    if spec.kind == "path":
        return _path_text(value)
    return float(value) if spec.kind == "number" else value  # llama.cpp passes settings on by their type


def _require_number(name: str, value: object, kind: str) -> None:
    """Refuses a value that is no number. kind: "number" or "whole number"; None is no value."""
    ok = value is None or (
        isinstance(value, int if kind == "whole number" else Real) and not isinstance(value, bool)
    )
    _require(ok, f"{name} is {value!r}; it must be a {kind}")


def _path_text(path: Path) -> str:
    for text in (str(path), os.path.relpath(path)):
        if len(os.fsencode(text)) <= _MAX_TEXT_BYTES:
            return text
    raise ConfigError(
        f"the path of {path} is longer than {_MAX_TEXT_BYTES} bytes; start pyhobbit in its folder"
    )


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is drawn; llama.cpp's defaults."""

    temp: float = 0.8
    """Temperature, 0 or more; 0 takes the most probable token."""
    top_k: int = 40
    """Tokens are drawn from so many, the most probable ones; 0 and -1 take all."""
    top_p: float = 0.95
    """Tokens are drawn from the most probable ones that sum to this probability; 1 takes all."""
    min_p: float = 0.05
    """Smallest probability, relative to the most probable token's; 0 takes all."""
    repeat_penalty: float = 1.0
    """Above 1 it makes the answer's last `repeat_last_n` tokens less probable."""
    seed: int | None = None
    """0 to 2**32 - 2; None and -1 draw one at random."""

    repeat_last_n: ClassVar[int] = 64

    def __post_init__(self) -> None:
        for each in fields(self):
            kind, value = "number" if each.type is float else "whole number", getattr(self, each.name)
            _require(value is not None or each.name == "seed", f"{each.name} is None; it must be a {kind}")
            _require_number(each.name, value, kind)
        for name, least, most, what in (
            ("temp", 0, _MAX_FLOAT, "be 0 (greedy) or more"),
            ("top_k", -1, _MAX_INT32, "be 0, -1 (all tokens) or more"),
            ("top_p", 0, 1, "lie between 0 and 1"),
            ("min_p", 0, 1, "lie between 0 and 1"),
            ("repeat_penalty", math.ulp(0), _MAX_FLOAT, "be above 0, and 1 for none"),
            ("seed", -1, _MAX_SEED, f"lie between 0 and {_MAX_SEED}, or be -1 for any"),
        ):
            value = getattr(self, name)
            _require(value is None or least <= value <= most, f"{name} is {value}; it must {what}")


SAMPLING_HELP: Mapping[str, str] = {
    "temp": "temperature; 0: greedy",
    "top_k": "draw from the K most probable tokens; 0: from all",
    "top_p": "draw from the most probable tokens that sum to this; 1: off",
    "min_p": "least probability relative to the best token; 0: off",
    "repeat_penalty": f"penalty on the last {SamplingConfig.repeat_last_n} tokens; 1: off",
    "seed": "random seed; in low precision a text repeats with strict alone",
}
"""Help of SamplingConfig's fields, for users."""


SAMPLING_KEYS: Mapping[str, str] = {
    **{name: f"general.sampling.{name}" for name in ("temp", "top_k", "top_p", "min_p")},
    "repeat_penalty": "general.sampling.penalty_repeat",
}
"""Keys of the values that a model's file may recommend, by SamplingConfig's fields."""


@dataclass(frozen=True)
class EngineConfig:
    """How one model is opened."""

    cache: CacheConfig = field(default_factory=CacheConfig)
    """The expert cache."""
    n_ctx: int | None = None
    """Tokens of context; None takes the best of `contexts` that memory allows, 0 all of the model's own."""
    n_batch: int | None = None
    """Prompt tokens per pass, at most `max_batch`; None takes the best of `batches` that memory allows."""
    n_beams: int = 1
    """Texts that a beam search may keep, at most `max_beams`."""
    n_drafts: int = 0
    """Tokens that the text suggests and that a pass computes with the last one, at most `max_drafts`.

    Fewer where measured time says so (pyhobbit.engine.drafts)."""
    draft_head: bool = False
    """The memory of the model's own draft head (MTP) is planned, which llama-server then runs."""
    n_threads: int | None = None
    """Computing threads, at most `max_threads`; None takes one per processor core."""
    verbose: bool = False
    """llama.cpp's log is shown on standard error."""
    cache_type_k: str = "f16"
    """Type of the keys in the KV cache, one of `kv_types`."""
    cache_type_v: str = "f16"
    """Type of the values in the KV cache, one of `kv_types`."""
    shares_context: bool = True
    """Texts that are computed together take cells of the context as they need them, not in equal parts."""
    overrides: Mapping[str, Setting] = field(default_factory=dict)
    """Values of the file's metadata that llama.cpp takes in place of the file's own, by key."""
    serves: bool = False
    """llama-server opens it: its slots share the context, so all of it may be more than the model was trained
    for, but no slot's, and it has checkpoints of states that cannot go back."""

    contexts: ClassVar[tuple[int, ...]] = (4096, 8192, 16384, 32768)
    batches: ClassVar[tuple[int, ...]] = (512, 1024, 2048, 4096)
    kv_types: ClassVar[list[str]] = ["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
    max_batch: ClassVar[int] = 1 << 16
    max_beams: ClassVar[int] = 64
    max_slots: ClassVar[int] = 256  # LLAMA_MAX_SEQ
    max_drafts: ClassVar[int] = 15
    max_threads: ClassVar[int] = 512  # GGML_MAX_N_THREADS

    def __post_init__(self) -> None:
        for name in ("n_ctx", "n_batch", "n_beams", "n_threads"):
            value = getattr(self, name)
            _require_number(name, value, "whole number")
            is_own = name == "n_ctx" and value == 0
            _require(value is None or value > 0 or is_own, f"{name} is {value}; it must be positive")
        for name, most, limit in (
            ("n_batch", self.max_batch, "a pass has at most {} tokens"),
            ("n_beams", self.max_slots if self.serves else self.max_beams, "a search keeps at most {}"),
            ("n_threads", self.max_threads, "ggml computes with at most {} threads"),
        ):
            value = getattr(self, name)
            _require(value is None or value <= most, f"{name} is {value}; {limit.format(most)}")
        _require_number("n_drafts", self.n_drafts, "whole number")
        is_within = 0 <= self.n_drafts <= self.max_drafts
        _require(is_within, f"n_drafts is {self.n_drafts}; it must lie between 0 and {self.max_drafts}")
        for each in self.cache_types:
            _require(
                each in self.kv_types,
                f"a KV cache cannot be in {each}; choose one of {', '.join(self.kv_types)}",
            )

    @property
    def cache_types(self) -> tuple[str, str]:
        """The types of keys and values."""
        return self.cache_type_k, self.cache_type_v

    def context_tokens(self, trained: int) -> int:
        """Tokens of context for a model that was trained for so many, the least. Raises HobbitError."""
        least = self.contexts[self.serves]
        if self.serves:
            return min(trained * self.n_beams, least) if self.n_ctx is None else self.n_ctx or trained
        if self.n_ctx is not None and self.n_ctx > trained:
            largest = f"the model was trained for {trained} tokens at most"
            raise HobbitError(f"a context of {self.n_ctx} is too large: {largest}; use --ctx {trained}")
        return min(trained, least) if self.n_ctx is None else self.n_ctx or trained

    def larger_contexts(self, trained: int) -> set[int]:
        """Contexts that may replace context_tokens()."""
        least = self.contexts[self.serves]
        return {min(n, trained) for n in self.contexts if min(n, trained) > least}

    @classmethod
    def computing_threads(cls, given: int | None) -> int:
        """Threads as given; None takes one per core that the process may use, as far as ggml can."""
        return given or min(processor_cores(), cls.max_threads)


@dataclass(frozen=True)
class ChatConfig:
    """`pyhobbit chat`. given: names of sampling's settings that come before those in the model's file.

    max_tokens: of an answer, which with `no_limit` ends by itself or with the context.

    A value of None means no_limit, or `completion_tokens` for a model without chat template: it seldom ends
    by itself.
    system: instructions for a model with a chat template.  stop: an answer ends before one of these texts.
    grammar: GBNF that answers follow, or "".  stats_json: where the statistics go.
    think: whether the model thinks before it answers: on, off, or hide to show only that it does.
    quiet: show the answers and nothing else.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    given: Collection[str] = tuple(SAMPLING_HELP)
    max_tokens: int | None = None
    system: str | None = None
    grammar: str = ""
    stop: Sequence[str] = ()
    stats_json: Path | None = None
    think: str = "on"
    quiet: bool = False

    thinks: ClassVar[tuple[str, ...]] = ("on", "off", "hide")
    no_limit: ClassVar[int] = -1
    completion_tokens: ClassVar[int] = 512

    def __post_init__(self) -> None:
        n_ok = self.max_tokens in (None, self.no_limit) or self.max_tokens > 0
        context = f"{self.no_limit} for as much as the context allows"
        _require(n_ok, f"max_tokens is {self.max_tokens}; it must be positive, or {context}")
        _require(
            self.think in self.thinks, f"--think is '{self.think}'; choose one of {', '.join(self.thinks)}"
        )
        _require(all(self.stop), "--stop is empty; give the text that ends an answer")
        if self.stats_json is not None:
            folder = self.stats_json.absolute().parent
            _require(folder.is_dir(), f"--stats-json: the folder {folder} does not exist; create it first")

    def sampling_of(self, metadata: Callable[[str], Any]) -> SamplingConfig:
        """Takes the model's own values that are in range. metadata: of its file, by key; None for none."""
        sampling = self.sampling
        for name, key in SAMPLING_KEYS.items():
            if name in self.given or (value := metadata(key)) is None:
                continue
            try:
                kind: type = type(getattr(sampling, name))
                sampling = replace(sampling, **{name: kind(float(f"{float(value):.6g}"))})
            except (ValueError, OverflowError):
                print(f"pyhobbit: the model's own {key} is left out: it is {value}", file=sys.stderr)
        return sampling


@dataclass(frozen=True)
class CalibrationConfig:
    """`pyhobbit calibrate`. engine.n_ctx: tokens of a chunk of text.  max_chunks: the most that are used.

    max_kl: bound on the mean Kullback-Leibler divergence, in nats; None takes `default_max_kl`.
    rule: "price", "gate" or "edgemoe".
    cost_chunks: chunks on which costs are measured.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    max_kl: float | None = None
    max_chunks: int = 32
    rule: str = "price"
    cost_chunks: int = 4

    default_n_ctx: ClassVar[int] = 512
    default_max_kl: ClassVar[float] = 0.01
    min_chunks: ClassVar[int] = 4
    min_checked: ClassVar[int] = 8  # with so many every second chunk checks what the others are fitted to
    min_n_ctx: ClassVar[int] = 3  # the last token is scored
    all_rules: ClassVar[tuple[str, ...]] = ("price", "gate", "edgemoe")

    def __post_init__(self) -> None:
        for name, value, least, what in (
            ("--ctx", self.engine.n_ctx, self.min_n_ctx, f"at least {self.min_n_ctx}"),
            ("--max-kl", self.max_kl, 0, "0 or more"),
            ("--chunks", self.max_chunks, self.min_chunks, f"at least {self.min_chunks}"),
            ("cost_chunks", self.cost_chunks, 1, "positive"),
        ):
            _require(value is None or value >= least, f"{name} is {value}; it must be {what}")
        names = ", ".join(self.all_rules)
        _require(self.rule in self.all_rules, f"the rule is '{self.rule}'; choose one of {names}")

    def n_check(self, n_chunks: int) -> int:
        """How many of the chunks check; 0 where they are too few to state a confidence."""
        return n_chunks // 2 if n_chunks >= self.min_checked else 0
