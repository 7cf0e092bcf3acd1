# SPDX-License-Identifier: MIT
"""The interactive part: keys, and whole sessions on a pseudo-terminal."""

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import models
import pytest
from chat_models import write_with_template
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from pyhobbit.chat import screen
from pyhobbit.chat.terminal import Terminal

READY = "(/help shows the commands)"
ALT_ENTER = "\x1b\r"
CTRL_C = "\x03"
CTRL_D = "\x04"
UP = "\x1b[A"


# keys


def _read(keys: str, history: Path, times: int = 1) -> list[str | None]:
    with create_pipe_input() as keyboard, create_app_session(input=keyboard, output=DummyOutput()):
        keyboard.send_text(keys)
        terminal = _terminal(history)
        return [terminal.read() for _ in range(times)]


def _terminal(history: Path) -> Terminal:
    return Terminal(history, ["/set", "/stats", "/load"], "Send")


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("one\r", "one"),
        ("  indented \r", "  indented "),
        (f"one{ALT_ENTER}two\r", "one\ntwo"),
        ("one\\\rtwo\r", "one\ntwo"),
        ("a\\ b\r", "a\\ b"),
        ("\x1b[200~one\ntwo\n\x1b[201~\r", "one\ntwo\n"),
        ("größe\x7fs\r", "größs"),
        (f"dropped{CTRL_C}", ""),
        (CTRL_D, None),
        ("/st\t\r", "/stats"),
        ("/set te\t\r", "/set te"),
        ("no command\t\r", "no command"),
    ],
)
def test_keys_make_a_message(keys: str, text: str | None, tmp_path: Path) -> None:
    assert _read(keys, tmp_path / "history") == [text]


def test_only_the_second_ctrl_c_without_a_text_in_between_leaves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = f"{CTRL_C}text{CTRL_C}{CTRL_C}one\r{CTRL_C}{CTRL_C}"
    assert _read(keys, tmp_path / "history", 6) == ["", "", "", "one", "", None]
    assert capsys.readouterr().err.count("press Ctrl-C again or Ctrl-D to exit") == 3


def test_the_history_outlives_the_program_and_is_private(tmp_path: Path) -> None:
    history = tmp_path / "state" / "history"
    _read(f"one{ALT_ENTER}two\rthree\r", history, 2)
    assert history.stat().st_mode & 0o777 == 0o600
    assert _read(f"{UP}\r", history) == ["three"]
    assert _read(f"{UP}{UP}\r", history) == ["one\ntwo"]


def test_a_history_that_cannot_be_kept_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for history in (tmp_path / "file" / "history", tmp_path):
        assert _read("one\rtwo\r", history, 2) == ["one", "two"]


def test_lines_are_broken_between_words_and_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = ["16 tokens", "5.0 token/s", "memory 3.0 GiB"]
    screen.note_parts(parts)
    assert capsys.readouterr().err == "16 tokens · 5.0 token/s · memory 3.0 GiB\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("NO_COLOR", "1")
    screen.note_parts(parts)
    screen.note("a sentence that is longer than it\nand  a row")
    assert capsys.readouterr().err == (
        "16 tokens · 5.0 token/s\nmemory 3.0 GiB\na sentence that is longer\n  than it\nand  a row\n"
    )


# sessions

