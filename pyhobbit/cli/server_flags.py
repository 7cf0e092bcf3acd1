# SPDX-License-Identifier: MIT
"""The options of our llama-server, which the build has listed."""

import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from pyhobbit.errors import ConfigError, did_you_mean
from pyhobbit.native.files import os_errors
from pyhobbit.native.paths import BIN_DIR, LIB_DIR

HOST, PORT = "127.0.0.1", "8080"  # its own defaults
SERVER, TERMINAL = BIN_DIR / "llama-server", BIN_DIR / "llama-cli"
_LEAST_LIKENESS = 0.7  # a suggestion is at least so like the given word
_OUR_NAMES = {"--ctx": "--ctx-size"}  # the other verbs call it so


class Flag(NamedTuple):
    """One option. names: all spellings.  n_values: that follow it.  variable: of the environment, or None."""

    names: tuple[str, ...]
    n_values: int
    variable: str | None = None


@cache
def known() -> Mapping[str, Flag]:
    """All options by each of their names."""
    flags = [Flag(tuple(each["names"]), each["n_values"], each["variable"]) for each in _listed()["options"]]
    return {name: flag for flag in flags for name in flag.names}


def value(name: str, arguments: Sequence[str], default: str | None = None) -> str | None:
    """An option's last value, or its environment variable's; "" without values."""
    flag = known()[name]
    given = default if flag.variable is None else os.environ.get(flag.variable, default)
    for i, argument in enumerate(arguments):
        if argument in flag.names:
            given = "".join(arguments[i + 1 : i + 2]) if flag.n_values else ""
    return given


def listens_at(arguments: Sequence[str]) -> tuple[str, str]:
    """Host and port."""
    return str(value("--host", arguments, HOST)).split(",")[0], str(value("--port", arguments, PORT))


def check_address(arguments: Sequence[str]) -> None:
    """Raises HobbitError where it cannot listen: llama-server gives no reason, and takes ports mod 65536."""
    host, port = listens_at(arguments)
    if not host.endswith(".sock") and value("--reuse-port", arguments) is None:
        check_free(host, port)


def check_free(host: str, port: str, least: int = 0) -> None:
    """Raises HobbitError where llama.cpp's programs cannot listen."""
    if not port.isdecimal() or not least <= int(port) <= 0xFFFF:
        raise ConfigError(f"--port is {port}; it must be a number from {least} to 65535")
    with os_errors(f"{host}:{port} cannot be used", "; give another --host or --port"):
        family, *_, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # they set it too
            probe.bind(address)


def any_given(names: Iterable[str], arguments: Sequence[str]) -> bool:
    """True if one of these options is given."""
    return any(value(name, arguments) is not None for name in names)


def without(name: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments but for an option with a value, and its values."""
    rest, kept, values = list(arguments), [], []
    while rest:
        argument = rest.pop(0)
        if argument in known()[name].names:
            values += take(rest, 1)
        else:
            kept.append(argument)
    return kept, values


def take(arguments: list[str], n: int) -> list[str]:
    """Removes the first n arguments and returns them."""
    taken = arguments[:n]
    del arguments[:n]
    return taken


def has_web_page() -> bool:
    """Tells if the server was built with its web page."""
    return _listed()["has_web_page"]


def _listed() -> dict[str, Any]:
    return json.loads((LIB_DIR / "server-options.json").read_text(encoding="utf-8"))


def unknown(argument: str, usual: Sequence[str]) -> str:
    """The error for an unknown option, which names the nearest usual one, or else the nearest of all."""
    name = argument.partition("=")[0]
    hint = "see: pyhobbit serve --help"
    if len(name.lstrip("-")) > 1:  # a letter is near to all short names
        of_all = did_you_mean(name, known(), hint, _LEAST_LIKENESS)
        hint = did_you_mean(name, usual, of_all, _LEAST_LIKENESS)
    return f"serve has no option {argument}; {hint}"


def normal(argument: str) -> list[str]:
    """An argument as llama-server takes it: --flag=VALUE in two, and with dashes for underscores."""
    name, equals, text = argument.partition("=")
    if name.startswith("--"):
        name = _OUR_NAMES.get(name, name.replace("_", "-"))
    if equals and name in known() and known()[name].n_values == 1:
        return [name, text]
    return [argument] if equals else [name]
