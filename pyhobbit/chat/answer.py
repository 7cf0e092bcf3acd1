# SPDX-License-Identifier: MIT
"""Answers on standard output while they are made."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterable, Iterator

from pyhobbit.chat.screen import has_style
from pyhobbit.engine.engine import Engine, Finish, Piece

# A model must not move the terminal's cursor or send it commands.
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def print_answer(pieces: Iterable[Piece]) -> Finish | None:
    """Streams to standard output, ended by one newline; returns why the answer ended."""
    finish = None
    last = ""
    on_terminal = sys.stdout.isatty()
    with _waiting_mark() as remove_mark:
        for piece in pieces:
            text = piece.text.translate(_CONTROLS) if on_terminal else piece.text
            if text:
                remove_mark()
            sys.stdout.write(text)
            sys.stdout.flush()
            last = text or last
            finish = piece.finish
    if not last.endswith("\n"):
        print(flush=True)
    return finish


@contextlib.contextmanager
def interrupting(engine: Engine) -> Iterator[None]:
    """Within it, Ctrl-C interrupts the engine and nothing else.

    Raises KeyboardInterrupt at its end where Ctrl-C came too late to interrupt anything.
    """
    previous = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, lambda _signal, _frame: engine.interrupt())
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        late = engine.take_interrupt()
    if late:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _waiting_mark() -> Iterator[Callable[[], None]]:
    """Shows that the prompt is being read, until the returned function or the end takes the mark away."""
    shown = has_style(sys.stdout)

    def remove() -> None:
        nonlocal shown
        if shown:
            sys.stdout.write("\r\033[K")
            sys.stdout.flush()
        shown = False

    if shown:
        sys.stdout.write("\033[2m…\033[0m")
        sys.stdout.flush()
    try:
        yield remove
    finally:
        remove()
