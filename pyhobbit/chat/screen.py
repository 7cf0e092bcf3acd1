# SPDX-License-Identifier: MIT
"""Abilities of the terminal, and lines beside the answers."""

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import TextIO

_SEPARATOR = " · "
_GLUE = "\N{NO-BREAK SPACE}"


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
