# SPDX-License-Identifier: MIT
"""Conversations in files, without a model."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import TEMPLATE, converse, run

from pyhobbit import CacheConfig, Engine, EngineConfig, HobbitError, SamplingConfig
from pyhobbit.chat.commands import Commands
from pyhobbit.chat.conversation import Conversation
from pyhobbit.chat.saved import SavedChat, read_chat
from pyhobbit.settings.config import ChatConfig


def test_a_saved_conversation_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my chat.json"
    first, _ = converse(
        TEMPLATE, "größe \udc80", "two", system="be kind", sampling=SamplingConfig(temp=0.3, seed=4)
    )
    assert "2 answers saved" in run(first, f"/save {path}", capsys)
    second, prompts = converse(TEMPLATE, "other")
    assert "loaded 2 answers (made with /models/m.gguf" in run(second, f"/load {path}", capsys)
    assert (second.turns, second.system, second.sampling) == (first.turns, "be kind", first.sampling)
    assert second.max_tokens == ChatConfig.no_limit
    list(second.ask("three"))
    assert len(prompts[-1]) == 6
    assert run(second, f"/save {path}", capsys)
    assert len(read_chat(path).turns) == 6
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [path.name, f"{path.name}.kv"]


def test_a_loaded_conversation_reads_no_token_again(tiny_gguf: Path, tmp_path: Path) -> None:
    path, question = tmp_path / "chat.json", "def read_file(path):\n    with open(path) as "
    config = EngineConfig(CacheConfig(pools=5_000_000), 256)
    sampling = SamplingConfig(temp=0)

    def opened(engine: Engine) -> Conversation:
        return Conversation(engine, ChatConfig(sampling=sampling, max_tokens=4))

    with Engine(tiny_gguf, config) as engine:
        list(opened(engine).ask("x = 1"))
        first = opened(engine)
        list(first.ask(question))
        assert first.save(path) == path.with_name("chat.json.kv").stat().st_size > 0
        answer = "".join(piece.text for piece in first.ask("\n"))
        n_tokens = engine.n_context_tokens
    with Engine(tiny_gguf, config) as engine:
        second = opened(engine)
        second.restore(path)
        assert 0 < engine.n_context_tokens < n_tokens
        assert "".join(piece.text for piece in second.ask("\n")) == answer
        assert engine.stats().prompt_tokens_evaluated < 4
    path.with_name("chat.json.kv").write_bytes(path.with_name("chat.json.kv").read_bytes()[:-100])
    others = (
        config,
        replace(config, cache_type_k="q8_0"),
        replace(config, cache=CacheConfig(pools=5_000_000, t1=0.5)),
    )
    for other in others:  # damaged, or of something else
        with Engine(tiny_gguf, other) as engine:
            second = opened(engine)
            second.restore(path)
            assert engine.n_context_tokens == 0
            list(second.ask("\n"))


def _saved_text(**changes: Any) -> str:
    values = {
        "pyhobbit_chat": 1,
        "model": "m.gguf",
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "sampling": {"temp": 1},
        "max_tokens": -1,
    }
    return json.dumps({**values, **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        (_saved_text()[:-9], "not valid JSON"),
        ("[" * 100000, "not valid JSON"),
        ("[1]", "not a saved conversation"),
        ('{"a": 1}', "not a saved conversation"),
        (_saved_text(pyhobbit_chat=2), "another version"),
        (_saved_text(messages=None), "damaged conversation: 'messages' has the wrong type"),
        (_saved_text(messages=["a"]), "damaged conversation: a message is not an object"),
        (_saved_text(messages=[{"role": "user"}]), "damaged conversation: it has no 'content'"),
        (_saved_text(messages=[{"role": "user", "content": "a"}]), "the last question has no answer"),
        (_saved_text(messages=[{"role": "assistant", "content": "a"}]), "message 1 is the assistant's"),
        (_saved_text(sampling={"temp": "hot"}), "temp is 'hot'; it must be a number"),
        (_saved_text(sampling={"temp": -1}), "temp is -1"),
        (_saved_text(sampling={"top_k": 1.5}), "top_k is 1.5; it must be a whole number"),
        (_saved_text(sampling={"temp": True}), "temp is True; it must be a number"),
        (_saved_text(sampling={"temp": None}), "temp is None; it must be a number"),
        (_saved_text(sampling={"temp": 10**400}), "damaged conversation"),
        (_saved_text(messages=[{"role": "user", "content": "\ud800"}]), "surrogates not allowed"),
        (_saved_text(sampling={"tmep": 1}), "unknown setting 'tmep'"),
        (_saved_text(max_tokens=0), "max_tokens is 0"),
        (_saved_text(max_tokens=None), "'max_tokens' has the wrong type"),
    ],
)
def test_a_damaged_file_is_one_sentence_and_changes_nothing(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    path.write_text(text)
    conversation, _ = converse(TEMPLATE, "one")
    turns = list(conversation.turns)
    with pytest.raises(HobbitError) as error:
        Commands(conversation).run(f"/load {path}")
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert conversation.turns == turns


def test_instructions_of_a_file_need_a_template(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    first, _ = converse(TEMPLATE, "one", system="be kind")
    first.save(path)
    second, _ = converse(None, "two")
    with pytest.raises(HobbitError, match="no chat template"):
        second.restore(path)
    assert [turn["content"] for turn in second.turns] == ["two", "[1]"]


def test_saving_replaces_conversations_and_nothing_else(tmp_path: Path) -> None:
    saved = SavedChat("m.gguf", None, (), SamplingConfig(), -1)
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF\xff")
    for path in (model, Path("/dev/null"), tmp_path):
        with pytest.raises(HobbitError, match="exists and is not a saved conversation"):
            saved.write(path)
    assert model.read_bytes() == b"GGUF\xff"
    saved.write(tmp_path / "a.json")
    replace(saved, system="x").write(tmp_path / "a.json")
    assert read_chat(tmp_path / "a.json").system == "x"


def test_a_circle_of_links_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(HobbitError, match="cannot be written"):
        SavedChat("m.gguf", None, (), SamplingConfig(), -1).write(tmp_path / "a")


def test_a_full_disk_leaves_the_saved_conversation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = SavedChat("m.gguf", None, (), SamplingConfig(), -1)
    saved.write(tmp_path / "a.json")

    def fail(_fd: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(HobbitError, match=r"cannot be written: No space left"):
        replace(saved, system="x").write(tmp_path / "a.json")
    assert read_chat(tmp_path / "a.json") == saved
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]
