# SPDX-License-Identifier: MIT
"""A model's chat template, by llama.cpp's own renderer and parser, and texts of an answer while it comes."""

import codecs
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pyhobbit.engine.llama import Model
from pyhobbit.errors import ComputeError, HobbitError
from pyhobbit.native.ffi import chat_library

Message = Mapping[str, Any]
"""One turn of a conversation: {"role": "system" | "user" | "assistant", "content": text}."""


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as text. preserved: control tokens that the parser needs.  stops: texts that end it."""

    text: str
    preserved: tuple[str, ...]
    stops: tuple[str, ...]
    thinks: bool


class ChatFormat:
    """A model's chat format. Not thread-safe. model: llama_model that outlives this.  template: in Jinja."""

    def __init__(self, model: Any, template: str) -> None:
        self._library = chat_library()
        self._chat = self._library.hobbit_chat_new(model, template.encode())

    def close(self) -> None:
        """Frees it; the second call does nothing."""
        chat, self._chat = self._chat, None
        if chat is not None:
            self._library.hobbit_chat_free(chat)

    def render(self, messages: Sequence[Message], think: bool = True) -> ChatPrompt:
        """The prompt of a conversation, which parse() then knows. think: if the template lets one choose."""
        turns = [{key: each[key] for key in ("role", "content")} for each in messages]
        data = json.dumps(turns, ensure_ascii=False).encode("utf-8", "surrogateescape")
        text = data.decode("utf-8", "replace").encode()  # JSON cannot carry bytes that are not UTF-8
        try:
            rendered = self._library.hobbit_chat_render(self._chat, text, think)
        except ComputeError as e:
            raise HobbitError(f"the model's chat template refuses this conversation: {_reason(e)}") from e
        values = json.loads(rendered)
        return ChatPrompt(
            values["prompt"], tuple(values["preserved_tokens"]), tuple(values["stops"]), values["thinks"]
        )

    def parse(self, answer: str, is_partial: bool) -> tuple[str, str] | None:
        """Content and thinking of an answer, as far as certain; None if it lacks the template's form."""
        try:
            values = json.loads(self._library.hobbit_chat_parse(self._chat, answer.encode(), is_partial))
        except ComputeError:
            return None
        return values["content"], values["thinking"]


def _reason(error: ComputeError) -> str:
    lines = [line.strip() for line in str(error).partition(": ")[2].splitlines() if line.strip()]
    reason = lines[-1] if lines else "it gives no reason"  # earlier lines tell the place in the template
    return reason.removeprefix("Error: ").removeprefix("Jinja Exception: ")


class Said(NamedTuple):
    """Texts that a token adds to the answer and to the thinking before it."""

    text: str = ""
    thinking: str = ""


class TextReader:
    """A continued text: all of it is the answer, but for control tokens. Starts with no token."""

    has_ended = False

    def __init__(self, model: Model) -> None:
        self._model = model
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int, is_last: bool) -> Said:
        """The text of a token. is_last: no token follows, though the model has not ended its answer."""
        return Said(self._decoder.decode(self._model.piece(token), is_last))

    def end(self, is_complete: bool) -> Said:
        """The rest of the text. is_complete: the model has ended its answer."""
        return Said(self._decoder.decode(b"", True))


class ChatReader(TextReader):
    """An answer in a conversation, which llama.cpp's parser splits. has_ended: a stop text has come."""

    def __init__(self, model: Model, form: ChatFormat, prompt: ChatPrompt) -> None:
        super().__init__(model)
        self._form = form
        self._stops = prompt.stops
        found = (model.tokenize(text, begins_text=False) for text in prompt.preserved)
        self._preserved = {tokens[0] for tokens in found if len(tokens) == 1}
        self._answer = ""
        self._said = Said()

    def add(self, token: int, is_last: bool) -> Said:
        """The text of a token. is_last: no token follows, though the model has not ended its answer."""
        piece = self._model.piece(token, is_control_shown=token in self._preserved)
        self._answer += self._decoder.decode(piece, is_last)
        ends = [end for stop in self._stops if (end := self._answer.find(stop)) >= 0]
        if ends:
            self.has_ended = True
            self._answer = self._answer[: min(ends)]
        if self.has_ended or is_last:
            return self.end(self.has_ended)
        begun = (n for stop in self._stops for n in range(1, len(stop)) if self._answer.endswith(stop[:n]))
        n_certain = len(self._answer) - max(begun, default=0)  # these do not begin a stop text
        return self._new(self._form.parse(self._answer[:n_certain], True))

    def end(self, is_complete: bool) -> Said:
        """The rest of the text. is_complete: the model has ended its answer."""
        self._answer += self._decoder.decode(b"", True)
        parsed = self._form.parse(self._answer, not is_complete)
        if not self._said.text and (parsed is None or not any(parsed)):
            parsed = self._answer, self._said.thinking
        return self._new(parsed)

    def _new(self, parsed: tuple[str, str] | None) -> Said:
        """Texts that were not returned yet. A parser that changes its mind adds nothing."""
        before, now = self._said, self._said if parsed is None else Said(*parsed)
        if now.thinking:  # some templates leave empty lines behind it
            now = now._replace(text=now.text.lstrip("\n"))
        if not all(map(str.startswith, now, before)):
            return Said()
        self._said = now
        return Said(now.text[len(before.text) :], now.thinking[len(before.thinking) :])
