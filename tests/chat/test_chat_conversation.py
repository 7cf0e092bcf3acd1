# SPDX-License-Identifier: MIT
"""Conversations, their settings, commands and files, without a model."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyhobbit import CacheStats, ConfigError, HobbitError, ModelInfo, SamplingConfig, Stats
from pyhobbit.chat import settings
from pyhobbit.chat.commands import Commands, Next
from pyhobbit.chat.conversation import Conversation
from pyhobbit.chat.saved import SavedChat, read_chat
from pyhobbit.chat.status import answer_figures
from pyhobbit.engine.engine import Piece
from pyhobbit.errors import ContextError
from pyhobbit.model.options_file import read_options
from pyhobbit.settings.config import CacheConfig, ChatConfig

TEMPLATE = "{{ messages }}"
THINKS = "{{ enable_thinking }}"
ALWAYS_THINKS = "<think>"
MODEL = ModelInfo(model="m.gguf", description="llama", n_ctx=512, n_threads=2, cached=True, has_experts=True)


class _FakeEngine:
    """Answers with a number and keeps the prompts."""

    n_context_tokens = 7

    def __init__(self, template: str | None) -> None:
        self.chat_template = template
        self.prompts: list[object] = []
        self.asked: list[tuple[int | None, SamplingConfig]] = []
        self.thought: list[bool] = []
        self.thresholds = (1.0, 1.0)
        self.confidence = 0.0

    def thinks(self) -> bool:
        return self.chat_template in (THINKS, ALWAYS_THINKS)

    def can_skip_thinking(self) -> bool:
        return self.chat_template == THINKS

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
    ) -> Iterator[Piece]:
        self.prompts.append(prompt)
        self.asked.append((max_tokens, sampling))
        self.thought.append(think)
        if "bad" in str(prompt):
            raise HobbitError("too long")
        if "stopped" in str(prompt):
            yield Piece("", None, 0.1, "interrupted")
            return
        if self.thinks() and think:
            only = "endless" in str(prompt)
            yield Piece("", 1, 0.1, "length" if only else None, "hm")
            if only:
                return
        yield Piece(f"[{len(self.prompts)}", 1, 0.1)
        yield Piece("]", 2, 0.2, "stop")

    def info(self) -> ModelInfo:
        t1, t2 = self.thresholds
        return replace(MODEL, model="/models/m.gguf", t1=t1, t2=t2, confidence=self.confidence)

    def stats(self) -> Stats:
        return Stats(self.info(), CacheStats(), 0.1, 1 << 20)

    def set_confidence(self, confidence: float) -> None:
        CacheConfig(confidence=confidence)
        self.confidence = confidence

    def set_thresholds(self, t1: float, t2: float) -> None:
        CacheConfig(t1=t1, t2=t2)
        if t1 < 0.1:
            raise HobbitError("no low pool")
        self.thresholds = (t1, t2)


def _converse(template: str | None, *questions: str, **config: Any) -> tuple[Conversation, list[object]]:
    fake = _FakeEngine(template)
    conversation = Conversation(fake, ChatConfig(**config))  # type: ignore[arg-type]
    for question in questions:
        list(conversation.ask(question))
    return conversation, fake.prompts


def test_a_conversation_remembers_both_sides() -> None:
    _, prompts = _converse(TEMPLATE, "one", "two", system="be kind")
    assert prompts[1] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "[1]"},
        {"role": "user", "content": "two"},
    ]


def test_without_a_template_a_conversation_is_one_text() -> None:
    _, prompts = _converse(None, "one", "two")
    assert prompts == ["one", "one[1]two"]


def test_a_question_that_failed_or_never_got_an_answer_is_forgotten_and_reset_forgets_all() -> None:
    conversation, prompts = _converse(None, "one", "stopped")
    with pytest.raises(HobbitError, match="too long"):
        list(conversation.ask("bad"))
    list(conversation.ask("two"))
    assert prompts[-1] == "one[1]two"
    conversation.reset()
    list(conversation.ask("three"))
    assert prompts[-1] == "three"


@pytest.mark.parametrize(
    ("template", "given", "limit"),
    [(TEMPLATE, None, None), (None, None, 512), (None, -1, None), (TEMPLATE, 7, 7), (None, 7, 7)],
)
def test_only_a_model_without_a_template_has_a_limit_by_itself(
    template: str | None, given: int | None, limit: int | None
) -> None:
    conversation, _ = _converse(template, "one", max_tokens=given)
    assert conversation.engine.asked[0][0] == limit


def _contents(conversation: Conversation) -> list[str]:
    return [turn["content"] for turn in conversation.turns]


def test_a_question_can_be_asked_anew_in_place_of_the_last() -> None:
    conversation, prompts = _converse(TEMPLATE, "one", "two")
    list(conversation.ask("too", replaces_last=True))
    assert [turn["content"] for turn in prompts[-1]] == ["one", "[1]", "too"]  # type: ignore[attr-defined]
    assert _contents(conversation) == ["one", "[1]", "too", "[3]"]
    list(conversation.ask("stopped", replaces_last=True))
    assert _contents(conversation) == ["one", "[1]", "too", "[3]"]


def test_a_full_context_drops_the_oldest_answers_until_half_of_it_is_free() -> None:
    """The fake's context holds 512 characters, a quarter of them for the answer."""
    conversation, prompts = _converse(TEMPLATE, "a" * 120, "b" * 120, "c" * 120, system="be kind")
    assert conversation.n_dropped == 0
    list(conversation.ask("d" * 60))
    assert conversation.n_dropped == 2
    seen = [turn["content"][0] for turn in prompts[-1]]  # type: ignore[attr-defined]
    assert seen == ["b", "c", "[", "d"]  # the instructions, then the third answer
    assert len(conversation.turns) == 8
    conversation.undo()
    conversation.undo()
    conversation.undo()
    assert (conversation.n_dropped, len(conversation.turns)) == (1, 2)


