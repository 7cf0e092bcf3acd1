# SPDX-License-Identifier: MIT
"""The settings that the engine takes: values, sources and notes, as hobbit_resolve_settings gives them."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from pyhobbit._tables import SETTINGS
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.native.ffi import check, ffi, lib
from pyhobbit.settings.config import Setting
from pyhobbit.settings.table import KEYS, Resolved

_texts: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()  # texts that arrays point to, by array

_SOURCES = ("default", "computed", "file", "calibration", "flag")  # in the order of hobbit_setting_source


def resolve(path: Path | None, settings: Mapping[str, Setting]) -> dict[str, Resolved]:
    """Settings by option; path: None for any model. Raises ConfigError, or HobbitError for the file."""
    rows = ffi.new("struct hobbit_resolved_setting[]", len(SETTINGS))
    given = c_settings(settings)
    try:
        file = ffi.NULL if path is None else ffi.new("char[]", bytes(path))
        check(lib.hobbit_resolve_settings, file, given, len(settings), rows, len(rows))
    except HobbitError as e:
        if path is None:
            raise ConfigError(str(e)) from None
        raise
    return options_of(rows)


def check_settings(settings: Mapping[str, Setting]) -> None:
    """Raises ConfigError for settings that the engine refuses for every model."""
    resolve(None, settings)


def options_of(rows: Iterable[Any]) -> dict[str, Resolved]:
    """Users' options of an array of hobbit_resolved_setting, by name."""
    by_key = {spec.key: (spec.kind, row) for spec, row in zip(SETTINGS, rows, strict=True)}
    return {name: _option(name, [by_key[key] for key in keys]) for name, keys in KEYS.items()}


def _option(name: str, settings: Sequence[tuple[str, Any]]) -> Resolved:
    values = tuple(_value(kind, row) for kind, row in settings if row.has_value)
    given = next((row for _, row in settings if _SOURCES[row.source] == "flag"), settings[0][1])
    value = (values if len(settings) > 1 else values[0]) if values else None
    return Resolved(name, value, _SOURCES[given.source], ffi.string(given.note).decode())


def c_settings(settings: Mapping[str, Setting]) -> Any:
    """An array of hobbit_setting, which keeps its texts alive."""
    array = ffi.new("struct hobbit_setting[]", len(settings))
    texts = _texts[array] = [ffi.new("char[]", key.encode()) for key in settings]
    for each, key, value in zip(array, tuple(texts), settings.values(), strict=True):
        each.key = key
        if isinstance(value, str):
            texts.append(ffi.new("char[]", os.fsencode(value)))
            each.text = texts[-1]
        else:
            each.number = value
    return array


def _value(kind: str, row: Any) -> Any:
    if kind in ("choice", "text", "path"):
        return os.fsdecode(ffi.string(row.text))
    return {"number": float, "flag": bool}.get(kind, int)(row.number)
