# SPDX-License-Identifier: MIT
"""Templates of real models: what a conversation becomes, and what an answer says."""

from collections.abc import Iterator

import models
import pytest

from pyhobbit import Engine, EngineConfig, HobbitError
from pyhobbit.engine.chat_format import ChatFormat, ChatReader, Said

pytestmark = pytest.mark.model

TEMPLATES = models.ROOT / "vendor/llama.cpp/models/templates"
QWEN3 = "Qwen-Qwen3-0.6B"
GPT_OSS = "openai-gpt-oss-120b"
R1 = "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"
LAGUNA = "poolside-Laguna-XS.2"
PLAIN = "meta-llama-Llama-3.1-8B-Instruct"
QUESTION = [{"role": "user", "content": "Hello?"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(models.tiny(), EngineConfig(n_ctx=64)) as opened:
        yield opened


def _format(engine: Engine, name: str) -> ChatFormat:
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatFormat(engine._opened().model.pointer, template)


def _read(engine: Engine, name: str, answer: str, ending: str = "stop") -> tuple[list[Said], ChatReader]:
    """The texts of an answer's tokens, and then its end."""
    model, form = engine._opened().model, _format(engine, name)
    reader = ChatReader(model, form, form.render(QUESTION))
    tokens = model.tokenize(answer, begins_text=False)
    said = []
    for n, token in enumerate(tokens, 1):
        said.append(reader.add(token, ending == "length" and n == len(tokens)))
        if reader.has_ended:
            break
    if ending != "length" and not reader.has_ended:
        said.append(reader.end(ending == "stop"))
    return said, reader


def _whole(said: list[Said]) -> tuple[str, str]:
    return "".join(each.text for each in said), "".join(each.thinking for each in said)


@pytest.mark.parametrize(
    ("name", "answer", "text", "thinking"),
    [
        (QWEN3, "<think>\nA greeting.\n</think>\n\nHi there", "Hi there", "A greeting."),
        (QWEN3, "Hi there", "Hi there", ""),
        (R1, "A greeting.\n</think>\n\nHi there", "Hi there", "A greeting."),
        (
            GPT_OSS,
            "<|channel|>analysis<|message|>A greeting.<|end|><|start|>assistant"
            "<|channel|>final<|message|>Hi there",
            "Hi there",
            "A greeting.",
        ),
        (GPT_OSS, "<|channel|>final<|message|>Hi there", "Hi there", ""),
        (PLAIN, "Hi <b>there</b>", "Hi <b>there</b>", ""),
    ],
)
def test_thinking_is_told_from_the_answer_while_it_comes(
    engine: Engine, name: str, answer: str, text: str, thinking: str
) -> None:
    said, _ = _read(engine, name, answer)
    got_text, got_thinking = _whole(said)
    assert (got_text, got_thinking.strip()) == (text, thinking)
    streamed = [each for each in said[:-1] if each.text]
    assert len(streamed) > 1, "the answer came at once"


@pytest.mark.parametrize("ending", ["length", "interrupted"])
def test_thoughts_that_were_cut_off_are_no_answer(engine: Engine, ending: str) -> None:
    text, thinking = _whole(_read(engine, QWEN3, "<think>\nA greeting, so", ending)[0])
    assert (text, thinking.strip()) == ("", "A greeting, so")


@pytest.mark.parametrize("ending", ["stop", "length", "interrupted"])
@pytest.mark.parametrize("name", [QWEN3, GPT_OSS, PLAIN])
def test_an_answer_of_another_form_is_text_as_it_came(engine: Engine, name: str, ending: str) -> None:
    answer = "def add(a, b):\n    return a"
    assert _whole(_read(engine, name, answer, ending)[0]) == (answer, "")


def test_a_stop_text_ends_the_answer_and_is_not_shown(engine: Engine) -> None:
    said, reader = _read(engine, LAGUNA, "Well.</think>Hi there</assistant>and more")
    assert reader.has_ended
    assert _whole(said) == ("Hi there", "Well.")
    assert all("<" not in each.text for each in said)


@pytest.mark.parametrize(
    ("name", "thinks", "can_skip"), [(QWEN3, True, True), (GPT_OSS, True, False), (PLAIN, False, False)]
)
def test_templates_say_whether_thinking_is_a_choice(
    engine: Engine, name: str, thinks: bool, can_skip: bool
) -> None:
    form = _format(engine, name)
    with_thinking, without = (form.render(QUESTION, think) for think in (True, False))
    assert with_thinking.thinks == thinks
    assert (with_thinking.text != without.text) == can_skip
    assert "Hello?" in with_thinking.text


def test_earlier_turns_hold_their_answers_alone(engine: Engine) -> None:
    turns = [*QUESTION, {"role": "assistant", "content": "Hi there"}, {"role": "user", "content": "Bye"}]
    text = _format(engine, GPT_OSS).render(turns).text
    assert "<|start|>assistant<|channel|>final<|message|>Hi there<|end|>" in text
    assert "analysis<|message|>" not in text


@pytest.mark.parametrize(
    "template", ["{{ 1 // 0 }}", "{{ messages[9]['role'] + 1 }}", "{{ ''.zzz() }}", "{% if %}"]
)
def test_a_template_that_fails_in_any_way_is_a_sentence(engine: Engine, template: str) -> None:
    form = ChatFormat(engine._opened().model.pointer, template)
    with pytest.raises(
        HobbitError, match=r"the model's chat template refuses this conversation: \w"
    ) as error:
        form.render(QUESTION)
    assert "\n" not in str(error.value)


def test_what_is_not_utf_8_is_replaced(engine: Engine) -> None:
    text = _format(engine, QWEN3).render([{"role": "user", "content": "gr\udcf6\u00dfe"}]).text
    assert "gr\ufffd\u00dfe" in text
