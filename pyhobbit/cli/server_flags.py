# SPDX-License-Identifier: MIT
"""The options of our llama-server, as its own help lists them."""

import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from pyhobbit.errors import HobbitError
from pyhobbit.native.paths import BIN_DIR

SERVER = BIN_DIR / "llama-server"

_FLAGS = re.compile(r"(-{1,2}[A-Za-z][\w-]*)(?:,\s*)?")
_TWO_VALUES = re.compile(r" [A-Z]+ [A-Z]+(  |$)")
_ENVIRONMENT = re.compile(r"\(env: (\w+)\)")


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
    return parse_help(_server_help())


def parse_help(text: str) -> dict[str, Flag]:
    """Reads what `llama-server --help` prints: names, then for an option with a value what it is."""
    flags: dict[str, Flag] = {}
    newest: Flag | None = None
    for line in text.splitlines():
        variable = _ENVIRONMENT.search(line)
        if line.startswith("-") and not line.startswith("-----"):
            newest = _parse_line(line)
        elif newest and variable:
            newest = Flag(newest.names, newest.n_values, variable[1])
        else:
            continue
        flags.update(dict.fromkeys(newest.names, newest))
    return flags


def _parse_line(line: str) -> Flag:
    names = []
    end = 0
    while match := _FLAGS.match(line, end):
        names.append(match[1])
        end = match.end()
    rest = line[end:]
    n_values = 2 if _TWO_VALUES.match(rest) else int(re.match(r" \S", rest) is not None)
    return Flag(tuple(names), n_values)


def unknown(argument: str, usual: Iterable[str], others: Iterable[str]) -> str:
    """What to say of an option that nobody knows: one of the usual ones that is near, or of the others."""
    name = argument.partition("=")[0]
    near = [each for names in (usual, others) for each in get_close_matches(name, list(names), n=1)]
    hint = f"did you mean {near[0]}?" if near else "see: pyhobbit serve --help"
    return f"serve has no option {argument}; {hint}"


def normal(argument: str, flags: Mapping[str, Flag]) -> list[str]:
    """An argument as llama-server takes it: --flag=VALUE in two, and with dashes for underscores."""
    name, equals, value = argument.partition("=")
    if name.startswith("--"):
        name = name.replace("_", "-")
    if name in flags and equals and flags[name].n_values == 1:
        return [name, value]
    return [argument] if equals else [name]


def _server_help() -> str:
    try:
        done = subprocess.run([SERVER, "--help"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as e:
        raise HobbitError(f"{SERVER} cannot be run ({e}); install pyhobbit again") from e
    return done.stdout
