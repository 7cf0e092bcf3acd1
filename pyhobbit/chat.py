# SPDX-License-Identifier: MIT
"""pyhobbit chat: answers on the terminal."""

import argparse
import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pyhobbit.cli import INTERRUPTED
from pyhobbit.config import CacheConfig, ChatConfig, EngineConfig, SamplingConfig, parse_size
from pyhobbit.errors import HobbitError

if TYPE_CHECKING:
    from pyhobbit.engine import Engine, Message, Piece
    from pyhobbit.stats import ModelInfo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the verb."""
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="GGUF file; of a split model its first file")
    add("-p", dest="prompt", metavar="TEXT", help="answer TEXT and end (default: standard input)")
    add(
        "-n",
        dest="max_tokens",
        type=int,
        metavar="N",
        help="tokens of an answer at most; -1: as the context allows",
    )
    add("--system", metavar="TEXT", help="instructions, for a model with a chat template")
    add(
        "--temp",
        type=float,
        default=SamplingConfig.temp,
        metavar="F",
        help="0: greedy (default: %(default)s)",
    )
    add("--seed", type=int, metavar="N", help="of the sampling (default: random)")
    add("--ctx", type=int, metavar="N", help="tokens of context (default: the model's, at most 4096)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--memory", metavar="SIZE", help="bound on the whole process, like 8G (default: by what is free)"
    )
    size.add_argument("--pools", metavar="SIZE", help="memory of the expert cache alone, like 512M")
    add("--t1", type=float, metavar="F", help="high precision up to this sum of higher ranked gate weights")
    add("--t2", type=float, metavar="F", help="low precision from t1 to here, above it experts are skipped")
    add("--policy", metavar="NAME", help="which expert leaves a full cache (default: calibrated, or echo)")
    add(
        "--prefetch",
        type=int,
        metavar="N",
        help="layers to look ahead, 0 to 4; 0: no prefetch (default: calibrated, or 2)",
    )
    add("--trace", type=Path, metavar="FILE", help="write the routing here, for pyhobbit simulate")
    add(
        "--sidecar",
        type=Path,
        metavar="FILE",
        help="file with further precisions (default: MODEL.hobbit.gguf)",
    )
    add("--threads", type=int, metavar="N", help="for computing (default: one per processor core)")
    add("--stats-json", type=Path, metavar="FILE", help="write counters and times here")
    add("--verbose", action="store_true", help="show llama.cpp's log on standard error")


def run(args: argparse.Namespace) -> int:
    """Runs the verb with parsed options; returns the exit status. Raises HobbitError."""
    config = ChatConfig(
        engine=EngineConfig(
            cache=CacheConfig(
                memory=None if args.memory is None else parse_size(args.memory),
                pools=None if args.pools is None else parse_size(args.pools),
                t1=args.t1,
                t2=args.t2,
                sidecar=args.sidecar,
                policy=args.policy,
                prefetch=args.prefetch,
                trace=args.trace,
            ),
            n_ctx=args.ctx,
            n_threads=args.threads,
            verbose=args.verbose,
        ),
        sampling=SamplingConfig(temp=args.temp, seed=args.seed),
        max_tokens=None if args.max_tokens == -1 else args.max_tokens,
        system=args.system,
        stats_json=args.stats_json,
    )
    if sys.stdout is None:
        raise HobbitError(
            "standard output is closed, so there is no place for the answer; open or redirect it"
        )
    prompt = args.prompt
    if prompt is None and sys.stdin is None:
        raise HobbitError("standard input is closed; give the prompt with -p")
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.buffer.read().decode("utf-8", "surrogateescape").removesuffix("\n")
    if prompt is not None and args.max_tokens is None:
        config = replace(config, max_tokens=ChatConfig.one_shot_tokens)
    return chat(args.model, config, prompt)


def chat(model: Path, config: ChatConfig, prompt: str | None = None) -> int:
    """Answers `prompt`, or what is typed on the terminal. Returns the exit status. Raises HobbitError."""
    from pyhobbit.engine import Engine  # takes the native libraries and some time

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model writes what a Latin-1 terminal cannot show
    engine = Engine(model, config.engine)
    with contextlib.ExitStack() as stack:
        with _interrupting(engine):
            stack.enter_context(engine)
        _report_opening(engine.info(), config.engine.cache)
        conversation = Conversation(engine, config)
        status = _talk(conversation) if prompt is None else _answer_once(conversation, prompt)
        stats = engine.stats()
        print(stats.summary(), file=sys.stderr)
        if config.stats_json is not None:
            stats.write_json(config.stats_json)
    return status


class Conversation:
    """What was said so far; it goes on after each answer, an interrupted one too."""

    def __init__(self, engine: "Engine", config: ChatConfig) -> None:
        self.engine = engine
        self.config = config
        self.has_template = engine.chat_template is not None
        if config.system is not None and not self.has_template:
            raise HobbitError(
                "the model has no chat template for --system; put the instructions into the prompt"
            )
        self.clear()

    def clear(self) -> None:
        """Begins anew."""
        system = self.config.system
        self._messages: list[Message] = [{"role": "system", "content": system}] if system is not None else []
        self._text = ""

    def ask(self, text: str) -> Iterator["Piece"]:
        """Yields the answer. A question that fails is forgotten."""
        messages = [*self._messages, {"role": "user", "content": text}]
        prompt = messages if self.has_template else self._text + text
        answer = []
        for piece in self.engine.generate(prompt, self.config.max_tokens, self.config.sampling):
            answer.append(piece.text)
            yield piece
        self._messages = [*messages, {"role": "assistant", "content": "".join(answer)}]
        self._text += text + "".join(answer)


def _answer_once(conversation: Conversation, prompt: str) -> int:
    with _interrupting(conversation.engine):
        finish = _print_answer(conversation.ask(prompt))
    return INTERRUPTED if finish == "interrupted" else 0


def _talk(conversation: Conversation) -> int:
    """Reads questions until /exit or the end of the input."""
    _say("/clear forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer")
    if not conversation.has_template:
        _say("the model has no chat template: it continues the text that you type")
    with _line_history():
        while (line := _read_line()) is not None:
            if line == "/exit":
                break
            if line == "/clear":
                conversation.clear()
            elif line:
                _answer_line(conversation, line)
    return 0


def _answer_line(conversation: Conversation, line: str) -> None:
    try:
        with _interrupting(conversation.engine):
            _print_answer(conversation.ask(line))
    except HobbitError as e:
        _say(f"{e}; /clear begins anew")


def _read_line() -> str | None:
    """One line, "" after Ctrl-C, None at the end of the input."""
    try:
        return input("> ").strip()
    except KeyboardInterrupt:
        print()
        return ""
    except EOFError:
        print()
        return None


def _print_answer(pieces: Iterable["Piece"]) -> str | None:
    """Streams to standard output, ended by one newline; returns why the answer ended."""
    finish = None
    last = ""
    for piece in pieces:
        sys.stdout.write(piece.text)
        sys.stdout.flush()
        last = piece.text or last
        finish = piece.finish
    if not last.endswith("\n"):
        print(flush=True)
    if finish == "context":
        _say("the context is full; a larger --ctx holds more")
    return finish


def _report_opening(info: "ModelInfo", cache: CacheConfig) -> None:
    if info.cached:
        return
    bound = "--memory" if cache.memory is not None else "--pools" if cache.pools is not None else None
    if info.has_experts:
        _say("the model fits into free memory and stays there whole; --memory or --pools would bound it")
    else:
        text = f"{info.model} is a dense model: there is nothing to offload, it runs as in stock llama.cpp"
        _say(text + (f", and {bound} does not apply to it" if bound else ""))


def _say(text: str) -> None:
    print(f"pyhobbit: {text}", file=sys.stderr)


@contextlib.contextmanager
def _interrupting(engine: "Engine") -> Iterator[None]:
    """Within it, Ctrl-C interrupts the engine and nothing else."""
    previous = signal.signal(signal.SIGINT, lambda _signal, _frame: engine.interrupt())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def _line_history() -> Iterator[None]:
    """Line editing with a history that outlives the program."""
    import readline

    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = state / "pyhobbit" / "history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        readline.set_history_length(ChatConfig.history_lines)
        with contextlib.suppress(OSError):  # a home that cannot be written loses the history, nothing else
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
