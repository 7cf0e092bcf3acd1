# SPDX-License-Identifier: MIT
"""The screen that a user of chat sees, in a real terminal emulator, tmux."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_models import write_with_template

COLUMNS, LINES = 80, 60
TIMEOUT_S = 120
PLACEHOLDER = "> Send a message (/help shows the commands)"


class _Screen:
    """A program in a window of tmux."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self._tmux = ("tmux", "-u", "-S", str(folder / "tmux"), "-f", "/dev/null")
        size = ("-x", str(COLUMNS), "-y", str(LINES))
        environment = {**os.environ, "XDG_STATE_HOME": str(folder)}
        line = f"cd {shlex.quote(str(folder))}; {shlex.join(command)}; cat"
        subprocess.run([*self._tmux, "new-session", "-d", *size, line], check=True, env=environment)

    def lines(self) -> list[str]:
        """Text on the screen, without blanks at the ends of lines and of the screen."""
        done = subprocess.run([*self._tmux, "capture-pane", "-p"], check=True, capture_output=True, text=True)
        return [line.rstrip() for line in done.stdout.rstrip().split("\n")]

    def wait_for(self, text: str, line: int = -1) -> list[str]:
        """The lines, when this one of them begins with the text."""
        end = time.monotonic() + TIMEOUT_S
        while time.monotonic() < end:
            lines = self.lines()
            if "".join(lines[line:][:1]).startswith(text):
                return lines
            time.sleep(0.1)
        pytest.fail(f"no {text!r} in line {line} of:\n" + "\n".join(lines))

    def type(self, *keys: str) -> None:
        """Text, or tmux's names of keys."""
        subprocess.run([*self._tmux, "send-keys", *keys], check=True)

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=True)


@pytest.fixture
def screen(tiny_gguf: Path, tmp_path: Path) -> Iterator[_Screen]:
    write_with_template(tiny_gguf, tmp_path / "chat.gguf")
    options = ["--pools", "8M", "--set", "t1=0.6", "--set", "t2=0.9", "--temp", "0", "-n", "12"]
    opened = _Screen(tmp_path, [sys.executable, "-m", "pyhobbit", "chat", "chat.gguf", *options])
    yield opened
    opened.close()


def test_the_screen_of_a_session(screen: _Screen) -> None:
    opening = screen.wait_for(PLACEHOLDER)
    assert any(line.startswith("chat.gguf · ") for line in opening[:4])  # below the line about the GPU
    assert opening[-2].endswith("t1 0.6, t2 0.9")

    screen.type("def add(a, b):", "M-Enter", "    return", "Enter")
    asked = len(opening) - 1
    screen.wait_for("> def add", asked)
    lines = screen.wait_for(PLACEHOLDER)
    assert lines[asked : asked + 2] == ["> def add(a, b):", "      return"]
    status = next(i for i, line in enumerate(lines) if line.startswith("12 tokens (max_tokens) · "))
    answer = "".join(lines[asked + 2 : status])
    assert len(answer) > 12
    assert "…" not in answer
    figures = " ".join(lines[status:-2])
    for name in ("token/s", "experts", "from memory", "/token from disk", "context"):
        assert name in figures
    assert all(not line.endswith("·") for line in lines)
    assert lines[-2] == ""

    screen.type("/hel", "Tab", "Enter")
    screen.wait_for("> /help", len(lines) - 1)
    lines = screen.wait_for(PLACEHOLDER)
    assert "/set [NAME VALUE ...]  show or change settings, like /set temp 0.5" in lines
    assert lines[-2].endswith("Tab completes commands.")

    screen.type("C-d")
    lines = screen.wait_for("18 prompt + 12 generated tokens", len(lines))
    assert PLACEHOLDER not in lines
