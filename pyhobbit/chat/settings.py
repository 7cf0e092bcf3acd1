# SPDX-License-Identifier: MIT
"""Settings that can be changed between two answers."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from pyhobbit.chat.conversation import Conversation
from pyhobbit.errors import ConfigError, did_you_mean
from pyhobbit.settings.config import SAMPLING_HELP, ChatConfig, value_text
from pyhobbit.settings.table import LIVE, OPTIONS, help_text

Value = int | float | str | None

_MAX_TOKENS = "max_tokens"
_HELP = {
    **SAMPLING_HELP,
    _MAX_TOKENS: "maximum tokens per answer; -1: no limit",
    **{name: help_text(name) for name in LIVE},
}
_WHOLE_NUMBERS = ("top_k", "seed", _MAX_TOKENS)
_RANDOM = ("random", "-1")  # seeds


def table(conversation: Conversation, only: Collection[str] = ()) -> str:
    """Names, values and what they mean, for people.  only: of these settings; without any, of all."""
    values = {
        name: "random" if name == "seed" and each is None else value_text(name, each)
        for name, each in _values(conversation).items()
        if name in (only or _HELP)
    }
    name_width, width = max(map(len, values)), max(map(len, values.values()))
    lines = (f"{name:{name_width}}  {value:{width}}  {_HELP[name]}" for name, value in values.items())
    return "\n".join(lines)


def change(conversation: Conversation, text: str) -> Collection[str]:
    """Sets what a text like "temp 0.5 t1 0.6" says, all or nothing; returns the names. Raises HobbitError."""
    given = _parse(text)
    sampling = {name: value for name, value in given.items() if name in SAMPLING_HELP}
    changed = replace(conversation.sampling, **sampling)
    max_tokens = given.get(_MAX_TOKENS, conversation.max_tokens)
    ChatConfig(max_tokens=max_tokens)  # refuses a number that cannot be
    if live := {name: given[name] for name in LIVE if name in given}:
        conversation.engine.set(**live)
    conversation.sampling, conversation.max_tokens = changed, max_tokens
    return given


def _values(conversation: Conversation) -> dict[str, Value]:
    values = {name: getattr(conversation.sampling, name) for name in SAMPLING_HELP}
    values[_MAX_TOKENS] = conversation.max_tokens
    return {**values, **conversation.engine.live()}


def _parse(text: str) -> dict[str, Any]:
    words = text.replace("=", " ").split()
    values: dict[str, Any] = {}
    for name, value in zip(words[::2], [*words[1::2], None], strict=False):
        if name not in _HELP:
            hint = did_you_mean(name, _HELP, f"choose one of {', '.join(_HELP)}")
            raise ConfigError(f"there is no setting {name}; {hint}")
        if value is None:
            raise ConfigError(f"{name} needs a value: /set {name} VALUE")
        values[name] = _value(name, value)
    return values


def _value(name: str, text: str) -> Value:
    if name == "seed" and text in _RANDOM:
        return None
    if name in OPTIONS and OPTIONS[name][0].choices:
        return text
    is_whole = name in _WHOLE_NUMBERS
    try:
        return int(text) if is_whole else float(text)
    except ValueError:
        kind = "whole number" if is_whole else "number"
        raise ConfigError(f"{name} cannot be {text}; give a {kind}") from None
