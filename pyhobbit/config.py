# SPDX-License-Identifier: MIT
"""Settings: the only home of defaults. Making a dataclass checks its values and raises ConfigError."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from pyhobbit.errors import ConfigError

Setting = bool | int | float | str

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"([0-9]*\.?[0-9]+)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)

# llama.cpp carries a text setting in a field of 128 bytes, terminated.
_MAX_TEXT_BYTES = 127
_MAX_SEED = 2**32 - 2


def parse_size(text: str) -> int:
    """Bytes of a size such as "2G", "512MiB", "1.5g" or "1000000"; units are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size <= 0:
        raise ConfigError(f"'{text}' is not a size; write it like 2G, 512M or as a number of bytes")
    return size


def format_size(n_bytes: float) -> str:
    """A size for people, e.g. "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} GiB"


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


@dataclass(frozen=True)
class CacheConfig:
    """The expert cache. None leaves a setting to the model file or to what the engine computes.

    memory: bytes that the whole process may hold.  pools: bytes of the expert pools alone, instead of memory.
    low_share: share of the pools for the low tier, 0 to 1.  io_threads: loader threads.
    t1, t2: thresholds on the sum of the normalised gate weights of the experts ranked higher (HOBBIT, Eq. 2):
    up to t1 high precision, up to t2 low, above t2 skipped.  sidecar: file with the further tiers.
    """

    memory: int | None = None
    pools: int | None = None
    low_share: float | None = None
    t1: float | None = None
    t2: float | None = None
    io_threads: int | None = None
    sidecar: Path | None = None

    def __post_init__(self) -> None:
        _require(
            self.memory is None or self.pools is None,
            "--memory bounds the whole process and --pools the expert cache alone; give one of them",
        )
        for name in ("t1", "t2", "low_share"):
            value = getattr(self, name)
            _require(value is None or 0 <= value <= 1, f"{name} is {value}; it must lie between 0 and 1")
        _require(
            self.t1 is None or self.t2 is None or self.t1 <= self.t2,
            f"t1 ({self.t1}) is above t2 ({self.t2}); between t1 and t2 lies low precision, so make t1 <= t2",
        )
        for name in ("memory", "pools", "io_threads"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"{name} is {value}; it must be positive")
        if self.sidecar is not None:
            _sidecar_text(self.sidecar)

    def settings(self) -> dict[str, Setting]:
        """What hobbit_open is told (hobbit.h), by key."""
        values: dict[str, Setting | None] = {
            "hobbit.memory": self.memory,
            "hobbit.pools": self.pools,
            "hobbit.low_share": _float(self.low_share),
            "hobbit.t1": _float(self.t1),
            "hobbit.t2": _float(self.t2),
            "hobbit.io_threads": self.io_threads,
            "hobbit.sidecar": None if self.sidecar is None else _sidecar_text(self.sidecar),
        }
        given = {key: value for key, value in values.items() if value is not None}
        # Whoever sets up the cache wants it, even for a file that fits into memory.
        return {"hobbit.enable": True, **given} if given else {}


def _float(value: float | None) -> float | None:
    # llama.cpp passes settings on by their type
    return None if value is None else float(value)


def _sidecar_text(path: Path) -> str:
    for text in (str(path), os.path.relpath(path)):
        if len(os.fsencode(text)) <= _MAX_TEXT_BYTES:
            return text
    raise ConfigError(
        f"the path of {path} is longer than {_MAX_TEXT_BYTES} bytes; start pyhobbit in its folder"
    )


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is drawn; llama.cpp's defaults. temp 0 takes the most probable token.

    seed: 0 to 2**32 - 2; None draws one at random.
    """

    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int | None = None

    def __post_init__(self) -> None:
        _require(self.temp >= 0, f"temp is {self.temp}; it must be 0 (greedy) or more")
        _require(self.seed is None or 0 <= self.seed <= _MAX_SEED, f"seed must lie between 0 and {_MAX_SEED}")


@dataclass(frozen=True)
class EngineConfig:
    """One opened model.

    n_ctx: tokens of context; None takes what the model was trained for, at most `max_default_ctx`.
    n_batch: prompt tokens per pass.  n_threads: at most `max_threads`; None takes one per processor core.
    verbose: show llama.cpp's log on standard error.
    """

    cache: CacheConfig = field(default_factory=CacheConfig)
    n_ctx: int | None = None
    n_batch: int = 512
    n_threads: int | None = None
    verbose: bool = False

    max_default_ctx: ClassVar[int] = 4096
    max_threads: ClassVar[int] = 512  # GGML_MAX_N_THREADS

    def __post_init__(self) -> None:
        for name in ("n_ctx", "n_batch", "n_threads"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"{name} is {value}; it must be positive")
        _require(
            self.n_threads is None or self.n_threads <= self.max_threads,
            f"n_threads is {self.n_threads}; ggml computes with at most {self.max_threads} threads",
        )


@dataclass(frozen=True)
class ChatConfig:
    """`pyhobbit chat`. max_tokens: None ends an answer with the model's end or a full context.

    system: instructions for a model with a chat template.  stats_json: where the statistics go.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    max_tokens: int | None = None
    system: str | None = None
    stats_json: Path | None = None

    one_shot_tokens: ClassVar[int] = 512
    history_lines: ClassVar[int] = 1000

    def __post_init__(self) -> None:
        n_ok = self.max_tokens is None or self.max_tokens > 0
        _require(
            n_ok, f"-n is {self.max_tokens}; it must be positive, or -1 for as much as the context allows"
        )
        if self.stats_json is not None:
            folder = self.stats_json.absolute().parent
            _require(folder.is_dir(), f"--stats-json: the folder {folder} does not exist; create it first")