# Ctrl-C becomes a signal only where the terminal is the process's controlling one.
_OWN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class _Session:
    """pyhobbit chat on a pseudo-terminal."""

    def __init__(
        self,
        arguments: Sequence[object],
        folder: Path,
        term: str = "xterm",
        program: Sequence[object] = ("-m", "pyhobbit"),
    ) -> None:
        self._main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
        environment = {
            **os.environ,
            "COLUMNS": "",  # else it goes before the terminal's own width
            "XDG_STATE_HOME": str(folder),
            "TERM": term,
            "PROMPT_TOOLKIT_NO_CPR": "1",  # nobody answers where the cursor is
        }
        command = [sys.executable, "-S", "-c", _OWN_TERMINAL, sys.executable, *map(str, program), "chat"]
        self.process = subprocess.Popen(
            [*command, *map(str, arguments)],
            stdin=side,
            stdout=side,
            stderr=side,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        os.close(side)
        self.text = ""

    def expect(self, text: str, timeout_s: float = 120) -> str:
        """Reads until `text` was written; returns what came before."""
        end = time.monotonic() + timeout_s
        while text not in self.text:
            readable, _, _ = select.select([self._main], [], [], max(0.0, end - time.monotonic()))
            assert readable, f"no {text!r} in {self.text!r}"
            self.text += os.read(self._main, 4096).decode(errors="replace")
        before, self.text = self.text.split(text, 1)
        return before

    def expect_first(self, *texts: str) -> str:
        """Reads until one of the texts was written, which it returns."""
        while not (found := [text for text in texts if text in self.text]):
            readable, _, _ = select.select([self._main], [], [], 120)
            assert readable, f"none of {texts} in {self.text!r}"
            self.text += os.read(self._main, 4096).decode(errors="replace")
        first = min(found, key=self.text.index)
        self.expect(first)
        return first

    def type(self, text: str) -> None:
        os.write(self._main, text.encode())

    def tell(self, line: str) -> None:
        """Types a line when the prompt is there."""
        self.expect(READY)
        self.type(line + "\r")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._main)


