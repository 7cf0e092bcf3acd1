# SPDX-License-Identifier: MIT
"""The sub-commands, one per verb; the verbs declare their own options."""

import argparse
import shutil
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib.metadata import version
from typing import Any, NoReturn

from pyhobbit import convert
from pyhobbit.cli import bench, calibrate, chat, config, inspect, serve, simulate
from pyhobbit.cli.options import declared_options
from pyhobbit.cli.status import complain
from pyhobbit.errors import ConfigError

# A module with parse(parser, arguments) reads its arguments itself.
_VERBS = {
    "bench": (bench, "measure against stock llama.cpp"),
    "calibrate": (calibrate, "fit thresholds and cache to a model"),
    "chat": (chat, "talk to a model, or have it continue a text"),
    "config": (config, "show the settings that apply, and where each comes from"),
    "convert": (convert, "make a multi-precision GGUF"),
    "inspect": (inspect, "show a model, how it fits this machine and how a text uses its experts"),
    "serve": (serve, "answer over HTTP, like OpenAI's API"),
    "simulate": (simulate, "replay a route trace through cache policies"),
}

# What users of other programs type.
_OTHER_VERBS = {
    "run": "chat",
    "server": "serve",
    "show": "inspect",
    "info": "inspect",
    "quantize": "convert",
    "settings": "config",
}
_OTHER_OPTIONS = {
    "-c": "--ctx",
    "--ctx-size": "--ctx",
    "--num-ctx": "--ctx",
    "-t": "--threads",
    "-s": "--seed",
    "--predict": "-n",
    "--n-predict": "-n",
    "--max-tokens": "-n",
    "-sys": "--system",
    "--system-prompt": "--system",
    "--repo": "--hf-repo",
    "--ram": "--memory",
}
_MODEL_OPTIONS = ("-m", "--model")
# llama.cpp's, and what to type in their place
_ALL_LAYERS = "a GPU build puts all layers on the GPU; --device-memory SIZE limits the experts there"
_AS_MANY = "give --device-memory SIZE, and as many experts as fit are on the GPU"
_GPU_OPTIONS = {
    "-ngl": _ALL_LAYERS,
    "--gpu-layers": _ALL_LAYERS,
    "--n-gpu-layers": _ALL_LAYERS,
    "-cmoe": "give --device CPU",
    "--cpu-moe": "give --device CPU",
    "-ncmoe": _AS_MANY,
    "--n-cpu-moe": _AS_MANY,
}

_MAX_WIDTH = 100


class HelpFormatter(argparse.HelpFormatter):
    """Help that fits a screen: a usage of one line, options in one column, texts with line ends kept."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
        super().__init__(prog, max_help_position=27, width=width)

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None = None,
    ) -> None:
        if usage is None:
            words = [_usage_word(action) for action in actions]
            usage = " ".join(["%(prog)s", *filter(None, words), "[options]"])
        super().add_usage(usage, actions, groups, prefix)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = text.strip().splitlines()
        return "\n".join(
            super(HelpFormatter, self)._fill_text(line, width, indent) if len(line) > width else line
            for line in lines
        )

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        values = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {values}"


def _usage_word(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"[{action.metavar}]" if action.nargs == "?" else str(action.metavar)
    return f"{action.option_strings[0]} {action.metavar}" if action.required else ""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        complain(f"{message}; see: {self.prog} --help")
        sys.exit(2)


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    description = "Mixture-of-Experts models larger than memory, on llama.cpp."
    parser = _Parser(prog="pyhobbit", description=description, formatter_class=HelpFormatter)
    parser.add_argument("--version", action="version", version=f"pyhobbit {version('pyhobbit')}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND ...", required=True, prog="pyhobbit")
    parsers = {}
    for name, (module, summary) in _VERBS.items():
        verb = verbs.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(verb)
        verb.formatter_class = HelpFormatter
        verb.set_defaults(run=module.run, verb=name)
        parsers[name] = verb
    return parser, parsers


def run(arguments: Sequence[str] | None) -> int:
    """Runs the verb that the arguments name; returns the exit status. Raises HobbitError, SystemExit."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser, parsers = _parser()
    _check_verb(arguments)
    module = _VERBS[arguments[0]][0] if arguments and arguments[0] in _VERBS else None
    if module is not None and hasattr(module, "parse"):
        return module.run(module.parse(parsers[arguments[0]], arguments[1:]))
    _check_gpu_options(arguments)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise ConfigError(_unknown(args.verb, unknown[0], parsers[args.verb]))
    return args.run(args)


def _check_verb(arguments: Sequence[str]) -> None:
    verb = next((each for each in arguments if not each.startswith("-")), None)
    if verb is None or verb in _VERBS:
        return
    if verb.endswith(".gguf"):
        raise ConfigError(f"a command is missing before '{verb}'; to talk to the model: pyhobbit chat {verb}")
    near = [_OTHER_VERBS.get(verb), *get_close_matches(verb, _VERBS, n=1, cutoff=0.5)]
    meant = next((each for each in near if each in _VERBS), None)
    hint = f"did you mean {meant}?" if meant else f"there are {', '.join(_VERBS)}"
    raise ConfigError(f"there is no command '{verb}'; {hint}")


def _check_gpu_options(arguments: Sequence[str]) -> None:
    # before argparse, to which -ngl is -n
    for option in (each.partition("=")[0] for each in arguments):
        if option in _GPU_OPTIONS:
            raise ConfigError(f"{arguments[0]} has no option {option}; {_GPU_OPTIONS[option]}")


def _unknown(verb: str, argument: str, parser: argparse.ArgumentParser) -> str:
    """What to say of an argument that the verb does not know."""
    if not argument.startswith("-"):
        return f"'{argument}' is one argument too many; see: pyhobbit {verb} --help"
    option = argument.partition("=")[0]
    known = list(declared_options(parser))
    if option in _MODEL_OPTIONS:
        return f"{verb} takes the model without {option}: pyhobbit {verb} FILE"
    near = [_OTHER_OPTIONS.get(option), *get_close_matches(option, known, n=1)]
    meant = next((each for each in near if each in known), None)
    hint = f"did you mean {meant}?" if meant else f"see: pyhobbit {verb} --help"
    return f"{verb} has no option {option}; {hint}"
