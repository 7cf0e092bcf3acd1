# SPDX-License-Identifier: MIT
"""A conversation: its messages, and the sampling of the next answer."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pyhobbit.chat.saved import SavedChat, read_chat, state_path
from pyhobbit.engine.chat_format import Message
from pyhobbit.engine.engine import Engine, Piece, Prompt
from pyhobbit.errors import ContextError, HobbitError
from pyhobbit.settings.config import ChatConfig

_LEAST_ROOM = 4  # one part of so many of the context is for the answer


class Conversation:
    """Questions and answers so far; it goes on after each answer, an interrupted one too.

    Without a chat template they are one text, which the model continues. Where the context is full, the model
    no longer sees the oldest.  sampling, max_tokens: for the next answer; ChatConfig.no_limit lets it end by
    itself.
    """

    def __init__(self, engine: Engine, config: ChatConfig) -> None:
        self.engine = engine
        self.has_template = engine.chat_template is not None
        self.chose_context = config.engine.n_ctx is None
        self.sampling = config.sampling_of(engine.metadata)
        own_limit = ChatConfig.no_limit if self.has_template else ChatConfig.completion_tokens
        self.max_tokens = own_limit if config.max_tokens is None else config.max_tokens
        self._stop, self._grammar = config.stop, config.grammar
        self.turns: list[Message] = []
        self._n_dropped = 0  # turns that the model no longer sees
        self._system: str | None = None
        self.system = config.system
        self._think = ChatConfig.think
        self.think = config.think

    @property
    def system(self) -> str | None:
        """The instructions. Setting them raises HobbitError where the model cannot take any."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        if text is not None and not self.has_template:
            raise HobbitError("the model has no chat template for instructions; put them into the prompt")
        self._system = text

    @property
    def think(self) -> str:
        """One of ChatConfig.thinks. Setting off raises HobbitError where the model always thinks."""
        return self._think

    @think.setter
    def think(self, how: str) -> None:
        if how not in ChatConfig.thinks:
            raise HobbitError(f"thinking cannot be '{how}'; choose one of {', '.join(ChatConfig.thinks)}")
        if how == "off" and self.has_template and self.engine.always_thinks():
            raise HobbitError(
                "this model always thinks, its chat template has no switch; /think hide hides its thoughts"
            )
        self._think = how

    @property
    def n_dropped(self) -> int:
        """Answers that the model no longer sees, because the context was full."""
        return self._n_dropped // 2

    def reset(self) -> None:
        """Begins anew, with the same instructions."""
        self.turns, self._n_dropped = [], 0

    def last_question(self) -> str:
        """Raises HobbitError where nothing was asked yet."""
        if not self.turns:
            raise HobbitError("there is no question yet; type one")
        return self.turns[-2]["content"]

    def undo(self) -> None:
        """Forgets the last question and its answer."""
        self.turns = self.turns[:-2]
        self._n_dropped = min(self._n_dropped, len(self.turns))

    def ask(
        self, text: str, on_prompt: Callable[[int, int], None] | None = None, replaces_last: bool = False
    ) -> Iterator[Piece]:
        """Yields the answer.  on_prompt: see Engine.generate().  replaces_last: the last question and answer.

        A question is forgotten if it fails or the model only thought. One that was interrupted before an
        answer came stays, unless it replaces another. Raises HobbitError.
        """
        before = self.turns[:-2] if replaces_last else self.turns
        turns = [*before, {"role": "user", "content": text}]
        think = self._think != "off"
        self._make_room(turns, self._limit, think)
        answer = thoughts = ""
        finish = None
        prompt = self._prompt(turns[self._n_dropped :])
        pieces = self.engine.generate(prompt, self._limit, self.sampling, think, on_prompt, self._grammar)
        for piece in _until(pieces, self._stop):
            answer += piece.text
            thoughts += piece.thinking
            finish = piece.finish
            yield piece
        if answer or (not replaces_last if finish == "interrupted" else not thoughts):
            self.turns = [*turns, {"role": "assistant", "content": answer}]

    @property
    def _limit(self) -> int | None:
        return None if self.max_tokens == ChatConfig.no_limit else self.max_tokens

    def save(self, path: Path) -> int:
        """Writes the conversation, and the KV cache beside it, whose bytes it returns. Raises HobbitError."""
        engine, model = self.engine, self.engine.info().model
        saved = SavedChat(model, self._system, tuple(self.turns), self.sampling, self.max_tokens)
        saved.write(path)
        size = engine.save_state(state := state_path(path))
        if size:
            replace(saved, state=engine.state_mark(state)).write(path)
        return size

    def restore(self, path: Path) -> SavedChat:
        """Goes on where it was saved. Raises HobbitError, and then changes nothing."""
        saved = read_chat(path)
        self.system = saved.system
        state = state_path(path)
        if saved.state and state.is_file() and saved.state == self.engine.state_mark(state):
            self.engine.load_state(state)
        self.turns, self._n_dropped = list(saved.turns), 0
        self.sampling, self.max_tokens = saved.sampling, saved.max_tokens
        return saved

    def _make_room(self, turns: Sequence[Message], limit: int | None, think: bool) -> None:
        """Drops the oldest answers of a full context until half is free: each time, the rest is read anew."""
        n_ctx = self.engine.info().n_ctx
        room = n_ctx // _LEAST_ROOM if limit is None else min(limit, n_ctx // _LEAST_ROOM)
        n_most = n_ctx - room
        while self._n_dropped < len(turns) - 1 and self._n_tokens(turns, think) > n_most:
            self._n_dropped += 2
            n_most = n_ctx // 2

    def _n_tokens(self, turns: Sequence[Message], think: bool) -> float:
        try:
            return self.engine.n_prompt_tokens(self._prompt(turns[self._n_dropped :]), think)
        except ContextError:  # too long even to be counted
            return float("inf")

    def _prompt(self, turns: Sequence[Message]) -> Prompt:
        if not self.has_template:
            return "".join(turn["content"] for turn in turns)
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, *turns]


def _until(pieces: Iterator[Piece], stop: Sequence[str]) -> Iterator[Piece]:
    """The pieces before the first of the texts in `stop`; text that may begin one of them is held back."""
    held = ""
    for piece in pieces:
        held += piece.text
        if found := [at for each in stop if (at := held.find(each)) >= 0]:
            yield replace(piece, text=held[: min(found)], finish="stop")
            return
        starts = (n for each in stop for n in range(1, len(each)) if held.endswith(each[:n]))
        n_kept = 0 if piece.finish else max(starts, default=0)
        shown, held = held[: len(held) - n_kept], held[len(held) - n_kept :]
        yield replace(piece, text=shown)
