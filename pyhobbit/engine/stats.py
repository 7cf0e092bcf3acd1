# SPDX-License-Identifier: MIT
"""Results of a run: counters, times and sizes, for people and as JSON."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from pyhobbit._tables import COUNTERS, CacheCounters, CacheInfo, CacheRates, RuleNumbers
from pyhobbit.native.files import write_text
from pyhobbit.settings.config import counted_tokens, format_size


class Pool(NamedTuple):
    """Room for n_slots of n_experts, in n_bytes."""

    name: str
    n_slots: int
    n_experts: int
    n_bytes: int

    @property
    def room(self) -> str:
        all_fit = self.n_slots >= self.n_experts
        return f"all {self.n_experts}" if all_fit else f"{self.n_slots} of {self.n_experts}"

    def __str__(self) -> str:
        return f"{self.room} ({format_size(self.n_bytes)})"


@dataclass(frozen=True, kw_only=True)
class ModelInfo(CacheInfo, RuleNumbers):
    """The opened model. Sizes in bytes; the cache's fields are 0 where the model runs as stock llama.cpp."""

    model: str
    """Path of the file."""
    description: str
    """Architecture, size and type, for people."""
    n_ctx: int
    """Tokens of context."""
    n_threads: int
    """Computing threads."""
    cached: bool
    """True if the experts are in a cache."""
    has_experts: bool
    """True if the model has routed experts."""
    n_ctx_train: int = 0
    """Tokens of context that the model was trained for; 0 where nobody asked."""
    memory: int | None = None
    """The bound on the process, None where none was given."""

    @property
    def has_low_tier(self) -> bool:
        """True if the model has experts in low precision."""
        return self.n_tiers > 1

    @property
    def expert_bytes(self) -> int:
        """Bytes of all routed experts, each in its best precision."""
        n_all, n_low = self.n_layers * self.n_experts or 1, self.n_absent_high
        high = self.tier_bytes_high * self.n_high_experts // max(1, n_all - n_low)
        return high + self.tier_bytes_low * n_low // (n_all - self.n_absent_low)

    def used_bytes(self, high: float, low: float) -> float:
        """Bytes of a token's experts, of which such shares are used in high and in low precision."""
        return high * self.token_bytes_high + low * self.token_bytes_low

    @property
    def n_high_experts(self) -> int:
        """Experts of all layers that are run and have a high version."""
        return self.n_all_experts - self.n_absent_high

    @property
    def n_low_experts(self) -> int:
        """Experts of all layers that are run, without those that lack a low version."""
        return self.n_all_experts - self.n_absent_low

    @property
    def mean_expert_bytes(self) -> tuple[float, float]:
        """Bytes of an expert in high and in low precision."""
        n = self.n_layers * self.n_experts
        return self.tier_bytes_high / (n - self.n_absent_high), self.tier_bytes_low / (n - self.n_absent_low)

    @property
    def pools(self) -> list["Pool"]:
        """The pool of experts in high precision and, where there is one, the low tier's."""
        return [
            Pool("high", self.pool_slots_high, self.n_high_experts, self.pool_bytes_high),
            Pool("low", self.pool_slots_low, self.n_low_experts, self.pool_bytes_low),
        ][: 2 if self.pool_bytes_low else 1]

    def pool_texts(self) -> list[str]:
        """How many experts each pool has room for, for people; the only pool needs no name."""
        pools = self.pools
        return [str(each) for each in pools] if len(pools) == 1 else [f"{each.name} {each}" for each in pools]

    def context_text(self, was_chosen: bool) -> str:
        """The size of the context, for people.  was_chosen: nobody said how large it is."""
        why = "what the model was trained for" if self.n_ctx == self.n_ctx_train else "by memory"
        return f"{self.n_ctx} tokens{f' ({why})' if was_chosen else ''}"


@dataclass(frozen=True)
class CacheStats(CacheCounters):
    """Counters since opening, and times in seconds.

    A selection is one (token, expert) pair chosen by a router. Hits and misses count the experts that a layer
    needed for one batch, once each.
    """

    @property
    def selections(self) -> int:
        return self.selections_high + self.selections_low + self.selections_skipped

    @property
    def rates(self) -> CacheRates:
        """Shares that follow from the counters; none of what is by second or by token."""
        return rates({}, vars(self), math.nan, 0)

    def since(self, earlier: "CacheStats") -> "CacheStats":
        """Counters since `earlier`; a state, like prefetch_active, is the present one."""
        counters = [counter.name for counter in COUNTERS if counter.kind != "state"]
        return replace(self, **_differences(self, earlier, counters))