def test_a_question_that_is_too_long_by_itself_is_not_answered() -> None:
    conversation, _ = _converse(TEMPLATE, "one")
    with pytest.raises(HobbitError, match="too long"):
        list(conversation.ask("bad" * 500))
    assert _contents(conversation) == ["one", "[1]"]


def test_what_the_model_thinks_is_no_part_of_the_conversation() -> None:
    conversation, prompts = _converse(THINKS, "one")
    pieces = list(conversation.ask("two"))
    assert pieces[0].thinking == "hm"
    assert "hm" not in str(prompts)
    list(conversation.ask("endless"))
    assert _contents(conversation) == ["one", "[1]", "two", "[2]"]


def test_thinking_can_be_switched_off_where_the_template_has_a_switch() -> None:
    conversation, _ = _converse(THINKS, "one", think="off")
    conversation.think = "hide"
    list(conversation.ask("two"))
    assert conversation.engine.thought == [False, True]
    _converse(TEMPLATE, think="off")
    _converse(None, think="off")
    with pytest.raises(HobbitError, match="this model always thinks"):
        _converse(ALWAYS_THINKS, think="off")
    with pytest.raises(ConfigError, match="choose one of on, off, hide"):
        ChatConfig(think="maybe")


# commands


def _run(conversation: Conversation, line: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert Commands(conversation).run(line) == Next()
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_help_names_every_command_and_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    conversation, _ = _converse(TEMPLATE)
    lines = _run(conversation, "/help", capsys).splitlines()
    for name in Commands(conversation).names:
        assert any(line.split()[0] == name for line in lines)
    assert "Alt-Enter" in "".join(lines)
    assert len(lines) < 24
    assert max(map(len, lines)) < 80


@pytest.mark.parametrize("line", ["/exit", "/bye", "/quit", "/EXIT "])
def test_some_commands_leave(line: str) -> None:
    assert Commands.is_command(line)
    assert Commands(_converse(TEMPLATE)[0]).run(line).leave


def test_the_last_question_can_be_taken_back_retried_or_edited(capsys: pytest.CaptureFixture[str]) -> None:
    conversation, _ = _converse(TEMPLATE, "one", "two\nlines")
    assert Commands(conversation).run("/retry") == Next(ask="two\nlines")
    assert Commands(conversation).run("/edit") == Next(draft="two\nlines")
    assert len(conversation.turns) == 4
    assert _run(conversation, "/undo", capsys) == "forgotten: two lines\n"
    assert _contents(conversation) == ["one", "[1]"]
    _run(conversation, "/undo", capsys)
    for line in ("/undo", "/retry", "/edit"):
        with pytest.raises(HobbitError, match="there is no question yet"):
            Commands(conversation).run(line)


def test_thinking_is_shown_and_changed(capsys: pytest.CaptureFixture[str]) -> None:
    conversation, _ = _converse(THINKS)
    assert _run(conversation, "/think", capsys) == "thinking: on\n"
    assert _run(conversation, "/think off", capsys) == "thinking: off\n"
    with pytest.raises(HobbitError, match="choose one of on, off, hide"):
        Commands(conversation).run("/think maybe")
    assert conversation.think == "off"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/hlep", "did you mean /help?"),
        ("/cler", "did you mean /clear?"),
        ("/xyzzy", "/help shows them all"),
        ("/load", "needs an argument: /load FILE"),
        ("/save", "no setting was changed; /set changes some"),
        ("/reset all", "takes no argument"),
        ("/load nowhere.json", "nowhere.json cannot be read: No such file or directory"),
        ("/save /nowhere/at/all.json", "cannot be written to /nowhere/at/all.json: No such file"),
        ("/load ~nosuchuser/a.json", "~nosuchuser/a.json cannot be read"),
        ("/save ~nosuchuser/a.json", "cannot be written to ~nosuchuser/a.json"),
        ("/save a\0b", "null byte"),
        (f"/save {'x' * 300}", "File name too long"),
        ("/set tmep 1", "did you mean temp?"),
        ("/set xyzzy 1", "choose one of temp, top_k"),
        ("/set temp", "temp needs a value: /set temp VALUE"),
        ("/set temp warm", "temp cannot be warm; give a number"),
        ("/set top_k 1.5", "top_k cannot be 1.5; give a whole number"),
        ("/set temp -1", "temp is -1.0; it must be 0 (greedy) or more"),
        ("/set temp nan", "temp is nan"),
        ("/set top_p 2", "top_p is 2.0; it must lie between 0 and 1"),
        ("/set top_k -1", "top_k is -1"),
        ("/set repeat_penalty 0", "repeat_penalty is 0.0"),
        ("/set seed -2", "seed must lie between"),
        ("/set max_tokens 0", "max_tokens is 0; it must be positive, or -1 for no limit"),
        ("/set t1 0.9 t2 0.5", "make t1 <= t2"),
        ("/set t1 2", "between 0 and 1"),
    ],
)
def test_a_wrong_command_says_what_would_be_right_and_changes_nothing(line: str, message: str) -> None:
    conversation, _ = _converse(TEMPLATE, "one")
    before = (list(conversation.turns), conversation.sampling, conversation.max_tokens)
    with pytest.raises(HobbitError) as error:
        Commands(conversation).run(line)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert (conversation.turns, conversation.sampling, conversation.max_tokens) == before
    assert conversation.engine.thresholds == (1.0, 1.0)


