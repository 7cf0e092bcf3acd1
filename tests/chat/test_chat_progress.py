# SPDX-License-Identifier: MIT
"""The line that says how far something is."""

import io
import sys

import pytest

from pyhobbit.chat import screen
from pyhobbit.chat.screen import Progress

REMOVED = "\r\033[K"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


def _terminal(monkeypatch: pytest.MonkeyPatch) -> _Terminal:
    """Takes the place of standard error; no fixture, since pytest captures it anew for the test itself."""
    opened = _Terminal()
    monkeypatch.setattr(sys, "stderr", opened)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    return opened


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(screen, "time", clock)
    return clock


def _line(terminal: _Terminal) -> str:
    """The last one, without escape sequences."""
    return terminal.getvalue().split("\r")[-1].removeprefix("\033[2m").removesuffix("\033[0m\033[K")


def test_what_takes_long_says_how_far_it_is_and_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, clock: _Clock
) -> None:
    terminal = _terminal(monkeypatch)
    with Progress() as line:
        line.reading(10, 400)
        assert terminal.getvalue() == ""
        clock.now_s += 2
        line.reading(100, 400)
        assert _line(terminal) == "reading the prompt: 100 of 400 tokens, 6 s left"
        clock.now_s += 998
        line.reading(200, 400)
        assert _line(terminal) == "reading the prompt: 200 of 400 tokens, 17 min left"
        line.reading(0, 400)
        assert _line(terminal) == "reading the prompt: 0 of 400 tokens"
        clock.now_s += 9000
        line.loading("m.gguf", 0.5)
        assert _line(terminal) == "loading m.gguf: 50%, 2.8 h left"
        assert not terminal.getvalue().endswith(REMOVED)
    assert terminal.getvalue().endswith(REMOVED)


def test_a_long_line_does_not_wrap(monkeypatch: pytest.MonkeyPatch, clock: _Clock) -> None:
    terminal = _terminal(monkeypatch)
    line = Progress()
    clock.now_s += 2
    line.loading("x" * 200, 0.5)
    assert len(_line(terminal)) < 80


def test_what_is_no_terminal_gets_nothing(monkeypatch: pytest.MonkeyPatch, clock: _Clock) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress() as line:
        clock.now_s += 9
        line.reading(1, 2)
        line.thinking(3)
    assert stream.getvalue() == ""
