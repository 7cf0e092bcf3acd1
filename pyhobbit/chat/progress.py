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
