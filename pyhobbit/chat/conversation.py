# SPDX-License-Identifier: MIT
"""What was said, and how the next answer is drawn."""

from collections.abc import Iterator, Sequence

from pyhobbit.chat.saved import SavedChat
from pyhobbit.engine.engine import Engine, Message, Piece
from pyhobbit.errors import HobbitError
from pyhobbit.settings.config import ChatConfig


class Conversation:
    """Questions and answers so far; it goes on after each answer, an interrupted one too.

    Without a chat template they are one text, which the model continues.  sampling, max_tokens: for the
    next answer; ChatConfig.no_limit lets it end by itself.
    """

    def __init__(self, engine: Engine, config: ChatConfig) -> None:
        self.engine = engine
        self.has_template = engine.chat_template is not None
        self.sampling = config.sampling
        self.max_tokens = config.max_tokens if config.max_tokens is not None else self._default_max_tokens()
        self.turns: list[Message] = []
        self._system: str | None = None
        self.system = config.system

    @property
    def system(self) -> str | None:
        """The instructions. Setting them raises HobbitError where the model cannot take any."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        if text is not None and not self.has_template:
            raise HobbitError(
                "the model has no chat template for instructions (--system); put them into the prompt"
            )
        self._system = text

    def reset(self) -> None:
        """Begins anew, with the same instructions."""
        self.turns = []

    def ask(self, text: str) -> Iterator[Piece]:
        """Yields the answer. A question that fails, or is interrupted before its answer, is forgotten."""
        turns = [*self.turns, {"role": "user", "content": text}]
        answer = ""
        finish = None
        limit = None if self.max_tokens == ChatConfig.no_limit else self.max_tokens
        for piece in self.engine.generate(self._prompt(turns), limit, self.sampling):
            answer += piece.text
            finish = piece.finish
            yield piece
        if answer or finish != "interrupted":
            self.turns = [*turns, {"role": "assistant", "content": answer}]

    def saved(self, model: str) -> SavedChat:
        """What a file holds of it."""
        return SavedChat(model, self._system, tuple(self.turns), self.sampling, self.max_tokens)

    def restore(self, saved: SavedChat) -> None:
        """Goes on where it was saved. Raises HobbitError, and then changes nothing."""
        self.system = saved.system
        self.turns = list(saved.turns)
        self.sampling, self.max_tokens = saved.sampling, saved.max_tokens

    def _prompt(self, turns: Sequence[Message]) -> str | list[Message]:
        if not self.has_template:
            return "".join(turn["content"] for turn in turns)
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, *turns]

    def _default_max_tokens(self) -> int:
        return ChatConfig.no_limit if self.has_template else ChatConfig.completion_tokens
