# SPDX-License-Identifier: MIT
"""Conversations, their settings and commands, without a model."""

import pytest
from built import MECHANISMS
from fake_engine import ALWAYS_THINKS, TEMPLATE, THINKS, converse, run

from pyhobbit import ConfigError, HobbitError, SamplingConfig
from pyhobbit.chat import settings
from pyhobbit.chat.commands import Commands, Next
from pyhobbit.chat.conversation import Conversation, _until
from pyhobbit.engine.engine import Finish, Piece
from pyhobbit.settings.config import ChatConfig


def test_a_conversation_remembers_both_sides() -> None:
    _, prompts = converse(TEMPLATE, "one", "two", system="be kind")
    assert prompts[1] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "[1]"},
        {"role": "user", "content": "two"},
    ]


def test_without_a_template_a_conversation_is_one_text() -> None:
    _, prompts = converse(None, "one", "two")
    assert prompts == ["one", "one[1]two"]


@pytest.mark.parametrize(
    ("texts", "shown", "finish"),
    [
        (["one tw", "o three"], "one ", "stop"),
        (["one t", "wenty"], "one twenty", "length"),
        (["a tw"], "a tw", "length"),
        (["of three"], "of ", "stop"),
    ],
)
def test_an_answer_ends_before_a_text(texts: list[str], shown: str, finish: Finish) -> None:
    last = len(texts) - 1
    pieces = [Piece(text, n, 0.1, "length" if n == last else None) for n, text in enumerate(texts)]
    found = [*_until(iter(pieces), ["two", "three"])]
    assert ("".join(each.text for each in found), found[-1].finish) == (shown, finish)


def test_a_question_that_was_stopped_before_its_answer_stays() -> None:
    conversation, _ = converse(TEMPLATE, "one", "stopped")
    assert conversation.last_question() == "stopped"
    assert _contents(conversation) == ["one", "[1]", "stopped", ""]


def test_a_question_that_failed_is_forgotten_and_reset_forgets_all() -> None:
    conversation, prompts = converse(None, "one")
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
    conversation, _ = converse(template, "one", max_tokens=given)
    assert conversation.engine.asked[0][0] == limit


def _contents(conversation: Conversation) -> list[str]:
    return [turn["content"] for turn in conversation.turns]


def test_a_question_can_be_asked_anew_in_place_of_the_last() -> None:
    conversation, prompts = converse(TEMPLATE, "one", "two")
    list(conversation.ask("too", replaces_last=True))
    assert [turn["content"] for turn in prompts[-1]] == ["one", "[1]", "too"]  # type: ignore[attr-defined]
    assert _contents(conversation) == ["one", "[1]", "too", "[3]"]
    list(conversation.ask("stopped", replaces_last=True))
    assert _contents(conversation) == ["one", "[1]", "too", "[3]"]


def test_a_full_context_drops_the_oldest_answers_until_half_of_it_is_free() -> None:
    """The fake's context holds 512 characters, a quarter of them for the answer."""
    conversation, prompts = converse(TEMPLATE, "a" * 120, "b" * 120, "c" * 120, system="be kind")
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
    conversation, _ = converse(TEMPLATE, "one")
    with pytest.raises(HobbitError, match="too long"):
        list(conversation.ask("bad" * 500))
    assert _contents(conversation) == ["one", "[1]"]


def test_what_the_model_thinks_is_no_part_of_the_conversation() -> None:
    conversation, prompts = converse(THINKS, "one")
    pieces = list(conversation.ask("two"))
    assert pieces[0].thinking == "hm"
    assert "hm" not in str(prompts)
    list(conversation.ask("endless"))
    assert _contents(conversation) == ["one", "[1]", "two", "[2]"]


def test_thinking_can_be_switched_off_where_the_template_has_a_switch() -> None:
    conversation, _ = converse(THINKS, "one", think="off")
    conversation.think = "hide"
    list(conversation.ask("two"))
    assert conversation.engine.thought == [False, True]
    converse(TEMPLATE, think="off")
    converse(None, think="off")
    with pytest.raises(HobbitError, match="this model always thinks"):
        converse(ALWAYS_THINKS, think="off")
    with pytest.raises(ConfigError, match="choose one of on, off, hide"):
        ChatConfig(think="maybe")


# commands


def test_help_names_every_command_and_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    conversation, _ = converse(TEMPLATE)
    lines = run(conversation, "/help", capsys).splitlines()
    for name in Commands(conversation).names:
        assert any(line.split()[0] == name for line in lines)
    assert "Alt-Enter" in "".join(lines)
    assert len(lines) < 24
    assert max(map(len, lines)) < 80


@pytest.mark.parametrize("line", ["/exit", "/bye", "/quit", "/EXIT "])
def test_some_commands_leave(line: str) -> None:
    assert Commands.is_command(line)
    assert Commands(converse(TEMPLATE)[0]).run(line).leave