@pytest.mark.parametrize("text", ["/etc/passwd is what?", " /reset", "1/2", "hello", "/usr", "/r2d2"])
def test_a_message_may_hold_a_slash(text: str) -> None:
    assert Commands.is_command(text) == (text == "/usr")


def test_settings_are_set_together_or_not_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    conversation, _ = _converse(TEMPLATE)
    table = _run(
        conversation, "/set temp 0.5 top_k=3 max_tokens 9 seed 5 t1 0.5 t2 0.9 confidence 0.7", capsys
    )
    assert conversation.sampling == SamplingConfig(temp=0.5, top_k=3, seed=5)
    assert conversation.max_tokens == 9
    assert conversation.engine.thresholds == (0.5, 0.9)
    rows = {line.split()[0]: line.split()[1] for line in table.splitlines()}
    assert rows["temp"] == "0.5"
    assert (rows["max_tokens"], rows["t1"], rows["t2"]) == ("9", "0.5", "0.9")
    assert rows["confidence"] == "0.7"
    with pytest.raises(HobbitError, match="no low pool"):
        settings.change(conversation, "temp 1 t1 0.05")
    assert conversation.sampling.temp == 0.5
    _run(conversation, "/set parameter temperature 0.25", capsys)
    _run(conversation, "/set seed random", capsys)
    assert conversation.sampling == SamplingConfig(temp=0.25, top_k=3)
    list(conversation.ask("one"))
    assert conversation.engine.asked == [(9, SamplingConfig(temp=0.25, top_k=3))]


