# SPDX-License-Identifier: MIT
"""The constructor's keywords for the expert cache, from the engine's table of settings."""

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from textwrap import fill, indent
from typing import Any

from pyhobbit.errors import ConfigError, did_you_mean
from pyhobbit.model.options_file import read_options
from pyhobbit.settings.config import CacheConfig, parse_size
from pyhobbit.settings.resolve import check_settings
from pyhobbit.settings.table import OPTIONS, default_text

# Types that a keyword accepts beside a CacheConfig's own type.
_ALSO: Mapping[str, Any] = {"size": str, "path": str | os.PathLike[str]}
_WIDTH = 104
# Llama's keywords for options of the file beside a model.
_LLAMA = {
    "ctx": ("n_ctx",),
    "batch": ("n_batch", "n_ubatch"),
    "threads": ("n_threads", "n_threads_batch"),
    "rpc": ("rpc",),
}


def text() -> str:
    """Help of the keywords, a paragraph each."""
    known = ((name, specs[0].help, default_text(name)) for name, specs in OPTIONS.items())
    paragraphs = (f"{name}: {what}{f' Default: {found}.' if found else ''}" for name, what, found in known)
    return "\n\n".join(indent(fill(each, _WIDTH), "    ") for each in paragraphs).strip()


def signature(constructor: Callable[..., None]) -> inspect.Signature:
    """The constructor's, with a keyword for each setting before its **keywords."""
    written = inspect.signature(constructor)
    *own, others = written.parameters.values()
    settings = (
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=each.type | _ALSO.get(OPTIONS[each.name][0].kind),  # type: ignore[operator]
        )
        for each in fields(CacheConfig)
    )
    return written.replace(parameters=[*own, *settings, others])


def check(given: Mapping[str, object], *constructors: Callable[..., None]) -> None:
    """Raises TypeError for a keyword that none of them knows: Llama would ignore it."""
    known = {name for each in constructors for name in inspect.signature(each).parameters}
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known, "")
            raise TypeError(f"Hobbit() has no keyword {name}{hint and '; '}{hint}")


def of_model(
    model: Path, cache: CacheConfig | None, settings: Mapping[str, Any], llama: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords of the cache, and of Llama, from MODEL.toml unless given. Raises ConfigError, HobbitError."""
    given = {*settings, *(name for name in OPTIONS if getattr(cache, name, None) is not None)}
    given |= {name for name, keys in _LLAMA.items() if not llama.keys().isdisjoint(keys)}
    found = read_options(model, given)
    own = {name: found[name] for name in OPTIONS if name in found}
    return own, {key: found[name] for name, keys in _LLAMA.items() if name in found for key in keys}


def cache_config(cache: CacheConfig | None, settings: Mapping[str, Any]) -> CacheConfig:
    """The configuration of a Hobbit's cache. settings: by keyword, None if not given. Raises ConfigError."""
    if cache is not None and not isinstance(cache, CacheConfig):
        raise ConfigError(
            f"cache is a {type(cache).__name__}; it takes a CacheConfig, and set_cache() a cache of prompts"
        )
    given = {name: value for name, value in settings.items() if value is not None}
    for name, value in given.items():
        kind = OPTIONS[name][0].kind
        if kind == "size" and type(value) in (int, str):
            given[name] = parse_size(str(value))
        elif kind == "path":
            given[name] = Path(value)
    config = replace(cache or CacheConfig(), **given)
    check_settings(config.settings())
    return config
