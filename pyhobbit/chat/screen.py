# SPDX-License-Identifier: MIT
"""Abilities of the terminal, lines beside the answers, and a line on what takes long."""

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TextIO

from pyhobbit.settings.config import counted_tokens, format_duration

_SEPARATOR = " · "
_GLUE = "\N{NO-BREAK SPACE}"
_PATIENCE_S = 1.0  # nobody asks before


def has_style(stream: TextIO) -> bool:
    """True if the stream accepts escape sequences (https://no-color.org)."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")


def dim() -> tuple[str, str]:
    """Begin and end of dimmed text on standard error; empty if it has no style."""
    return ("\033[2m", "\033[0m") if has_style(sys.stderr) else ("", "")


def note(text: str) -> None:
    """Writes lines to standard error, dimmed on a terminal: answers alone go to standard output."""
    if width := terminal_width():
        text = "\n".join(textwrap.fill(line, width, subsequent_indent="  ") for line in text.split("\n"))
    print(dimmed(text), file=sys.stderr, flush=True)


def dimmed(text: str) -> str:
    """The text for standard error."""
    begin, end = dim()
    return begin + text + end


def note_parts(parts: Iterable[str]) -> None:
    """Writes parts in one line, or where the terminal is narrow in several that break between parts."""
    text = _SEPARATOR.join(part.replace(" ", _GLUE) for part in parts)
    lines = textwrap.wrap(text, width) if (width := terminal_width()) else [text]
    note("\n".join(line.removesuffix(_SEPARATOR.rstrip()) for line in lines).replace(_GLUE, " "))


def terminal_width() -> int:
    """Columns of the terminal; 0 where standard error is none."""
    return max(shutil.get_terminal_size().columns - 1, 20) if sys.stderr.isatty() else 0


class Progress(AbstractContextManager["Progress"]):
    """A line on standard error, if that is a terminal; a context manager that removes it."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._is_shown = False

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()

    def loading(self, name: str, share: float) -> None:
        """Shows the share of the model that is loaded."""
        self._show_share(f"loading {name}: {share:.0%}", share)

    def reading(self, n_done: int, n_tokens: int) -> None:
        """Shows how many of the prompt's n_tokens, those that have to be read, are read."""
        self._show_share(f"reading the prompt: {n_done} of {n_tokens} tokens", n_done / n_tokens)

    def thinking(self, n_tokens: int) -> None:
        """Shows how many tokens the model has thought."""
        self.show(f"thinking: {counted_tokens(n_tokens)}")

    def show(self, text: str) -> None:
        """Replaces the line."""
        if has_style(sys.stderr):
            self._is_shown = True
            sys.stderr.write(f"\r{dimmed(text[: terminal_width()])}\033[K")
            sys.stderr.flush()

    def remove(self) -> None:
        """Takes the line away."""
        if self._is_shown:
            self._is_shown = False
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

    def _show_share(self, text: str, share: float) -> None:
        """Shows the text with the time that is left, once it has taken long."""
        passed_s = time.monotonic() - self._start_s
        if passed_s > _PATIENCE_S:
            left = f", {format_duration(passed_s * (1 - share) / share)} left" if share > 0 else ""
            self.show(text + left)
