# SPDX-License-Identifier: MIT
"""Lends this machine's memory and cores, or its GPU, to a pyhobbit on another one: --rpc HOST:PORT there.

There is no password: use it in a private network alone.
"""

import argparse
import os
import resource
import socket
import sys
from typing import NoReturn

from pyhobbit.cli.server_flags import check_free
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.native import programs
from pyhobbit.native.paths import BIN_DIR
from pyhobbit.settings.config import EngineConfig, format_size, parse_size

_HOST, _PORT = "127.0.0.1", "50052"
_OWN = 64 << 20  # bytes of the process beside what it lends
_LEAST = 384 << 20  # a program leaves 256 MiB of it to other things than experts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default=_HOST, help=f"listen on this address of the machine ({_HOST})")
    parser.add_argument("--port", default=_PORT, help=f"listen on this port ({_PORT})")
    parser.add_argument("--threads", type=int, help="compute with so many threads (all cores)")
    what = "take at most so much memory, such as 8G (all that is free)"
    parser.add_argument("--memory", metavar="SIZE", help=what)


def run(args: argparse.Namespace) -> NoReturn:
    """Becomes the server, whose exit status is ours. Raises HobbitError."""
    EngineConfig(n_threads=args.threads)  # refuses a number that cannot be
    if args.memory is not None:
        _limit(parse_size(args.memory))
    host = _address(args.host)
    check_free(host, args.port, 1)
    threads = EngineConfig.computing_threads(args.threads)
    at = f"{host}:{args.port}"
    print(f"worker at {at}, {threads} threads; the other machine takes it by", file=sys.stderr)
    print(f"    pyhobbit chat MODEL --rpc {at}", file=sys.stderr)
    programs.become([str(BIN_DIR / "ggml-rpc-server"), "-H", host, "-p", args.port, "-t", str(threads)])


def _address(host: str) -> str:
    """The address of a name. llama.cpp's server takes numbers of IPv4 alone."""
    try:
        return str(socket.getaddrinfo(host or "?", None, socket.AF_INET)[0][4][0])
    except OSError as e:
        raise HobbitError(f"--host {host} has no address of IPv4 ({e.strerror}); give another one") from e


def _limit(memory: int) -> None:
    """The kernel holds the process to it, and its clients are told what they can have."""
    if memory < _LEAST:
        raise ConfigError(
            f"--memory {format_size(memory)} is too small: a worker needs {format_size(_LEAST)}"
        )
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    except (OSError, ValueError, OverflowError) as e:
        raise HobbitError(f"--memory {format_size(memory)} cannot be set ({e}); see ulimit -d") from e
    os.environ["GGML_RPC_MEMORY"] = str(memory - _OWN)