def test_the_last_question_can_be_taken_back_retried_or_edited(capsys: pytest.CaptureFixture[str]) -> None:
    conversation, _ = converse(TEMPLATE, "one", "two\nlines")
    assert Commands(conversation).run("/retry") == Next(ask="two\nlines")
    assert run(conversation, "/undo", capsys) == "forgotten: two lines\n"
    assert _contents(conversation) == ["one", "[1]"]
    run(conversation, "/undo", capsys)
    for line in ("/undo", "/retry"):
        with pytest.raises(HobbitError, match="there is no question yet"):
            Commands(conversation).run(line)


def test_thinking_is_shown_and_changed(capsys: pytest.CaptureFixture[str]) -> None:
    conversation, _ = converse(THINKS)
    assert run(conversation, "/think", capsys) == "thinking: on\n"
    assert run(conversation, "/think off", capsys) == "thinking: off\n"
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
        ("/save", "needs an argument: /save FILE"),
        ("/edit", "did you mean /exit?"),
        ("/reset all", "takes no argument"),
        ("/load nowhere.json", "nowhere.json cannot be read: No such file or directory"),
        ("/save /nowhere/at/all.json", "/nowhere/at/all.json cannot be written: No such file"),
        ("/load ~nosuchuser/a.json", "~nosuchuser/a.json cannot be read"),
        ("/save ~nosuchuser/a.json", "~nosuchuser/a.json cannot be written"),
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
        ("/set top_k -2", "top_k is -2"),
        ("/set repeat_penalty 0", "repeat_penalty is 0.0"),
        ("/set seed -2", "seed is -2; it must lie between"),
        ("/set max_tokens 0", "max_tokens is 0; it must be positive, or -1 for as much as"),
        ("/set t1 2", "between 0 and 1"),
    ],
)
def test_a_wrong_command_says_what_would_be_right_and_changes_nothing(line: str, message: str) -> None:
    conversation, _ = converse(TEMPLATE, "one")
    before = (list(conversation.turns), conversation.sampling, conversation.max_tokens)
    with pytest.raises(HobbitError) as error:
        Commands(conversation).run(line)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert (conversation.turns, conversation.sampling, conversation.max_tokens) == before
    assert conversation.engine.live()["t1"] == 1.0


@pytest.mark.parametrize("text", ["/etc/passwd is what?", " /reset", "1/2", "hello", "/usr", "/r2d2"])
def test_a_message_may_hold_a_slash(text: str) -> None:
    assert Commands.is_command(text) == (text == "/usr")


def test_settings_are_set_together_or_not_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    conversation, _ = converse(TEMPLATE)
    confidence = " confidence 0.7" if "second_pass" in MECHANISMS else ""
    table = run(conversation, f"/set temp 0.5 top_k=3 max_tokens 9 seed 5 t1 0.5 t2 0.9{confidence}", capsys)
    assert conversation.sampling == SamplingConfig(temp=0.5, top_k=3, seed=5)
    assert conversation.max_tokens == 9
    assert (conversation.engine.live()["t1"], conversation.engine.live()["t2"]) == (0.5, 0.9)
    rows = {line.split()[0]: line.split()[1] for line in table.splitlines()}
    assert rows["temp"] == "0.5"
    assert (rows["max_tokens"], rows["t1"], rows["t2"]) == ("9", "0.5", "0.9")
    assert rows.get("confidence", "") == confidence[-3:]
    with pytest.raises(HobbitError, match="no low pool"):
        settings.change(conversation, "temp 1 t1 0.05")
    assert conversation.sampling.temp == 0.5
    run(conversation, "/set temp 0.25", capsys)
    run(conversation, "/set seed random", capsys)
    assert conversation.sampling == SamplingConfig(temp=0.25, top_k=3)
    list(conversation.ask("one"))
    assert conversation.engine.asked == [(9, SamplingConfig(temp=0.25, top_k=3))]


def test_instructions_are_shown_replaced_and_removed(capsys: pytest.CaptureFixture[str]) -> None:
    conversation, _ = converse(TEMPLATE, "one", system="be kind")
    assert "be kind" in run(conversation, "/system", capsys)
    run(conversation, "/system be\nbrief", capsys)
    run(conversation, "/reset", capsys)
    list(conversation.ask("two"))
    assert conversation.engine.prompts[-1][0] == {"role": "system", "content": "be\nbrief"}
    assert "none" in run(conversation, '/system ""', capsys)
    assert conversation.system is None
    plain, _ = converse(None)
    with pytest.raises(HobbitError, match="no chat template"):
        Commands(plain).run("/system be kind")


def test_statistics_tell_how_full_the_context_is(capsys: pytest.CaptureFixture[str]) -> None:
    conversation, _ = converse(TEMPLATE, "one")
    assert "7 of 512 tokens, 1 answer" in run(conversation, "/stats", capsys)


# files


def test_sampling_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="min_p"):
        SamplingConfig(min_p=float("nan"))
