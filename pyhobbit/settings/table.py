# SPDX-License-Identifier: MIT
"""The engine's settings as users give them. Several settings of one option are the elements of a list."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any, NamedTuple

from pyhobbit._tables import SETTINGS, RuleNumbers, Setting

OPTIONS: Mapping[str, tuple[Setting, ...]] = {
    name: tuple(group) for name, group in groupby(SETTINGS, lambda each: each.option) if name is not None
}

KEYS: Mapping[str, tuple[str, ...]] = {name: tuple(each.key for each in OPTIONS[name]) for name in OPTIONS}

_PEOPLES = ("memory", "pools", "quality", "sidecar", "io_threads", "device", "device_memory", "placement")
RESEARCH: tuple[str, ...] = tuple(name for name in OPTIONS if name not in _PEOPLES)
"""Options for papers and engineers."""

NAMED: tuple[str, ...] = tuple(
    name for name in OPTIONS if name in (*_PEOPLES, "policy", "prefetch", "trace") and name != "io_threads"
)
"""Options that the command line has by name; it takes the others by --set."""

LIVE: tuple[str, ...] = tuple(name for name, specs in OPTIONS.items() if specs[0].is_live)
"""Options that may change while a model is open."""


NUMBERS: tuple[str, ...] = tuple(each.name for each in fields(RuleNumbers))
"""Options that are numbers of rules for precision."""


class Key(NamedTuple):
    """A key of --set. kind: as of a setting, or "list".  metavar: for a value.  default: where not given."""

    kind: str
    help: str
    metavar: str = ""
    default: Any = None


@dataclass(frozen=True)
class Resolved:
    """One setting, by name: its value, where it comes from, and how it was computed or what overrules it.

    value: a tuple of an option with several settings; None if it is computed when a model is opened.
    source: "default", "computed", "file", "calibration" or "flag".
    """

    name: str
    value: Any
    source: str
    note: str = ""


def default(option: str) -> Any:
    """The engine's default; None if it is computed."""
    values = tuple(each.default for each in OPTIONS[option])
    return values if len(values) > 1 else values[0]


def help_text(option: str) -> str:
    """The option's help, with the names that it takes."""
    spec = OPTIONS[option][0]
    is_whole = all(each in spec.help for each in spec.choices)
    return spec.help if is_whole else f"{spec.help.removesuffix('.')}; one of {', '.join(spec.choices)}."


def default_text(option: str) -> str:
    """The default for people, "" for none."""
    settings = OPTIONS[option]
    if settings[0].note or settings[0].default is None:
        return settings[0].note or ""
    return ",".join(f"{each.default:g}" if each.kind == "number" else str(each.default) for each in settings)
