# SPDX-License-Identifier: MIT
"""The options of our llama-server, which the build has listed."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pyhobbit.errors import HobbitError
from pyhobbit.native.paths import BIN_DIR, LIB_DIR

SERVER = BIN_DIR / "llama-server"
_LEAST_LIKENESS = 0.7  # of what is suggested
_OUR_NAMES = {"--ctx": "--ctx-size"}  # as the other verbs call it


@dataclass(frozen=True)
class Flag:
    """One option. names: all spellings.  n_values: that follow it.  variable: of the environment, or None."""

    names: tuple[str, ...]
    n_values: int
    variable: str | None = None

    def value_in(self, arguments: Sequence[str]) -> str | None:
        """What the arguments of llama-server give it, the last one; "" for an option without a value."""
        found = None
        for i, argument in enumerate(arguments):
            if argument in self.names:
                found = "".join(arguments[i + 1 : i + 2]) if self.n_values else ""
        return found


def known() -> dict[str, Flag]:
    """All options by each of their names. Raises HobbitError."""
    options = _listed()["options"]
    flags = [Flag(tuple(each["names"]), each["n_values"], each["variable"]) for each in options]
    return {name: flag for flag in flags for name in flag.names}


def has_web_page() -> bool:
    """Whether the server was built with it. Raises HobbitError."""
    return _listed()["has_web_page"]


def _listed() -> dict[str, Any]:
    path = LIB_DIR / "server-options.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise HobbitError(f"{path} cannot be read: {e.strerror}; install pyhobbit again") from e


def unknown(argument: str, usual: Iterable[str], others: Iterable[str]) -> str:
    """What to say of an option that nobody knows: one of the usual ones that is near, or of the others."""
    name = argument.partition("=")[0]
    is_word = len(name.lstrip("-")) > 1  # a letter is near to all short names
    near = [
        each
        for names in ((usual, others) if is_word else ())
        for each in get_close_matches(name, list(names), n=1, cutoff=_LEAST_LIKENESS)
    ]
    hint = f"did you mean {near[0]}?" if near else "see: pyhobbit serve --help"
    return f"serve has no option {argument}; {hint}"


def normal(argument: str, flags: Mapping[str, Flag]) -> list[str]:
    """An argument as llama-server takes it: --flag=VALUE in two, and with dashes for underscores."""
    name, equals, value = argument.partition("=")
    if name.startswith("--"):
        name = _OUR_NAMES.get(name, name.replace("_", "-"))
    if name in flags and equals and flags[name].n_values == 1:
        return [name, value]
    return [argument] if equals else [name]