@pytest.fixture(scope="module")
def chat_gguf(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with two tiers and a chat template."""
    path = tmp_path_factory.mktemp("chat") / "chat.gguf"
    write_with_template(tiny_gguf, path)
    return path


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Callable[..., _Session]]:
    opened = []

    def start(*arguments: object, term: str = "xterm", says: Sequence[str] = ()) -> _Session:
        """says: what the model answers, in place of what it would."""
        program = (Path(__file__).with_name("scripted.py"), json.dumps(says)) if says else ("-m", "pyhobbit")
        opened.append(_Session([*arguments, "--temp", "0", "--threads", "1"], tmp_path, term, program))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_a_session_from_the_first_message_to_the_last(
    session: Callable[..., _Session], chat_gguf: Path, tmp_path: Path
) -> None:
    chat = session(chat_gguf, "--pools", "8M", "--set", "t1=0.6", "--set", "t2=0.9", "-n", "8")
    opening = chat.expect("t1 0.6, t2 0.9")
    assert "chat.gguf" in opening
    assert "no chat template" not in opening
    chat.tell("write a function")
    figures = chat.expect("of 512")
    for part in ("8 tokens (max_tokens)", "token/s", "% high", "% from memory, ", "/token from disk"):
        assert part in figures
    chat.tell("/hlep")
    chat.expect("did you mean /help?")
    chat.tell("/set t1 0.4 t2 0.8")
    chat.expect("Low tier from t1 to t2")
    chat.tell("/set t1 3")
    chat.expect("between 0 and 1")
    chat.tell("/save chat.json")
    chat.expect("1 answer saved to chat.json")
    chat.tell("/reset")
    chat.tell("/load chat.json")
    chat.expect("loaded 1 answer (made with")
    chat.tell("word " * 600)
    chat.expect("more than the context of 512 tokens can hold; shorten it, or start over with /reset")
    chat.tell("another")
    chat.expect("8 tokens")
    chat.tell("/bye")
    chat.expect("16 generated tokens")
    assert chat.process.wait(timeout=60) == 0
    messages = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert messages[0]["content"] == "write a function"
    assert "write a function" in (tmp_path / "pyhobbit" / "history").read_text()


def test_ctrl_c_stops_the_answer_and_twice_at_the_prompt_leaves(
    session: Callable[..., _Session], chat_gguf: Path
) -> None:
    chat = session(chat_gguf, "--pools", "3M")
    stopped = at_the_prompt = "press Ctrl-C again"
    for _ in range(5):  # until it comes before the answer's end
        chat.tell("write a function")
        chat.expect("…")
        chat.expect("\r\x1b[K")  # the first text is there
        chat.type(CTRL_C)
        stopped = chat.expect_first("(interrupted)", at_the_prompt)
        if stopped != at_the_prompt:
            break
        chat.tell("/reset")
    assert stopped == "(interrupted)"
    chat.expect(READY)
    chat.type(CTRL_C)
    chat.expect("press Ctrl-C again")
    chat.expect(READY)
    chat.type(CTRL_C)
    chat.expect("generated token")
    assert chat.process.wait(timeout=60) == 0


def test_the_last_question_is_retried_edited_and_undone(
    session: Callable[..., _Session], chat_gguf: Path, tmp_path: Path
) -> None:
    chat = session(chat_gguf, "--pools", "8M", says=["first", "second", "third", "fourth"])
    chat.tell("one")
    chat.expect("first")
    chat.tell("two")
    chat.expect("second")
    chat.tell("/retry")
    chat.expect("third")
    chat.tell("/save retried.json")
    chat.expect("2 answers saved")
    chat.tell("/undo")
    chat.expect("forgotten: two")
    chat.tell("/save undone.json")
    chat.expect("1 answer saved")
    for name, contents in (("retried", ["one", "first", "two", "third"]), ("undone", ["one", "first"])):
        messages = json.loads((tmp_path / f"{name}.json").read_text())["messages"]
        assert [message["content"] for message in messages] == contents


def test_what_is_typed_while_an_answer_comes_shows_afterwards(
    session: Callable[..., _Session], chat_gguf: Path
) -> None:
    chat = session(chat_gguf, "--pools", "8M", says=["x = 1\n" * 60])
    chat.tell("count")
    chat.expect("x = 1")
    chat.type("/undo")
    assert "/undo" not in chat.expect("context ")
    chat.expect("/undo")
    chat.type("\r")
    chat.expect("forgotten: count")


@pytest.mark.parametrize(
    ("pasted", "shows"),
    [
        ("def f():\r    return 1\rprint(f())\r", "print(f())"),
        ("\x1b[200~a\rb\rlast\x1b[201~", "last"),
        ("x" * 10_000 + "end", "xend"),
    ],
)
def test_what_is_pasted_during_an_answer_is_one_draft(
    session: Callable[..., _Session], chat_gguf: Path, pasted: str, shows: str
) -> None:
    chat = session(chat_gguf, "--pools", "8M", says=["x = 1\n" * 60, "y"])
    chat.tell("count")
    chat.expect("x = 1")
    chat.type(pasted)
    chat.expect("context ")
    chat.expect(shows)
    with pytest.raises(AssertionError):
        chat.expect("context ", timeout_s=3)  # nothing is asked by itself


QWEN3 = models.ROOT / "vendor/llama.cpp/models/templates/Qwen-Qwen3-0.6B.jinja"
THOUGHT = "<think>\nIt wants a loop.\n</think>\n\nfor x in y:"


@pytest.fixture(scope="module")
def thinking_gguf(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("thinking") / "qwen3.gguf"
    write_with_template(tiny_gguf, path, QWEN3.read_text(encoding="utf-8"))
    return path


def test_thoughts_are_dimmed_hidden_or_off(session: Callable[..., _Session], thinking_gguf: Path) -> None:
    chat = session(thinking_gguf, "--pools", "8M", says=[THOUGHT, THOUGHT, "pass"])
    chat.tell("write")
    chat.expect("\x1b[2m")
    shown = chat.expect("for x in y:")
    assert "It wants a loop." in shown
    assert shown.endswith("loop.\r\n\x1b[0m\r\n")
    assert "think>" not in shown
    chat.tell("/think hide")
    chat.tell("write")
    chat.expect("thinking: ")
    hidden = chat.expect("for x in y:")
    assert "It wants" not in hidden
    assert "thought for " in hidden
    chat.tell("/think off")
    chat.tell("write")
    assert "thought" not in chat.expect("pass")
    chat.tell("/stats")
    chat.expect("3 answers")


def test_thoughts_do_not_go_where_the_answer_goes(thinking_gguf: Path, tmp_path: Path) -> None:
    def run(*options: str) -> "subprocess.CompletedProcess[str]":
        script = [sys.executable, Path(__file__).with_name("scripted.py"), json.dumps([THOUGHT])]
        command = [*script, "chat", thinking_gguf, "--pools", "8M", "-p", "write", *options]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)

    shown, quiet = run(), run("-q")
    assert shown.stdout == quiet.stdout == "for x in y:\n"
    assert "It wants a loop." in shown.stderr
    assert "peak memory" in shown.stderr
    assert quiet.stderr == ""
    assert run("-q", "--think", "on").stderr.strip() == "It wants a loop."


def test_a_long_prompt_and_a_full_context_are_told(session: Callable[..., _Session], chat_gguf: Path) -> None:
    chat = session(chat_gguf, "--pools", "8M", says=["one", "two", "three"])
    for answer in ("one", "two"):
        chat.tell("word " * 150)
        chat.expect(answer)
    chat.expect("the context is full: the model no longer sees the first answer")
    chat.tell("hello")
    chat.expect("three")
    assert "full" not in chat.expect(READY)


def test_ctrl_d_leaves(session: Callable[..., _Session], tiny_gguf: Path) -> None:
    chat = session(tiny_gguf, "--pools", "8M")
    chat.expect("no chat template: it continues the text that you type")
    assert "Type a text to continue" in chat.expect(READY)
    chat.type(CTRL_D)
    chat.expect("generated token")
    assert chat.process.wait(timeout=60) == 0


def test_a_dumb_terminal_gets_plain_text(session: Callable[..., _Session], tiny_gguf: Path) -> None:
    chat = session(tiny_gguf, "--pools", "8M", "-n", "4", term="dumb")
    text = chat.expect("> ")
    chat.type("import os\r")
    text += chat.expect("4 tokens (max_tokens)")
    text += chat.expect("> ")
    chat.type("/exit\r")
    text += chat.expect("generated token")
    assert chat.process.wait(timeout=60) == 0
    assert "\x1b[2m" not in text
    assert "…" not in text


def test_a_model_cannot_write_control_characters_to_the_terminal(
    session: Callable[..., _Session], tmp_path: Path
) -> None:
    """The byte vocabulary and random weights of this model bring any byte."""
    path = tmp_path / "bytes.gguf"
    models.write_dense_llama(path)
    arguments = ("--temp", "9", "--seed", "1", "--top-k", "0", "--min-p", "0", "--top-p", "1")
    piped = subprocess.run(
        [sys.executable, "-m", "pyhobbit", "chat", path, "-p", "a", *arguments],
        capture_output=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert piped.returncode == 0, piped.stderr
    assert any(byte < 32 and byte != 10 for byte in piped.stdout)
    chat = session(path, "-p", "a", *arguments, term="dumb")
    chat.expect("continues the text that you type")
    text = chat.expect("pyhobbit: the context is full")
    assert not set(text) & {chr(code) for code in range(32) if chr(code) not in "\r\n\t"}


def test_what_is_no_terminal_gets_the_answers_alone(chat_gguf: Path, tmp_path: Path) -> None:
    main, side = pty.openpty()
    command = [sys.executable, "-m", "pyhobbit", "chat", chat_gguf, "--pools", "8M", "--temp", "0", "-n", "8"]
    environment = {
        **os.environ,
        "XDG_STATE_HOME": str(tmp_path),
        "TERM": "xterm",
        "PROMPT_TOOLKIT_NO_CPR": "1",
    }
    with subprocess.Popen(
        command, stdin=side, stdout=subprocess.PIPE, stderr=side, cwd=tmp_path, env=environment
    ) as process:
        os.close(side)
        os.write(main, b"write a function\r/stats\r/exit\r")
        seen = b""
        while b"generated token" not in seen:
            seen += os.read(main, 4096)
        assert process.stdout is not None
        text = process.stdout.read().decode()
        assert process.wait(timeout=60) == 0
    os.close(main)
    once = subprocess.run(
        [*command, "-p", "write a function"], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert once.stdout == text


def test_a_hang_up_ends_the_program(session: Callable[..., _Session], tiny_gguf: Path) -> None:
    chat = session(tiny_gguf, "--pools", "8M")
    chat.expect(READY)
    chat.process.send_signal(signal.SIGHUP)
    assert chat.process.wait(timeout=60) == -signal.SIGHUP
