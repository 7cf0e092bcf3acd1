# SPDX-License-Identifier: MIT
"""Conversations as JSON files."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from pyhobbit.errors import HobbitError
from pyhobbit.native.files import write_text
from pyhobbit.settings.config import SAMPLING_HELP, ChatConfig, SamplingConfig

_VERSION = 1
_VERSION_KEY = "pyhobbit_chat"
_NO_FILE = (OSError, ValueError, RuntimeError)  # a name too long, a zero byte in it, links in a circle
_MAX_BYTES = 64 << 20  # more is no conversation, but perhaps a model


@dataclass(frozen=True)
class SavedChat:
    """A conversation and its sampling. turns: user first.  state: Engine.state_mark() of state_path()'s."""

    model: str
    system: str | None
    turns: tuple[Mapping[str, Any], ...]
    sampling: SamplingConfig
    max_tokens: int
    state: str = ""

    def write(self, path: Path) -> None:
        """Writes JSON, all or nothing. Raises HobbitError, also where it would replace anything else."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        values = {
            _VERSION_KEY: _VERSION,
            "model": self.model,
            "messages": [*system, *self.turns],
            "sampling": asdict(self.sampling),
            "max_tokens": self.max_tokens,
            "state": self.state,
        }
        try:
            if path.exists():
                _refuse_other_file(path)
            write_text(path, json.dumps(values, indent=2) + "\n")
        except _NO_FILE as e:
            raise HobbitError(f"{path} cannot be written: {getattr(e, 'strerror', e)}") from e


def state_path(path: Path) -> Path:
    """The file of the KV cache of a saved conversation."""
    return path.with_name(path.name + ".kv")


def read_chat(path: Path) -> SavedChat:
    """Reads a file of write(). Raises HobbitError where the file is missing, damaged or something else."""
    values = _read_json(path)
    try:
        return _parse(values)
    except (KeyError, TypeError, ValueError) as e:
        detail = f"it has no {e}" if isinstance(e, KeyError) else e
        raise HobbitError(f"{path} is a damaged conversation: {detail}; load another file") from e


def _refuse_other_file(path: Path) -> None:
    try:
        _read_json(path)
    except HobbitError as e:
        raise HobbitError(f"{path} exists and is not a saved conversation; save under another name") from e


def _read_json(path: Path) -> dict[str, Any]:
    """The values of a conversation of our version, not checked further."""
    hint = "give a file that /save has written"
    try:
        if path.exists() and (not path.is_file() or path.stat().st_size > _MAX_BYTES):
            raise HobbitError(f"{path} is not a saved conversation; {hint}")
        values = json.loads(path.read_text("utf-8"))
    except OSError as e:
        raise HobbitError(f"{path} cannot be read: {e.strerror}; {hint}") from e
    except UnicodeDecodeError as e:
        raise HobbitError(f"{path} is not a text file; {hint}") from e
    except (ValueError, RecursionError) as e:
        raise HobbitError(f"{path} is not valid JSON ({e}); {hint}") from e
    if not isinstance(values, dict) or _VERSION_KEY not in values:
        raise HobbitError(f"{path} is not a saved conversation; {hint}")
    if values[_VERSION_KEY] != _VERSION:
        raise HobbitError(f"{path} was saved by another version of pyhobbit; load it with that one")
    return values


def _parse(values: dict[str, Any]) -> SavedChat:
    """Raises KeyError, TypeError or ValueError."""
    messages = [_message(value) for value in _checked(values, "messages", list)]
    system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
    for number, (message, role) in enumerate(zip(messages, cycle(("user", "assistant")), strict=False), 1):
        if message["role"] != role:
            raise ValueError(f"message {number} is the {message['role']}'s and not the {role}'s")
    if len(messages) % 2:
        raise ValueError("the last question has no answer")
    max_tokens = _checked(values, "max_tokens", int)
    ChatConfig(max_tokens=max_tokens)
    sampling = _sampling(_checked(values, "sampling", dict))
    model, state = _checked(values, "model", str), _checked({"state": "", **values}, "state", str)
    return SavedChat(model, system, tuple(messages), sampling, max_tokens, state)


def _sampling(values: dict[str, Any]) -> SamplingConfig:
    if unknown := values.keys() - SAMPLING_HELP.keys():
        raise ValueError(f"it has an unknown setting '{min(unknown)}'")
    return SamplingConfig(**values)


def _checked(values: Mapping[str, Any], key: str, kind: type) -> Any:
    value = values[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"'{key}' has the wrong type")
    return value


def _message(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("a message is not an object")
    message = {key: _checked(value, key, str) for key in ("role", "content")}
    message["content"].encode("utf-8", "surrogateescape")  # the tokenizer encodes it so
    return message
