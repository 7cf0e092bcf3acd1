# SPDX-License-Identifier: MIT
"""Answers on standard output while they are made, and what the model thinks before on standard error."""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator

from pyhobbit.chat.conversation import Conversation
from pyhobbit.chat.progress import Progress
from pyhobbit.chat.screen import dim, note
from pyhobbit.engine.engine import Engine, Finish, Piece
from pyhobbit.settings.config import counted_tokens

# A model must not move the terminal's cursor or send it commands.
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def print_answer(
    conversation: Conversation, question: str, replaces_last: bool = False, quiet: bool = False
) -> Finish | None:
    """Asks and streams the answer to standard output, ended by one newline; returns why it ended.

    replaces_last: as of Conversation.ask().  quiet: nothing says that the model has thought.
    """
    finish = None
    with Progress() as progress:
        progress.show("…")
        thoughts = _Thoughts(progress, conversation.think != "hide", quiet)
        text = _Text(progress)
        try:
            for piece in conversation.ask(question, progress.reading, replaces_last):
                thoughts.add(piece)
                text.add(piece)
                finish = piece.finish
        finally:
            thoughts.end()
        text.end()
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


class _Text:
    """The answer itself."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._on_terminal = sys.stdout.isatty()
        self._last = ""

    def add(self, piece: Piece) -> None:
        text = piece.text.translate(_CONTROLS) if self._on_terminal else piece.text
        if text:
            self._progress.remove()
        sys.stdout.write(text)
        sys.stdout.flush()
        self._last = text or self._last

    def end(self) -> None:
        self._progress.remove()
        if not self._last.endswith("\n"):
            print(flush=True)


class _Thoughts:
    """What the model thinks before it answers, dimmed, or one line that says how much."""

    def __init__(self, progress: Progress, is_shown: bool, quiet: bool) -> None:
        self._progress = progress
        self._is_shown = is_shown
        self._quiet = quiet
        self._n_tokens = 0
        self._start_s = time.monotonic()
        self._is_open = False
        self._last = ""

    def add(self, piece: Piece) -> None:
        self._n_tokens += piece.token is not None  # also those whose text the parser holds back
        if piece.thinking:
            if not self._is_open:
                self._begin()
            self._show(piece.thinking.translate(_CONTROLS) if sys.stderr.isatty() else piece.thinking)
        if piece.text:
            self.end()

    def end(self) -> None:
        n_tokens, self._n_tokens = self._n_tokens, 0
        if not self._is_open:
            return
        self._is_open = False
        if self._is_shown:
            sys.stderr.write(dim()[1] + "\n" * (2 - self._last.endswith("\n")))
            sys.stderr.flush()
        self._progress.remove()
        if not self._is_shown and not self._quiet:
            note(f"thought for {time.monotonic() - self._start_s:.0f} s ({counted_tokens(n_tokens)})")

    def _begin(self) -> None:
        self._is_open, self._start_s = True, time.monotonic()
        if self._is_shown:
            self._progress.remove()
            sys.stderr.write(dim()[0])

    def _show(self, text: str) -> None:
        if self._is_shown:
            sys.stderr.write(text)
            sys.stderr.flush()
            self._last = text
        else:
            self._progress.thinking(self._n_tokens)
