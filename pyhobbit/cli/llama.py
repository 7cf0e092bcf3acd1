# SPDX-License-Identifier: MIT
"""Runs another program of llama.cpp, such as: pyhobbit llama quantize --help

A file with tiers needs no option there.
Settings of the cache: --override-kv hobbit.t1=float:0.6
"""

import argparse
import re
from collections.abc import Sequence
from typing import NoReturn

from pyhobbit.errors import ConfigError, did_you_mean
from pyhobbit.native import programs
from pyhobbit.native.paths import BIN_DIR


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("program", metavar="PROGRAM", help=f"one of {', '.join(_known())}")
    parser.add_argument("arguments", nargs="*", metavar="...", help="its arguments, which are passed on")


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Leaves all that follows the program's name to it. Raises SystemExit."""
    if not arguments or arguments[0].startswith("-"):
        return parser.parse_args(arguments or ["--help"])
    return argparse.Namespace(program=arguments[0], arguments=list(arguments[1:]))


def run(args: argparse.Namespace) -> NoReturn:
    """Becomes the program, whose exit status is ours. Raises HobbitError."""
    known = _known()
    name = re.sub(r"^(llama|ggml)-", "", args.program)
    if name not in known:
        hint = did_you_mean(name, known, f"there are {', '.join(known)}")
        raise ConfigError(f"there is no program '{args.program}' of llama.cpp; {hint}")
    programs.become([str(BIN_DIR / known[name]), *args.arguments])


def _known() -> dict[str, str]:
    """The names of the files, by those without their first word."""
    return {re.sub(r"^(llama|ggml)-", "", each.name): each.name for each in sorted(BIN_DIR.glob("*"))}
