# SPDX-License-Identifier: MIT
"""A model's own options, in a TOML file beside it; the command line and keywords come before it."""

from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from pyhobbit.errors import ConfigError, HobbitError, did_you_mean
from pyhobbit.model.file_names import options_path
from pyhobbit.native.files import decoded, write_text
from pyhobbit.settings.config import CacheConfig, ChatConfig, EngineConfig, SamplingConfig, parse_size
from pyhobbit.settings.table import KEYS, OPTIONS

_CACHE = {
    name: "list" if len(specs) > 1 else specs[0].kind
    for name, specs in OPTIONS.items()
    if specs[0].kind != "path"
}
_SAMPLING = {each.name: "number" if each.type is float else "count" for each in fields(SamplingConfig)}
_COUNTS, _TEXTS = ("ctx", "batch", "threads"), ("cache_type_k", "cache_type_v", "rpc")
_ENGINE = {**dict.fromkeys(_COUNTS, "count"), **dict.fromkeys(_TEXTS, "text")}
_CHAT = {"max_tokens": "count", "system": "text", "think": "text"}
KINDS: Mapping[str, str] = {**_CACHE, **_ENGINE, **_SAMPLING, **_CHAT}
"""Settings that the file may hold, with the kind of each value; names are those of the options, with
underscores."""

_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "number": ((int, float), "a number"),
    "count": ((int,), "a whole number"),
    "size": ((int, str), 'a size like "8G"'),
    "flag": ((bool,), "true or false"),
    "list": ((list,), "a list of numbers"),
}
_TEXT: tuple[tuple[type, ...], str] = ((str,), "a text in quotation marks")
_NAMES = {key: name for name, keys in KEYS.items() for key in keys}
# Given beside one of these, the file's do not apply.
_REPLACED_BY = {name: {_NAMES[key] for key in specs[0].replaced_by} for name, specs in OPTIONS.items()}


def read_options(model: Path, given: Collection[str] = ()) -> dict[str, Any]:
    """Options of MODEL.toml beside those given, by name; sizes in bytes. Raises ConfigError, HobbitError."""
    if not model.name:
        return {}  # the name of a folder, which is no model: said where it is opened
    path = options_path(model)
    options = _checked(path, _document(path).unwrap())
    return {
        name: value
        for name, value in options.items()
        if not {name, *_REPLACED_BY.get(name, ())}.intersection(given)
    }


def write_options(model: Path, options: Mapping[str, Any]) -> Path:
    """Sets options in the model's file; gives its path. Raises ConfigError, HobbitError."""
    path = options_path(model)
    document = _document(path)
    keys = {key.replace("-", "_"): key for key in document}
    for name, value in options.items():
        for each in {name, *_REPLACED_BY.get(name, ())} - {*options}:
            document.pop(keys.get(each, each), None)
        document[keys.get(name, name)] = list(value) if isinstance(value, tuple) else value
    _checked(path, document.unwrap())
    write_text(path, tomlkit.dumps(document))
    return path


def _document(path: Path) -> tomlkit.TOMLDocument:
    try:
        text = decoded(path.read_bytes())
        text.encode()  # refuses bytes that are no text
        return tomlkit.parse(text)
    except FileNotFoundError:
        return tomlkit.document()
    except OSError as e:
        raise HobbitError(f"{path} cannot be read: {e.strerror}") from e
    except (TOMLKitError, ValueError) as e:
        raise ConfigError(f'{path} is not TOML ({e}); write lines like: memory = "8G"') from e


def _checked(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    options = {name.replace("-", "_"): value for name, value in values.items()}
    try:
        options = {name: _value(name, value) for name, value in options.items()}
        _check_together(options)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from e
    return options


def _value(name: str, value: Any) -> Any:
    if name not in KINDS:
        hint = did_you_mean(name, KINDS, f"there are {', '.join(KINDS)}")
        raise ConfigError(f"there is no option {name}; {hint}")
    kind = KINDS[name]
    types, what = _TYPES.get(kind, _TEXT)
    if not isinstance(value, types) or (isinstance(value, bool) and kind != "flag"):
        raise ConfigError(f"{name} is {value!r}; it must be {what}")
    if isinstance(value, list):
        return tuple(value)
    return parse_size(str(value)) if kind == "size" else value


def _check_together(options: Mapping[str, Any]) -> None:
    """Raises ConfigError where an option cannot have its value, or not beside the others."""
    cache, sampling, chat = (
        {k: v for k, v in options.items() if k in some} for some in (_CACHE, _SAMPLING, _CHAT)
    )
    names = {"ctx": "n_ctx", "batch": "n_batch", "threads": "n_threads"}
    engine = {names.get(name, name): options[name] for name in options if name in _ENGINE and name != "rpc"}
    config = ChatConfig(EngineConfig(CacheConfig(**cache), **engine), SamplingConfig(**sampling), **chat)
    if cache:
        from pyhobbit.settings.resolve import check_settings  # takes the native libraries

        check_settings(config.engine.cache.settings())
