# SPDX-License-Identifier: MIT
"""The sub-commands, one per verb; the verbs declare their own options."""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from pyhobbit import bench, calibrate, chat, cli, convert, inspection, simulate

_VERBS = {
    "bench": (bench, "measure against stock llama.cpp"),
    "calibrate": (calibrate, "fit thresholds and cache to a model"),
    "chat": (chat, "generate text"),
    "convert": (convert, "make a multi-precision GGUF"),
    "inspect": (inspection, "show a model's experts and how a text uses them"),
    "simulate": (simulate, "replay a route trace through cache policies"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        cli.complain(message)
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


def run(arguments: Sequence[str] | None) -> int:
    """Runs the verb that the arguments name; returns the exit status. Raises HobbitError, SystemExit."""
    args = _parser().parse_args(arguments)
    return args.run(args)
