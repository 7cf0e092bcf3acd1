# SPDX-License-Identifier: MIT
"""The help of the verbs: --help shows the common options on a small screen, and --help-all the others."""

import argparse
import re
import shutil
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from pyhobbit.cli.status import complain
from pyhobbit.errors import ConfigError, did_you_mean
from pyhobbit.settings.table import NAMED, Key

COMMON: Mapping[str, Collection[str]] = {
    "bench": ("model", "--prompts", "-n", "--json", "--memory", "--ctx", "--quality"),
    "calibrate": ("model", "--text", "--max-kl", "--chunks", "--memory"),
    "chat": ("model", "-p", "--file", "--system", "-n", "--temp", "--think", "-q", "--memory", "--quality"),
    "config": ("model", "--write", "--memory", "--ctx", "--quality", "--json"),
    "convert": ("model", "-o", "--low", "--high", "--imatrix", "--sidecar", "--dry-run"),
    "inspect": ("model", "--no-speed", "--json", "--memory", "--ctx", "--quality"),
    "serve": ("model", "--memory", "--quality", "--host", "--port", "--api-key", "--parallel"),
    "simulate": ("--trace", "--capacity", "--policy", "--set", "--json"),
}
"""By verb, the options that --help shows, where that is not all of them."""

EXAMPLES: Mapping[str, str] = {
    "calibrate": "m.gguf --text my.txt --max-kl 0.01",
    "config": "m.gguf --memory 8G --write",
    "convert": "--sidecar m.gguf",
    "serve": "m.gguf --memory 8G --port 8000",
    "simulate": "--trace run.csv --capacity 0.2 --set t1=0.6",
}
"""By verb, arguments that --help shows; others have ANY."""

ANY = "m.gguf --memory 8G"

# errors of argparse, and ours in their place
_SENTENCES = {
    "argument (.*): invalid (float|int) value: (.*)": r"\1 takes a number, not \3",
    "argument (.*): expected .*": r"\1 needs a value, with = before one that begins with -",
}
METAVARS = {
    "number": "F",
    "count": "N",
    "size": "SIZE",
    "flag": "true|false",
    "path": "FILE",
    "list": "F,...",
}
TYPES: Mapping[str, Any] = {
    "number": float,
    "count": int,
    "path": Path,
    "list": lambda text: tuple(map(float, text.split(","))),
}
_FLAGS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
_MAX_WIDTH = 100
_OWN: Mapping[str, Any] = {"add_help": False, "allow_abbrev": False}
_COLUMN, _COMMON_COLUMN = 27, 24  # columns at which explanations begin


class HelpFormatter(argparse.HelpFormatter):
    """Help that fits a screen, with options in one column."""

    def __init__(self, prog: str, column: int = _COLUMN) -> None:
        width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
        super().__init__(prog, max_help_position=column, width=width)


def _usage_word(action: argparse.Action) -> str:
    if not action.option_strings:
        word = f"{action.metavar} ..." if action.nargs == "*" else str(action.metavar)
        return f"[{word}]" if action.nargs in ("?", "*") else word
    return f"{action.option_strings[0]} {action.metavar}" if action.required else ""


