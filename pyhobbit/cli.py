# SPDX-License-Identifier: MIT
"""The command line: one sub-command per verb; the verbs declare their own options."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from pyhobbit import chat, convert
from pyhobbit.errors import ConfigError, HobbitError

_VERBS = {
    "chat": (chat, "generate text"),
    "convert": (convert, "make a multi-precision GGUF"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"pyhobbit: error: {message}\n")
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="pyhobbit", description="MoE models larger than memory, on llama.cpp.")
    parser.add_argument("--version", action="version", version=f"pyhobbit {version('pyhobbit')}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (module, summary) in _VERBS.items():
        verb = verbs.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(verb)
        verb.set_defaults(run=module.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `pyhobbit ARGUMENTS`; returns the exit status: 1 error, 2 wrong usage, 130 after Ctrl-C."""
    args = _parser().parse_args(arguments)
    try:
        return args.run(args)
    except HobbitError as e:
        sys.stderr.write(f"pyhobbit: error: {e}\n")
        return 2 if isinstance(e, ConfigError) else 1
    except KeyboardInterrupt:
        return chat.INTERRUPTED
    except BrokenPipeError:
        # Who read our output has gone; the interpreter must not try to flush to them once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
