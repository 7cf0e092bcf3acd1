# SPDX-License-Identifier: MIT
"""Conversations without a model."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyhobbit import CacheStats, HobbitError, ModelInfo, SamplingConfig, Stats
from pyhobbit.chat.commands import Commands, Next
from pyhobbit.chat.conversation import Conversation
from pyhobbit.engine.engine import Piece
from pyhobbit.errors import ContextError
from pyhobbit.settings.config import CacheConfig, ChatConfig
from pyhobbit.settings.table import LIVE

TEMPLATE = "{{ messages }}"
THINKS = "{{ enable_thinking }}"
ALWAYS_THINKS = "<think>"
MODEL = ModelInfo(model="m.gguf", description="llama", n_ctx=512, n_threads=2, cached=True, has_experts=True)


class FakeEngine:
    """Answers with a number and keeps the prompts."""

    n_context_tokens = 7

    def __init__(self, template: str | None) -> None:
        self.chat_template = template
        self.prompts: list[object] = []
        self.asked: list[tuple[int | None, SamplingConfig]] = []
        self.thought: list[bool] = []
        self.settings = dict.fromkeys(LIVE, 0.0) | {"t1": 1.0, "t2": 1.0}

    def always_thinks(self) -> bool:
        return self.chat_template == ALWAYS_THINKS

    def n_prompt_tokens(self, prompt: object, think: bool = True) -> int:
        """A token for each character."""
        n = len(prompt) if isinstance(prompt, str) else sum(len(turn["content"]) for turn in prompt)  # type: ignore[attr-defined]
        if n > 1000:
            raise ContextError("too long")
        return n

    def generate(
        self,
        prompt: object,
        max_tokens: int | None,
        sampling: SamplingConfig,
        think: bool,
        _on_prompt: object,
        _grammar: str = "",
    ) -> Iterator[Piece]:
        self.prompts.append(prompt)
        self.asked.append((max_tokens, sampling))
        self.thought.append(think)
        if "bad" in str(prompt):
            raise HobbitError("too long")
        if "stopped" in str(prompt):
            yield Piece("", None, 0.1, "interrupted")
            return
        if think and self.chat_template in (THINKS, ALWAYS_THINKS):
            only = "endless" in str(prompt)
            yield Piece("", 1, 0.1, "length" if only else None, "hm")
            if only:
                return
        yield Piece(f"[{len(self.prompts)}", 1, 0.1)
        yield Piece("]", 2, 0.2, "stop")

    def metadata(self, _key: str) -> str | None:
        return None

    def state_mark(self, _path: Path) -> str:
        return "mark"

    def save_state(self, path: Path) -> int:
        path.write_bytes(b"state")
        return 5

    def load_state(self, path: Path) -> bool:
        self.loaded = path.read_bytes()
        return True

    def info(self) -> ModelInfo:
        t1, t2 = self.settings["t1"], self.settings["t2"]
        precision = f"t1 {t1:g}, t2 {t2:g}" if t1 < 1 else ""
        return replace(MODEL, model="/models/m.gguf", t1=t1, t2=t2, precision=precision)

    def stats(self) -> Stats:
        return Stats(self.info(), CacheStats(), 0.1, 1 << 20)

    def live(self) -> dict[str, float]:
        return self.settings

    def set(self, **settings: float) -> None:
        CacheConfig(**settings)
        if settings.get("t1", 1) < 0.1:
            raise HobbitError("no low pool")
        self.settings |= settings


def converse(template: str | None, *questions: str, **config: Any) -> tuple[Conversation, list[object]]:
    """A conversation after these questions, and the prompts that the model got."""
    fake = FakeEngine(template)
    conversation = Conversation(fake, ChatConfig(**config))  # type: ignore[arg-type]
    for question in questions:
        list(conversation.ask(question))
    return conversation, fake.prompts


def run(conversation: Conversation, line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Standard error of a command."""
    assert Commands(conversation).run(line) == Next()
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err
