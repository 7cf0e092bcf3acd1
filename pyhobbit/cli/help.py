# SPDX-License-Identifier: MIT
"""The help of the verbs: --help shows the common options on a small screen, --help-all every option."""

import argparse
import shutil
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NoReturn

COMMON: Mapping[str, Collection[str]] = {
    "bench": ("--model", "--shape", "--low", "--arms", "--limits", "--reps", "--prompts", "--tokens"),
    "calibrate": ("model", "--text", "--max-ppl-increase", "--max-kl", "--chunks", "--memory"),
    "chat": ("model", "-p", "--file", "--system", "-n", "--temp", "--think", "-q", "--memory", "--ctx"),
    "config": ("model", "--write", "--memory", "--ctx", "--t1", "--t2", "--json"),
    "convert": ("model", "-o", "--low", "--low-from", "--high", "--imatrix", "--sidecar", "--dry-run"),
    "inspect": ("model", "--text", "--plots", "--json", "--memory", "--ctx", "--t1", "--t2"),
    "serve": ("model", "--memory", "--ctx", "--host", "--port", "--api-key", "--parallel", "--llama-help"),
    "simulate": ("--trace", "--capacity", "--policy", "--t1", "--t2", "--predictor", "--json"),
}
"""By verb, the options that --help shows, where that is not all of them."""

EXAMPLES: Mapping[str, str] = {
    "bench": "--shape tiny --low q2_k",
    "calibrate": "m.gguf --text my.txt --max-kl 0.01",
    "chat": "m.gguf --memory 8G",
    "config": "m.gguf --memory 8G --write",
    "convert": "--sidecar m.gguf",
    "inspect": "m.gguf --memory 8G",
    "serve": "m.gguf --memory 8G --port 8000",
    "simulate": "--trace run.csv --capacity 0.2",
}
"""By verb, arguments that --help shows, of those in COMMON."""

_MAX_WIDTH = 100
_COLUMN, _COMMON_COLUMN = 27, 24  # where explanations begin


class HelpFormatter(argparse.HelpFormatter):
    """Help that fits a screen: a usage of one line, options in one column, texts with line ends kept."""

    def __init__(self, prog: str, column: int = _COLUMN) -> None:
        width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
        super().__init__(prog, max_help_position=column, width=width)

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
        word = f"{action.metavar} ..." if action.nargs == "*" else str(action.metavar)
        return f"[{word}]" if action.nargs in ("?", "*") else word
    return f"{action.option_strings[0]} {action.metavar}" if action.required else ""


def add_help(parser: argparse.ArgumentParser, verb: str) -> None:
    """Declares --help, and --help-all where it shows more."""
    common = COMMON.get(verb)
    shown = common or ()
    what = "show this help message and exit"
    parser.add_argument("-h", "--help", action=_Help, nargs=0, const=shown, help=what)
    if common is not None:
        parser.add_argument("--help-all", action=_Help, nargs=0, const=(), help="show all options and exit")


class _Help(argparse.Action):
    """const: names of the options that it shows; none of them: all."""

    def __init__(self, option_strings: Collection[str], dest: str, **others: Any) -> None:
        super().__init__(list(option_strings), argparse.SUPPRESS, default=argparse.SUPPRESS, **others)

    def __call__(self, parser: argparse.ArgumentParser, *_others: object) -> NoReturn:
        print(_common_help(parser, self.const) if self.const else parser.format_help(), end="")
        parser.exit()


def _common_help(parser: argparse.ArgumentParser, names: Collection[str]) -> str:
    actions = parser._actions  # argparse has no public way to ask
    shown = [each for each in actions if not {each.dest, *each.option_strings}.isdisjoint(names)]
    formatter = HelpFormatter(parser.prog, _COMMON_COLUMN)
    formatter.add_usage(None, actions, ())
    formatter.add_text((parser.description or "").strip().split("\n\n")[0])
    formatter.start_section("common options")
    formatter.add_arguments(shown)
    formatter.end_section()
    verb = parser.prog.split()[-1]
    example = f"Example: {parser.prog} {EXAMPLES[verb]}"
    formatter.add_text(f"{example}\nAll {len(actions)} options: {parser.prog} --help-all")
    return formatter.format_help()
