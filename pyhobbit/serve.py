# SPDX-License-Identifier: MIT
"""pyhobbit serve: llama.cpp's server, with its experts in the cache.

Every option of llama-server is passed on; llama-server's own help: pyhobbit serve --llama-help
"""

import argparse
import csv
import errno
import io
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from pyhobbit import _server_flags
from pyhobbit._server_flags import SERVER, Flag, known
from pyhobbit.config import CacheConfig, Setting, parse_size
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.model_path import add_model_arguments, check_model_arguments, check_model_file, model_path

_HOST, _PORT = "127.0.0.1", "8080"
_MAX_PORT = 65535
_CONTEXT = 8192
# What we change of its defaults: the largest context and 8 GiB of old prompts leave the experts no room.
_DEFAULTS = {"--ctx-size": str(_CONTEXT), "--cache-ram": "0", "--metrics": None}
# Shown in our help; all others are passed on as well.
_PASSED_ON = {
    "--host": ("HOST", f"address to listen on; 0.0.0.0: all (default: {_HOST})"),
    "--port": ("PORT", f"(default: {_PORT})"),
    "--api-key": ("KEY", "that clients must send (default: none)"),
    "--parallel": ("N", "requests computed at once, which share cache and context (default: 4)"),
    "--ctx-size": ("N", f"tokens of context, for all requests together (default: {_CONTEXT})"),
    "--cache-ram": ("MIB", "for old prompts, beside --memory (default: 0)"),
    "--threads": ("N", "for computing (default: one per core)"),
}
_TYPES = {bool: "bool", int: "int", float: "float", str: "str"}
_MODEL_FLAGS = ("-m", "--model")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the verb; parse() takes llama-server's as well."""
    parser.allow_abbrev = False
    add_model_arguments(parser)
    _add_cache(parser)
    group = parser.add_argument_group("llama-server, among others")
    for flag, (metavar, what) in _PASSED_ON.items():
        group.add_argument(flag, metavar=metavar, help=what)
    group.add_argument("--llama-help", action="store_true", help="show all options of llama-server and end")


def _add_cache(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("expert cache")
    size = group.add_mutually_exclusive_group()
    size.add_argument("--memory", metavar="SIZE", help="of the process, like 8G (default: what is free)")
    size.add_argument("--pools", metavar="SIZE", help="of the expert pools alone, like 512M")
    add = group.add_argument
    add("--t1", type=float, metavar="F", help="high precision up to this sum of gate weights, 0 to 1")
    add("--t2", type=float, metavar="F", help="low precision from t1 to here, skipped above it")
    add("--low-share", type=float, metavar="F", help="of the pools, for the low tier (default: by t1)")
    add("--policy", metavar="NAME", help="of eviction (default: calibrated, or echo)")
    add("--prefetch", type=int, metavar="N", help="layers ahead, 0 to 4 (default: calibrated, or 2)")
    add("--sidecar", type=Path, metavar="FILE", help="with the low tier (default: MODEL.hobbit.gguf)")
    add("--trace", type=Path, metavar="FILE", help="write the routing here, for pyhobbit simulate")


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parses our options; `passed_on` holds those of llama-server, in their order.

    Raises ConfigError, HobbitError, SystemExit.
    """
    flags = _server_flags.known()
    own = {name: action.nargs != 0 for action in _own_actions(parser) for name in action.option_strings}
    ours: list[str] = []
    theirs: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, *value = _server_flags.normal(argument, flags)
        if argument in _MODEL_FLAGS:
            ours += _take(rest, 1)
        elif argument.partition("=")[0] in own:
            takes_value = own[argument.partition("=")[0]] and "=" not in argument
            ours += [argument, *_take(rest, int(takes_value))]
        elif name in flags:
            theirs += [name, *(value or _take(rest, int(flags[name].takes_value)))]
        elif argument.startswith("-"):
            raise ConfigError(_server_flags.unknown(argument, [*own, *_PASSED_ON], flags))
        else:
            ours.append(argument)
    args = parser.parse_args(ours)
    args.passed_on = theirs
    return args


def _own_actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    # argparse has no public way to ask
    return [action for action in parser._actions if not set(action.option_strings) & set(_PASSED_ON)]


def _take(arguments: list[str], n: int) -> list[str]:
    taken = arguments[:n]
    del arguments[:n]
    return taken


def run(args: argparse.Namespace) -> int:
    """Becomes llama-server, which gets all signals and whose exit status is ours. Raises HobbitError."""
    cache = CacheConfig(
        memory=None if args.memory is None else parse_size(args.memory),
        pools=None if args.pools is None else parse_size(args.pools),
        low_share=args.low_share,
        t1=args.t1,
        t2=args.t2,
        sidecar=args.sidecar,
        policy=args.policy,
        prefetch=args.prefetch,
        trace=args.trace,
    )
    if args.llama_help:
        _become([str(SERVER), "--help"])
    check_model_arguments(args)
    flags = known()
    _check_address(
        _value(flags["--host"], args.passed_on, _HOST), _value(flags["--port"], args.passed_on, _PORT)
    )
    model = model_path(args)
    check_model_file(model)
    _become([str(SERVER), "-m", str(model), *server_arguments(cache.settings(), args.passed_on, flags)])


def server_arguments(
    settings: Mapping[str, Setting], passed_on: Sequence[str], flags: Mapping[str, Flag]
) -> list[str]:
    """What llama-server is told beside the model: our settings, our defaults and what was passed on."""
    arguments = ["--override-kv", _overrides(settings)] if settings else []
    for name, value in _DEFAULTS.items():
        if _value(flags[name], passed_on) is None:
            arguments += [name] if value is None else [name, value]
    return [*arguments, *passed_on]


def _overrides(settings: Mapping[str, Setting]) -> str:
    """KEY=TYPE:VALUE,..., quoted as llama.cpp reads it: like CSV."""
    row = io.StringIO()
    values = (
        f"{key}={_TYPES[type(value)]}:{str(value).lower() if isinstance(value, bool) else value}"
        for key, value in settings.items()
    )
    csv.writer(row, lineterminator="").writerow(values)
    return row.getvalue()


def _value(flag: Flag, arguments: Sequence[str], default: str | None = None) -> str | None:
    """What llama-server will take for it."""
    given = flag.value_in(arguments)
    if given is None and flag.variable is not None:
        given = os.environ.get(flag.variable)
    return default if given is None else given


def _check_address(host: str, port: str) -> None:
    """Raises HobbitError where nobody can listen there: the model would be loaded in vain."""
    if host.endswith(".sock"):
        return
    if not port.isdecimal() or int(port) > _MAX_PORT:
        raise ConfigError(f"'{port}' is not a port; give --port a number from 1 to {_MAX_PORT}")
    for each in host.split(","):
        _check_listening(each.strip(), int(port))


def _check_listening(host: str, port: int) -> None:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            # connections of a server that has ended do not count, one that listens does
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            problem = f"port {port} of {host} is taken by another program; choose another one with --port"
        elif e.errno == errno.EACCES:
            problem = f"port {port} needs the rights of an administrator; choose one above 1023 with --port"
        else:
            problem = f"this machine cannot listen on {host} ({e.strerror}); --host takes an address of it"
        raise HobbitError(problem) from e


def _become(command: list[str]) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    try:
        os.execv(command[0], command)
    except OSError as e:
        raise HobbitError(f"{command[0]} cannot be run: {e.strerror}; install pyhobbit again") from e
