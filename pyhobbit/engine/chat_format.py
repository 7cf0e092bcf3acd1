# SPDX-License-Identifier: MIT
"""A model's chat template and the form of its answers, by llama.cpp's own renderer and parser."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
