# SPDX-License-Identifier: MIT
"""Answers on standard output while they are made, and what the model thinks before on standard error."""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from typing import TextIO

from pyhobbit.chat.conversation import Conversation
from pyhobbit.chat.screen import Progress, dim, note
from pyhobbit.engine.engine import Engine, Finish, Piece
from pyhobbit.settings.config import counted_tokens

# A model must not move the terminal's cursor or send it commands.
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def print_answer(
    conversation: Conversation, question: str, replaces_last: bool = False, quiet: bool = False
) -> Finish | None:
    """Streams the answer to standard output; returns why it ended. quiet: without a line on thoughts."""
    finish = None
    with Progress() as progress:
        progress.show("…")
        printer = _Printer(progress, conversation.think != "hide", quiet)
        try:
            for piece in conversation.ask(question, progress.reading, replaces_last):
                printer.add(piece)
                finish = piece.finish
        finally:
            printer.end_thoughts()
        printer.end()
    return finish


@contextlib.contextmanager
def interrupting(engine: Engine) -> Iterator[None]:
    """Within it, Ctrl-C interrupts the engine alone. Raises KeyboardInterrupt at its end if that was late."""
    previous = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, lambda _signal, _frame: engine.interrupt())
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        late = engine.take_interrupt()
    if late:
        raise KeyboardInterrupt


class _Printer:
    """Writes the answer, and before it the thoughts: dimmed, or one line that says how much they were."""

    def __init__(self, progress: Progress, shows_thoughts: bool, quiet: bool) -> None:
        self._progress = progress
        self._shows_thoughts = shows_thoughts
        self._quiet = quiet
        self._n_thought = 0  # tokens
        self._begun_s: float | None = None  # while thoughts come
        self._last = {sys.stdout: "", sys.stderr: ""}

    def add(self, piece: Piece) -> None:
        self._n_thought += piece.token is not None  # counts tokens whose text the parser holds back too
        if piece.thinking:
            self._think(piece.thinking)
        if piece.text:
            self.end_thoughts()
            self._progress.remove()
        self._write(piece.text, sys.stdout)

    def end_thoughts(self) -> None:
        begun_s, n_tokens = self._begun_s, self._n_thought
        self._begun_s, self._n_thought = None, 0
        if begun_s is None:
            return
        if self._shows_thoughts:
            sys.stderr.write(dim()[1] + "\n" * (2 - self._last[sys.stderr].endswith("\n")))
            sys.stderr.flush()
        self._progress.remove()
        if not self._shows_thoughts and not self._quiet:
            note(f"thought for {time.monotonic() - begun_s:.0f} s ({counted_tokens(n_tokens)})")

    def end(self) -> None:
        self._progress.remove()
        if not self._last[sys.stdout].endswith("\n"):
            print(flush=True)

    def _think(self, text: str) -> None:
        if self._begun_s is None:
            self._begun_s = time.monotonic()
            if self._shows_thoughts:
                self._progress.remove()
                sys.stderr.write(dim()[0])
        if self._shows_thoughts:
            self._write(text, sys.stderr)
        else:
            self._progress.thinking(self._n_thought)

    def _write(self, text: str, stream: TextIO) -> None:
        shown = text.translate(_CONTROLS) if stream.isatty() else text
        stream.write(shown)
        stream.flush()
        self._last[stream] = shown or self._last[stream]