class Parser(argparse.ArgumentParser):
    """A parser of ours. declared: its arguments and options, which argparse has no public way to list.

    settable: by the keys of --set, what stands for a value, and their help.  example: for --help.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.declared: list[argparse.Action] = []
        self.example = ""
        self.settable: dict[str, tuple[str, str]] = {}
        super().__init__(*arguments, **{"formatter_class": HelpFormatter, **_OWN, **named})

    def add_argument(self, *names: Any, **named: Any) -> argparse.Action:
        """Declares an option, as argparse does."""
        self.declared.append(super().add_argument(*names, **named))
        return self.declared[-1]

    def add_argument_group(self, *arguments: Any, **named: Any) -> Any:
        """Declares a group, as argparse does."""
        group = super().add_argument_group(*arguments, **named)
        declare = group.add_argument
        group.add_argument = lambda *names, **more: self.declared.append(declare(*names, **more))  # type: ignore
        return group

    def add_help_options(self, common: Collection[str]) -> None:
        """Declares --help, which shows the common options where these are named, and then those for more."""
        how = {"action": _Help, "nargs": 0, "dest": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        self.add_argument("-h", "--help", const=common, help="show this help message and exit", **how)
        if common:
            self.add_argument("--help-all", const=(), help="show more options and exit", **how)
        words = filter(None, map(_usage_word, self.declared))
        self.usage = " ".join(["%(prog)s", *words, "[options]"])

    def add_keys(self, keys: Mapping[str, Key]) -> None:
        """Declares --set KEY=VALUE, which gives options of these names."""
        self.settable = {name: (key.metavar or METAVARS[key.kind], key.help) for name, key in keys.items()}
        self.set_defaults(**{name: key.default for name, key in keys.items()})
        what = "one of the settings that only studies need, such as "
        what += f"{next(iter(keys))}=...; repeatable, --help-all lists them"
        self.add_argument("--set", action=_Set, const=keys, metavar="KEY=VALUE", help=what)

    def format_help(self) -> str:
        """All options, and the keys of --set."""
        formatter = HelpFormatter(self.prog)
        formatter.start_section("keys of --set, for studies")
        for key, (metavar, text) in self.settable.items():
            formatter.add_argument(argparse.Action([], key, metavar=f"{key}={metavar}", help=text))
        formatter.end_section()
        keys = formatter.format_help()
        return super().format_help() + (f"\n{keys}" if keys else "")

    def options(self) -> dict[str, int]:
        """By each name of each option, how many values it takes: 0 or 1."""
        return {name: int(action.nargs != 0) for action in self.declared for name in action.option_strings}

    def error(self, message: str) -> NoReturn:
        """Ends the program with one sentence and status 2."""
        for theirs, ours in _SENTENCES.items():
            message = re.sub(theirs, ours, message)
        complain(f"{message}; see: {self.prog} --help")
        sys.exit(2)

    def format_common_help(self, names: Collection[str]) -> str:
        """Help that shows the options of these names."""
        shown = [each for each in self.declared if not {each.dest, *each.option_strings}.isdisjoint(names)]
        formatter = HelpFormatter(self.prog, _COMMON_COLUMN)
        formatter.add_usage(self.usage, self.declared, ())
        formatter.add_text((self.description or "").strip().split("\n\n")[0])
        formatter.start_section("common options")
        formatter.add_arguments(shown)
        formatter.end_section()
        formatter.add_text(f"Example: {self.prog} {self.example}")
        return f"{formatter.format_help()}All {len(self.declared)} options: {self.prog} --help-all\n"


class _Set(argparse.Action):
    """Takes KEY=VALUE for the option KEY. const: the keys. Raises ConfigError."""

    def __call__(
        self, _parser: object, options: argparse.Namespace, given: Any, _name: object = None
    ) -> None:
        key, _, value = given.partition("=")
        name = key.removeprefix("hobbit.").replace("-", "_")
        if name not in self.const:
            hint = f"--{name.replace('_', '-')} is an option of its own" if name in NAMED else ""
            hint = hint or did_you_mean(name, self.const, f"there are {', '.join(self.const)}")
            raise ConfigError(f"--set has no key {key}; {hint}")
        kind, metavar = self.const[name].kind, self.const[name].metavar or METAVARS[self.const[name].kind]
        try:
            parsed = _FLAGS[value] if kind == "flag" else TYPES.get(kind, str)(value)
        except (KeyError, ValueError):
            parsed = ""
        if parsed == "":
            raise ConfigError(f"--set {name} needs a value {metavar}, as in {name}={metavar}, not '{value}'")
        setattr(options, name, parsed)


class _Help(argparse.Action):
    """const: names of the options that it shows; none of them: all."""

    def __call__(self, parser: argparse.ArgumentParser, *_others: object) -> NoReturn:
        assert isinstance(parser, Parser)
        print(parser.format_common_help(self.const) if self.const else parser.format_help(), end="")
        sys.exit(0)
