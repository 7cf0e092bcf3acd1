# SPDX-License-Identifier: MIT
"""The commands of a conversation: lines that begin with a slash."""

import os
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pyhobbit.chat import settings
from pyhobbit.chat.conversation import Conversation
from pyhobbit.chat.screen import note
from pyhobbit.errors import HobbitError, did_you_mean
from pyhobbit.settings.config import format_size

_NO_TEXT = '""'
_SHORT = 60  # characters of a question
_ALIASES = {"/": "/help", "/?": "/help", "/clear": "/reset", "/bye": "/exit", "/quit": "/exit"}
_KEYS = """\
Enter sends. For a new line press Alt-Enter or end the line with \\. A space
before a slash makes it a message.
Ctrl-C stops an answer. At an empty prompt, Ctrl-C twice or Ctrl-D exits.
Up and Ctrl-R find earlier messages, Tab completes commands."""


@dataclass(frozen=True)
class _Command:
    """A command. takes: what follows the name, "" for nothing, in brackets where it may be left out."""

    takes: str
    summary: str
    run: Callable[[str], "Next | None"]


@dataclass(frozen=True)
class Next:
    """A result. leave: the end.  ask: a question in place of the last one."""

    leave: bool = False
    ask: str | None = None


class Commands:
    """Commands on a conversation."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._commands = {
            "/help": _Command("", "show this list", self._help),
            "/retry": _Command("", "answer the last question anew", self._retry),
            "/undo": _Command("", "forget the last question and its answer; Up shows it", self._undo),
            "/reset": _Command("", "forget the conversation, keep the instructions", self._reset),
            "/system": _Command("[TEXT]", 'show or replace the instructions; "" for none', self._system),
            "/think": _Command("[on|off|hide]", "show or change whether the model thinks first", self._think),
            "/save": _Command("FILE", "write the conversation to a file", self._save),
            "/load": _Command("FILE", "continue a saved conversation", self._load),
            "/stats": _Command("", "show the figures since the start", self._stats),
            "/set": _Command("[NAME VALUE ...]", "show or change settings, like /set temp 0.5", self._set),
        }

    @property
    def names(self) -> list[str]:
        return [*self._commands, "/exit"]

    @staticmethod
    def is_command(text: str) -> bool:
        """True if the text is a command and no message; a message may begin with a path."""
        return re.match(r"/([a-z]*|\?)(\s|$)", text, re.IGNORECASE) is not None

    def run(self, text: str) -> Next:
        """Runs it. Raises HobbitError."""
        name, *following = text.split(maxsplit=1)
        rest = following[0].strip() if following else ""
        name = _ALIASES.get(name.lower(), name.lower())
        if name == "/exit":
            return Next(leave=True)
        command = self._commands.get(name)
        if command is None:
            hint = did_you_mean(name, [*self.names, *_ALIASES], "/help shows them all")
            raise HobbitError(f"there is no command {name}; {hint}")
        if rest and not command.takes:
            raise HobbitError(f"{name} takes no argument")
        if not rest and command.takes and not command.takes.startswith("["):
            raise HobbitError(f"{name} needs an argument: {name} {command.takes}")
        return command.run(rest) or Next()

    def _help(self, _rest: str) -> None:
        usages = {
            f"{name} {command.takes}".strip(): command.summary for name, command in self._commands.items()
        }
        usages["/exit"] = "exit"
        width = max(map(len, usages))
        note("\n".join([*(f"{usage:{width}}  {summary}" for usage, summary in usages.items()), _KEYS]))

    def _retry(self, _rest: str) -> Next:
        return Next(ask=self._conversation.last_question())

    def _undo(self, _rest: str) -> None:
        question = textwrap.shorten(self._conversation.last_question(), _SHORT, placeholder=" ...")
        self._conversation.undo()
        note(f"forgotten: {question}")

    def _think(self, how: str) -> None:
        if how:
            self._conversation.think = how
        has_template = self._conversation.has_template
        note(f"thinking: {self._conversation.think if has_template else 'none without a chat template'}")

    def _reset(self, _rest: str) -> None:
        self._conversation.reset()
        note("the conversation is empty again")

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = None if text == _NO_TEXT else text
        note(f"instructions: {self._conversation.system or 'none'}")

    def _save(self, file: str) -> None:
        path = _path(file)
        size = self._conversation.save(path)
        beside = f", with {format_size(size)} for /load to go on at once" if size else ""
        note(f"{_count(self._conversation)} saved to {path}{beside}")

    def _load(self, file: str) -> None:
        saved = self._conversation.restore(_path(file))
        note(f"loaded {_count(self._conversation)} (made with {saved.model}) and its sampling settings")

    def _stats(self, _rest: str) -> None:
        engine = self._conversation.engine
        stats = engine.stats()
        context = f"context: {engine.n_context_tokens} of {stats.info.n_ctx} tokens"
        n_dropped = self._conversation.n_dropped
        dropped = f", the oldest {n_dropped} no longer in the context" if n_dropped else ""
        note("\n".join([stats.summary(), f"{context}, {_count(self._conversation)}{dropped}"]))

    def _set(self, text: str) -> None:
        names = settings.change(self._conversation, text) if text else ()
        note(settings.table(self._conversation, names))


def _path(file: str) -> Path:
    return Path(os.path.expanduser(file))  # noqa: PTH111 - Path's raises where there is no such user


def _count(conversation: Conversation) -> str:
    n = len(conversation.turns) // 2
    return f"{n} answer{'' if n == 1 else 's'}"