@dataclass(frozen=True)
class Stats:
    """A run so far, or with since() a part of it. Counters are sums over its answers."""

    info: ModelInfo
    """The opened model."""
    cache: CacheStats
    """Counters of the expert cache."""
    load_s: float
    """Seconds that opening the model took."""
    peak_rss_bytes: int
    """The most memory that the process has had resident."""
    answers: int = 0
    """Answers with at least one token."""
    prompt_tokens: int = 0
    """All tokens of the prompts."""
    prompt_tokens_evaluated: int = 0
    """Prompt tokens computed; the others were in the KV cache."""
    generated_tokens: int = 0
    """Tokens of the answers."""
    decoded_tokens: int = 0
    """Generated tokens after the first of each answer."""
    first_tokens_s: float = 0.0
    """Seconds from the prompts to the first tokens."""
    decode_s: float = 0.0
    """Seconds that the decoded tokens took."""
    drafted_tokens: int = 0
    """Tokens that were computed ahead."""
    accepted_tokens: int = 0
    """Drafted tokens that the model accepted."""

    def since(self, earlier: "Stats") -> "Stats":
        """Counters since `earlier` of the same engine; sizes and load_s are the present ones."""
        counted = [each.name for each in fields(self) if each.default == 0]
        counters = _differences(self, earlier, counted)
        return replace(self, cache=self.cache.since(earlier.cache), **counters)

    @property
    def time_to_first_token_s(self) -> float | None:
        """Mean over the answers; None where no token was generated."""
        return self.first_tokens_s / self.answers if self.answers else None

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Over all tokens but the first of each answer; None where there is none."""
        return self.decoded_tokens / self.decode_s if self.decoded_tokens else None

    @property
    def hit_rate_high(self) -> float | None:
        return self.cache.rates.hit_rate_high

    @property
    def hit_rate_low(self) -> float | None:
        return self.cache.rates.hit_rate_low

    @property
    def bytes_read_per_token(self) -> float | None:
        n_tokens = self.prompt_tokens_evaluated + self.generated_tokens
        return self.cache.bytes_read / n_tokens if n_tokens else None

    def as_dict(self) -> dict[str, object]:
        """One flat dictionary of plain values, the derived ones included."""
        own = asdict(self)
        info, cache = own.pop("info"), own.pop("cache")
        derived = (name for name, of in vars(Stats).items() if isinstance(of, property))
        return {**info, **own, **cache, **{name: getattr(self, name) for name in derived}}

    def write_json(self, path: Path) -> None:
        """Writes as_dict() to `path`, all or nothing. Raises HobbitError where that cannot be done."""
        write_text(path, json.dumps(self.as_dict(), indent=2) + "\n")

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """One or two lines for people."""
        generated = counted_tokens(self.generated_tokens, "generated")
        lines = [f"{self.prompt_tokens} prompt + {generated}"]
        if self.time_to_first_token_s is not None:
            lines[0] += f", first token after {self.time_to_first_token_s:.2f} s"
        if self.decode_tokens_per_second is not None:
            lines[0] += f", then {self.decode_tokens_per_second:.2f} tokens/s"
        if self.drafted_tokens:
            lines[0] += f", {self.accepted_tokens} of {self.drafted_tokens} drafts right"
        lines[0] += f", peak memory {format_size(self.peak_rss_bytes)}"
        if self.info.memory is not None and self.info.has_experts:
            lines[0] += f" of {format_size(self.info.memory)}"
        if self.info.cached:
            lines.append(self._cache_summary())
        return "\n".join(lines)

    def _cache_summary(self) -> str:
        cache, info, found = self.cache, self.info, self.cache.rates
        rates = (found.hit_rate_high, found.hit_rate_low)
        parts = []
        for room, pool, rate in zip(info.pool_texts(), info.pools, rates, strict=False):
            is_whole = pool.n_slots >= pool.n_experts > 0
            parts.append(f"{room}, {'read when first used' if is_whole else f'{rate or 0:.0%} hits'}")
        if cache.bytes_transferred or cache.selections_cpu:  # a device's misses
            held, moved = info.host_bytes_high + info.host_bytes_low, cache.bytes_transferred
            parts.append(f"host memory {format_size(held)}, {found.host_hit_rate or 0:.0%} of the misses hit")
            parts[-1] += f", {format_size(moved)} uploaded"
        if found.cpu_share:
            parts.append(f"{found.cpu_share:.0%} of the experts computed by the CPU")
        if found.low_share or found.skipped_share:
            low, skipped = found.low_share, found.skipped_share
            parts.append(f"{low:.0%} of the uses in low precision, {skipped:.0%} skipped")
        read, per_token = format_size(cache.bytes_read), self.bytes_read_per_token
        each = "" if per_token is None else f" ({format_size(per_token)} per token)"
        parts.append(f"{read} read{each}, {cache.stall_s:.2f} s waiting for the disk")
        return f"experts {'on the GPU' if info.on_device else 'in memory'}: {'; '.join(parts)}"


def rates(
    before: Mapping[str, float], after: Mapping[str, float], seconds: float, n_token_uses: int
) -> CacheRates:
    """hobbit_get_rates of two samples by name; None where nothing happened. before: no counters are zeros."""
    from pyhobbit.native.ffi import ffi, lib  # takes the native libraries

    samples = [ffi.new("double[]", [of.get(each.name, 0) for each in COUNTERS]) for of in (before, after)]
    found = lib.hobbit_get_rates(*samples, seconds, n_token_uses)
    values = ((each.name, getattr(found, each.name)) for each in fields(CacheRates))
    return CacheRates(**{name: value for name, value in values if not math.isnan(value)})


def _differences(later: object, earlier: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(later, name) - getattr(earlier, name) for name in names}


def peak_rss_bytes() -> int:
    """The largest resident set of this process so far."""
    # getrusage keeps the peak of the program that was replaced by exec, which may be a large test runner
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
