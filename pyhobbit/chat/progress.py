# SPDX-License-Identifier: MIT
"""How far something is that takes long, on a line that goes away."""

import sys
import time
from contextlib import AbstractContextManager
from types import TracebackType

from pyhobbit.chat.screen import dimmed, has_style, terminal_width
from pyhobbit.settings.config import counted_tokens, format_duration

_PATIENCE_S = 1.0  # nobody asks before


class Progress(AbstractContextManager["Progress"]):
    """A line on standard error, if that is a terminal; a context manager that removes it."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._is_shown = False

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()

    def loading(self, name: str, share: float) -> None:
        """Shows the share of the model that is loaded."""
        if self._has_taken_long():
            self.show(f"loading {name}: {share:.0%}{self._time_left(share)}")

    def reading(self, n_done: int, n_tokens: int) -> None:
        """Shows how many of the prompt's n_tokens, those that have to be read, are read."""
        if self._has_taken_long():
            self.show(
                f"reading the prompt: {n_done} of {n_tokens} tokens{self._time_left(n_done / n_tokens)}"
            )

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

    def _has_taken_long(self) -> bool:
        return time.monotonic() - self._start_s > _PATIENCE_S

    def _time_left(self, share: float) -> str:
        if share <= 0:
            return ""
        return f", {format_duration((time.monotonic() - self._start_s) * (1 - share) / share)} left"