def test_t2_alone_takes_t1_along_where_everything_was_in_high_precision() -> None:
    conversation, _ = _converse(TEMPLATE)
    settings.change(conversation, "t2 0.9")
    assert conversation.engine.thresholds == (0.9, 0.9)
    settings.change(conversation, "t1 0.5")
    settings.change(conversation, "t2 0.7")
    assert conversation.engine.thresholds == (0.5, 0.7)


def test_instructions_are_shown_replaced_and_removed(capsys: pytest.CaptureFixture[str]) -> None:
    conversation, _ = _converse(TEMPLATE, "one", system="be kind")
    assert "be kind" in _run(conversation, "/system", capsys)
    _run(conversation, "/system be\nbrief", capsys)
    _run(conversation, "/reset", capsys)
    list(conversation.ask("two"))
    assert conversation.engine.prompts[-1][0] == {"role": "system", "content": "be\nbrief"}
    assert "none" in _run(conversation, '/system ""', capsys)
    assert conversation.system is None
    plain, _ = _converse(None)
    with pytest.raises(HobbitError, match="no chat template"):
        Commands(plain).run("/system be kind")


def test_statistics_tell_how_full_the_context_is(capsys: pytest.CaptureFixture[str]) -> None:
    conversation, _ = _converse(TEMPLATE, "one")
    assert "7 of 512 tokens, 1 answer" in _run(conversation, "/stats", capsys)


# files


def test_settings_that_were_changed_are_kept_for_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "m.gguf"
    monkeypatch.setattr(_FakeEngine, "info", lambda self: replace(MODEL, model=str(model), t1=0.5, t2=0.9))
    conversation, _ = _converse(THINKS, sampling=SamplingConfig(top_k=7))
    commands = Commands(conversation)
    commands.run("/set temp 0.5 max_tokens 9")
    commands.run("/think hide")
    commands.run("/system be kind")
    commands.run("/save")
    assert f"{tmp_path / 'm.toml'} keeps temp, max_tokens, system, think for this" in capsys.readouterr().err
    assert read_options(model) == {"temp": 0.5, "max_tokens": 9, "system": "be kind", "think": "hide"}
    with pytest.raises(HobbitError, match="no setting was changed"):
        commands.run("/save")
    commands.run('/system ""')
    commands.run("/save")
    assert read_options(model) == {"temp": 0.5, "max_tokens": 9, "think": "hide"}


