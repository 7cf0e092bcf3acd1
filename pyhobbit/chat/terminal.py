# SPDX-License-Identifier: MIT
"""Reads what a user types: several lines if need be, with editing, completion and a history."""

import contextlib
import os
import re
import select
import sys
import termios
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.formatted_text import AnyFormattedText
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.shortcuts import CompleteStyle

from pyhobbit.chat.screen import note

_LOCAL_FLAGS = 3  # index in the result of tcgetattr
_QUIET_S = 0.05  # a paste has no longer pause
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|.)?")  # other keys, and the marks of a paste


class Terminal:
    """The prompt, on prompt_toolkit's current session. hint: shown until something is typed."""

    def __init__(self, history: Path, commands: Sequence[str], hint: str) -> None:
        self._warned = False
        self._typed = ""
        placeholder: AnyFormattedText = [("fg:ansibrightblack", f"{hint} (/help shows the commands)")]
        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation="  ",
            placeholder=lambda: "" if get_app().is_done else placeholder,
            history=_History(history),
            completer=WordCompleter([*commands], sentence=True),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,  # a menu would keep lines free below the prompt
            key_bindings=_key_bindings(),
            enable_suspend=True,
        )

    def read(self) -> str | None:
        """One message, "" for none, None when the user leaves by Ctrl-D or Ctrl-C."""
        typed, self._typed = self._typed, ""
        try:
            text = self._session.prompt(default=typed)
        except EOFError:
            return None
        except KeyboardInterrupt:
            return self._on_interrupt(self._session.default_buffer.text)
        self._warned = False
        return text

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Within it, what is typed or pasted does not show; the next message begins with all of it."""
        if not sys.stdin.isatty():
            yield
            return
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
        silent = [*before]
        # Without lines none is cut or sent by itself, and Ctrl-C drops nothing.
        silent[_LOCAL_FLAGS] &= ~(termios.ECHO | termios.ICANON)
        silent[_LOCAL_FLAGS] |= termios.NOFLSH
        termios.tcsetattr(descriptor, termios.TCSANOW, silent)
        try:
            yield
        finally:
            self._typed += _edited(_pending(descriptor).decode("utf-8", "replace"))
            termios.tcsetattr(descriptor, termios.TCSANOW, before)

    def _on_interrupt(self, text: str) -> str | None:
        if self._warned and not text:
            return None
        self._warned = not text
        if self._warned:
            note("press Ctrl-C again or Ctrl-D to exit")
        return ""


def _pending(descriptor: int) -> bytes:
    """Reads all that was typed."""
    data = b""
    with contextlib.suppress(OSError):  # the terminal is gone
        while select.select([descriptor], [], [], _QUIET_S)[0] and (more := os.read(descriptor, 1 << 16)):
            data += more
    return data


def _edited(keys: str) -> str:
    """The text that typed or pasted keys make, as far as it needs no cursor."""
    text: list[str] = []
    for key in re.sub(_ESCAPE, "", keys.replace("\r", "\n")):
        if key in "\x7f\b":
            del text[-1:]
        elif key.isprintable() or key in "\n\t":
            text.append(key)
    return "".join(text).rstrip("\n")


def _key_bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if _continues(buffer):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    bindings.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    return bindings


def _continues(buffer: Buffer) -> bool:
    """True if a line follows; removes the backslash that says so."""
    ends = buffer.text.endswith("\\") and buffer.document.is_cursor_at_the_end
    if ends:
        buffer.delete_before_cursor()
    return ends


class _History(FileHistory):
    """A home that cannot be written loses the history, nothing else."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)

    def load_history_strings(self) -> Iterable[str]:
        try:
            return list(super().load_history_strings())
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError, UnicodeError):
            super().store_string(string)
