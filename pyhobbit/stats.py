# SPDX-License-Identifier: MIT
"""What a run did: counters, times and sizes, for people and as JSON."""

import json
import os
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from pyhobbit.config import format_size
from pyhobbit.errors import HobbitError


@dataclass(frozen=True)
class ModelInfo:
    """The opened model. Sizes in bytes; the cache's fields are 0 where the model runs as stock llama.cpp.

    memory: the bound on the process, None where none was given.  tier_bytes_*: all routed experts of a tier.
    pool_slots_*: experts that fit.  direct_io: False where the file system refused O_DIRECT.
    """

    model: str
    description: str
    n_ctx: int
    n_threads: int
    cached: bool
    has_experts: bool
    memory: int | None = None
    n_layers: int = 0
    n_experts: int = 0
    n_experts_used: int = 0
    n_tiers: int = 0
    tier_bytes_high: int = 0
    tier_bytes_low: int = 0
    pool_bytes_high: int = 0
    pool_bytes_low: int = 0
    pool_slots_high: int = 0
    pool_slots_low: int = 0
    t1: float = 1.0
    t2: float = 1.0
    direct_io: bool = False


@dataclass(frozen=True)
class CacheStats:
    """Counters since opening, as hobbit.h defines them.

    Selections are (token, expert) pairs chosen by a router; hits and misses count the experts that a layer
    needed for one batch, once each.  predicted, prefetched: experts named, and asked for, ahead of their
    layer; *_right, *_used: of those, chosen when the layer ran.  prefetch_pauses: times that prefetch did not
    pay and was switched off.  Seconds: stall_s computing waited for the disk, disk_demand_s the disk worked
    on what computing needed, compute_s layers with experts ran, stalls included.
    """

    selections_high: int = 0
    selections_low: int = 0
    selections_skipped: int = 0
    hits_high: int = 0
    misses_high: int = 0
    hits_low: int = 0
    misses_low: int = 0
    evictions: int = 0
    bytes_read: int = 0
    layers_computed: int = 0
    waves: int = 0
    predicted: int = 0
    predicted_right: int = 0
    prefetched: int = 0
    prefetched_used: int = 0
    bytes_prefetched: int = 0
    prefetch_pauses: int = 0
    prefetch_active: int = 0
    stall_s: float = 0.0
    disk_demand_s: float = 0.0
    compute_s: float = 0.0


@dataclass(frozen=True)
class Stats:
    """A run so far. Tokens are summed over the answers; times in seconds; None where nothing was measured.

    prompt_tokens: all tokens of the prompts; prompt_tokens_evaluated leaves out those still in the KV cache.
    time_to_first_token_s: of the first answer.
    decode_tokens_per_second: over all tokens but the first of each answer.
    """

    info: ModelInfo
    cache: CacheStats
    load_s: float
    prompt_tokens: int
    prompt_tokens_evaluated: int
    generated_tokens: int
    time_to_first_token_s: float | None
    decode_tokens_per_second: float | None
    peak_rss_bytes: int

    @property
    def hit_rate_high(self) -> float | None:
        return _share(self.cache.hits_high, self.cache.misses_high)

    @property
    def hit_rate_low(self) -> float | None:
        return _share(self.cache.hits_low, self.cache.misses_low)

    @property
    def bytes_read_per_token(self) -> float | None:
        n_tokens = self.prompt_tokens_evaluated + self.generated_tokens
        return self.cache.bytes_read / n_tokens if n_tokens else None

    def as_dict(self) -> dict[str, object]:
        """One flat dictionary of plain values, the derived ones included."""
        own = asdict(self)
        info, cache = own.pop("info"), own.pop("cache")
        return {
            **info,
            **own,
            **cache,
            "hit_rate_high": self.hit_rate_high,
            "hit_rate_low": self.hit_rate_low,
            "bytes_read_per_token": self.bytes_read_per_token,
        }

    def write_json(self, path: Path) -> None:
        """Writes as_dict() to `path`, all or nothing. Raises HobbitError where that cannot be done."""
        text = json.dumps(self.as_dict(), indent=2) + "\n"
        try:
            if path.exists() and not path.is_file():
                path.write_text(text, encoding="utf-8")  # a pipe or a device must not be replaced
            else:
                _write_atomically(path.resolve(), text)
        except OSError as e:
            raise HobbitError(f"the statistics cannot be written to {path}: {e.strerror}") from e

    def summary(self) -> str:
        """One or two lines for people."""
        lines = [f"{self.prompt_tokens} prompt + {self.generated_tokens} generated tokens"]
        if self.time_to_first_token_s is not None:
            lines[0] += f", first after {self.time_to_first_token_s:.2f} s"
        if self.decode_tokens_per_second is not None:
            lines[0] += f", then {self.decode_tokens_per_second:.2f} tokens/s"
        lines[0] += f", peak memory {format_size(self.peak_rss_bytes)}"
        if self.info.memory is not None:
            lines[0] += f" of {format_size(self.info.memory)}"
        if self.info.cached:
            lines.append(self._cache_summary())
        return "\n".join(lines)

    def _cache_summary(self) -> str:
        pools = [("high", self.info.pool_bytes_high, self.info.tier_bytes_high, self.hit_rate_high)]
        if self.info.pool_bytes_low:
            pools.append(("low", self.info.pool_bytes_low, self.info.tier_bytes_low, self.hit_rate_low))
        parts = [
            f"{name} pool {format_size(pool)} of {format_size(tier)}, {rate or 0:.0%} hits"
            for name, pool, tier, rate in pools
        ]
        read = f"{format_size(self.cache.bytes_read)} read, {self.cache.stall_s:.2f} s waiting for the disk"
        return "experts: " + "; ".join([*parts, read, *self._prefetch_summary()])

    def _prefetch_summary(self) -> list[str]:
        cache = self.cache
        if not cache.prefetched:
            return []
        state = "on" if cache.prefetch_active else "paused"
        used = cache.prefetched_used / cache.prefetched
        return [f"prefetch {state}, {used:.0%} of {cache.prefetched} experts used"]


def _share(hits: int, misses: int) -> float | None:
    return hits / (hits + misses) if hits + misses else None


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def peak_rss_bytes() -> int:
    """The largest resident set of this process so far."""
    try:
        # getrusage keeps the peak of the program that was replaced by exec, which may be a large test runner.
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