def test_a_saved_conversation_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my chat.json"
    first, _ = _converse(
        TEMPLATE, "größe \udc80", "two", system="be kind", sampling=SamplingConfig(temp=0.3, seed=4)
    )
    assert "2 answers saved" in _run(first, f"/save {path}", capsys)
    second, prompts = _converse(TEMPLATE, "other")
    assert "loaded 2 answers (made with /models/m.gguf" in _run(second, f"/load {path}", capsys)
    assert (second.turns, second.system, second.sampling) == (first.turns, "be kind", first.sampling)
    assert second.max_tokens == ChatConfig.no_limit
    list(second.ask("three"))
    assert len(prompts[-1]) == 6
    assert _run(second, f"/save {path}", capsys)
    assert len(read_chat(path).turns) == 6
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


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
        (_saved_text(sampling={"temp": "hot"}), "'temp' has the wrong type"),
        (_saved_text(sampling={"temp": -1}), "temp is -1"),
        (_saved_text(sampling={"top_k": 1.5}), "'top_k' has the wrong type"),
        (_saved_text(sampling={"temp": True}), "'temp' has the wrong type"),
        (_saved_text(sampling={"temp": 10**400}), "damaged conversation"),
        (_saved_text(messages=[{"role": "user", "content": "\ud800"}]), "surrogates not allowed"),
        (_saved_text(sampling={"tmep": 1}), "unknown setting 'tmep'"),
        (_saved_text(max_tokens=0), "-n is 0"),
        (_saved_text(max_tokens=None), "'max_tokens' has the wrong type"),
    ],
)
def test_a_damaged_file_is_one_sentence_and_changes_nothing(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    path.write_text(text)
    conversation, _ = _converse(TEMPLATE, "one")
    turns = list(conversation.turns)
    with pytest.raises(HobbitError) as error:
        Commands(conversation).run(f"/load {path}")
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert conversation.turns == turns


def test_instructions_of_a_file_need_a_template(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    first, _ = _converse(TEMPLATE, "one", system="be kind")
    first.saved("m.gguf").write(path)
    second, _ = _converse(None, "two")
    with pytest.raises(HobbitError, match="no chat template"):
        second.restore(read_chat(path))
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
    with pytest.raises(HobbitError, match=r"cannot be written to .*: No space left"):
        replace(saved, system="x").write(tmp_path / "a.json")
    assert read_chat(tmp_path / "a.json") == saved
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


# the line below an answer


def _figures(finish: Any = "stop", info: dict[str, Any] | None = None, **cache: int) -> str:
    model = replace(MODEL, **(info or {}))
    stats = Stats(
        model,
        CacheStats(**cache),
        0.1,
        3 << 30,
        answers=1,
        prompt_tokens_evaluated=4,
        generated_tokens=16,
        decoded_tokens=15,
        first_tokens_s=0.5,
        decode_s=3.0,
    )
    return " | ".join(answer_figures(stats, finish, 20))


def test_the_figures_of_an_answer_are_its_own() -> None:
    assert _figures(
        info={"memory": 8 << 30, "pool_bytes_low": 1},
        selections_high=6,
        selections_low=3,
        selections_skipped=1,
        hits_high=3,
        misses_high=1,
        bytes_read=20 << 20,
    ) == (
        "16 tokens | 5.0 token/s | first token after 0.50 s | experts 60 % high, 30 % low, 10 % skipped | "
        "hits high/low 75/- % | disk 1.0 MiB/token | context 20 of 512 | memory 3.0 GiB of 8.0 GiB"
    )


def test_second_passes_are_told() -> None:
    assert "4 tokens computed twice" in _figures(selections_high=6, tokens_repeated=4)
    assert "twice" not in _figures(selections_high=6)


def test_figures_that_were_not_measured_are_left_out() -> None:
    assert _figures("length").startswith("16 tokens (max_tokens) | ")
    model = replace(MODEL, cached=False, has_experts=False)
    nothing = Stats(model, CacheStats(), 0.1, 1 << 20)
    figures = ["0 tokens (interrupted)", "context 20 of 512", "memory 1.0 MiB"]
    assert answer_figures(nothing, "interrupted", 20) == figures
    one = replace(nothing, generated_tokens=1)
    assert answer_figures(one, "stop", 20)[0] == "1 token"


def test_sampling_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="min_p"):
        SamplingConfig(min_p=float("nan"))
