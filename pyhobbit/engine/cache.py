# SPDX-License-Identifier: MIT
"""The expert cache of an opened model, seen from Python."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from pyhobbit._tables import COUNTERS, SETTINGS, CacheInfo, DeviceInfo, Latency
from pyhobbit.engine.stats import CacheStats
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.native.ffi import cache_context, check, expert_cache, ffi, lib, lost_machine
from pyhobbit.settings.config import CacheConfig
from pyhobbit.settings.resolve import c_settings, check_settings, options_of
from pyhobbit.settings.table import LIVE, NUMBERS, OPTIONS, Resolved

_DEFAULTS = {each.key: each.default for each in SETTINGS}


class Cache:
    """Holds a reference until close(). False where the model runs without one, as in stock llama.cpp."""

    def __init__(self, model: int | None) -> None:
        """Finds the cache of a model. model: a pointer to llama_model."""
        self._pointer = expert_cache(model)

    def __bool__(self) -> bool:
        return bool(self._pointer)

    def close(self) -> None:
        """The second call does nothing."""
        pointer, self._pointer = self._pointer, ffi.NULL
        lib.hobbit_unref(pointer)

    def info(self) -> dict[str, Any]:
        """The fields of ModelInfo that hobbit.h knows; none without a cache."""
        if not self:
            return {}
        values = ffi.new("struct hobbit_info *")
        lib.hobbit_get_info(self._pointer, values)
        settings = self.settings()
        return {**_fields(CacheInfo, values), **{name: settings[name].value for name in NUMBERS}}

    def devices(self) -> tuple[DeviceInfo, ...]:
        """The devices that hold the pools, the CPU among them; none without a cache."""
        found: list[DeviceInfo] = []
        values = ffi.new("struct hobbit_device_info *")
        while self and lib.hobbit_get_device(self._pointer, len(found), values):
            found.append(DeviceInfo(**_fields(DeviceInfo, values)))
        return tuple(found)

    def latencies(self) -> tuple[Latency, ...]:
        """Times of experts on the first device with memory of its own, and on the CPU beside it."""
        found: list[Latency] = []
        values = ffi.new("struct hobbit_latency *")
        while self and lib.hobbit_get_latency(self._pointer, 0, len(found), values):
            found.append(Latency(**_fields(Latency, values)))
        return tuple(found)

    def set_observer(self, observer: Any) -> None:
        """Reports layers to a cffi callback of type hobbit_observer, or to none by NULL."""
        lib.hobbit_set_observer(self._pointer, observer, ffi.NULL)

    def stats(self) -> CacheStats:
        """Counters since opening, all 0 without a cache."""
        if not self:
            return CacheStats()
        values = ffi.new("double[]", len(COUNTERS))
        lib.hobbit_get_counters(self._pointer, values, len(values))
        numbers = zip(COUNTERS, values, strict=True)
        return CacheStats(**{each.name: n if each.kind == "seconds" else int(n) for each, n in numbers})

    def failure(self) -> str | None:
        """Why nothing can be computed any more, None where it can."""
        if (lost := lost_machine()) is not None:
            return lost
        try:
            if self:
                check(lib.hobbit_check, self._pointer)
        except HobbitError as e:
            return str(e)
        return None

    def begin_sequence(self, context: Any, sequence: int = 0) -> None:
        """Forgets what the sequence was about: another text follows. context: its llama_context."""
        if self:
            lib.hobbit_begin_sequence(cache_context(context), sequence)

    def keep(self, context: Any, n_kept: int, n_before: int) -> None:
        """Begins a sequence where less than half of the previous text's tokens stay in the KV cache."""
        if 2 * n_kept < n_before:
            self.begin_sequence(context)

    def set(self, **settings: Any) -> None:
        """Replaces live settings (LIVE) from the next layer on. Raises ConfigError, HobbitError."""
        if unknown := settings.keys() - LIVE:
            name = min(unknown)
            raise ConfigError(f"{name} cannot change while a model is open; open the model with it")
        CacheConfig(**settings)  # checks each of them, and the engine what they are together
        changes = {
            OPTIONS[name][0].key: value if isinstance(value, str) else float(value)
            for name, value in settings.items()
        }
        check_settings({key: value for key, value in changes.items() if value != _DEFAULTS[key]})
        if not self:
            raise HobbitError(
                f"the model runs without an expert cache, where {', '.join(LIVE[:-1])} and {LIVE[-1]} decide "
                "nothing; open a MoE model with a memory or pools setting"
            )
        check(lib.hobbit_change_settings, self._pointer, c_settings(changes), len(changes))

    def settings(self) -> dict[str, Resolved]:
        """Every setting as the engine has it, by name; none without a cache."""
        if not self:
            return {}
        rows = ffi.new("struct hobbit_resolved_setting[]", len(SETTINGS))
        lib.hobbit_get_settings(self._pointer, rows, len(rows))
        return options_of(rows)

    def live(self) -> dict[str, Any]:
        """The settings that may change while the model is open, by name; none without a cache."""
        return {name: each.value for name, each in self.settings().items() if name in LIVE}

    def set_costs(self, low: Sequence[float], skip: Sequence[float]) -> None:
        """Replaces the costs of the rule price, one per layer or per layer and expert. Raises HobbitError.

        low, skip: nats of divergence that a use with weight 1 in low precision, or skipped, adds; inf: never.
        """
        if len(low) != len(skip):
            raise HobbitError(f"there are {len(low)} costs of low precision and {len(skip)} of skipping")
        costs = (ffi.new("float[]", list(values)) for values in (low, skip))
        check(lib.hobbit_set_costs, self._pointer, *costs, len(low))


def _fields(kind: Any, struct: Any) -> dict[str, Any]:
    """A C struct's members that the dataclass has, texts as str."""
    values = {each.name: getattr(struct, each.name) for each in fields(kind)}
    return {key: ffi.string(of).decode() if isinstance(of, ffi.CData) else of for key, of in values.items()}
