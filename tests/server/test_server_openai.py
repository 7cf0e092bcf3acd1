# SPDX-License-Identifier: MIT
"""The real openai client against `pyhobbit serve`."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import models
import openai
import pytest
from servers import PROMPT, Server, serving

KEY = "secret"
N_SLOTS = 4
# supports tools, and a required call comes without text before it, which the tiny model would not end
TEMPLATE = models.ROOT / "vendor/llama.cpp/models/templates/meetkai-functionary-medium-v3.2.jinja"
QUESTION = [{"role": "user", "content": "Write a function that reads a file."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "maxLength": 8}, "today": {"type": "boolean"}},
            "required": ["place", "today"],
        },
    },
}


@pytest.fixture(scope="module")
def server(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--parallel", N_SLOTS, "--ctx-size", 512 * N_SLOTS, "--pools", "6M", "--prefetch", 1)
    log = tmp_path_factory.mktemp("openai") / "log"
    with serving(tiny_gguf, log, *options, key=KEY) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return _client(server)


def _client(server: Server, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=120)


def _complete(client: openai.OpenAI, prompt: str = PROMPT, **options: object) -> openai.types.Completion:
    return client.completions.create(
        **{"model": "", "prompt": prompt, "max_tokens": 24, "temperature": 0, **options}
    )


def test_models_lists_the_model(client: openai.OpenAI, tiny_gguf: Path) -> None:
    (model,) = client.models.list().data
    assert model.id == tiny_gguf.stem


def test_completion_counts_its_tokens(client: openai.OpenAI, server: Server) -> None:
    completion = _complete(client)
    assert completion.choices[0].finish_reason == "length"
    tokens = server.request("/tokenize", {"content": PROMPT, "add_special": True}).json["tokens"]
    assert completion.usage.prompt_tokens == len(tokens)
    assert completion.usage.completion_tokens == 24
    assert completion.usage.total_tokens == len(tokens) + 24


def test_stream_is_the_same_text(client: openai.OpenAI) -> None:
    chunks = list(_complete(client, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert len(pieces) > 8
    assert "".join(pieces) == _complete(client).choices[0].text
    assert chunks[-1].usage.completion_tokens == 24


def test_several_choices_are_answers_of_their_own(client: openai.OpenAI) -> None:
    """Side by side, so that an expert serves tokens of all of them."""
    several = client.completions.create(
        model="", prompt=PROMPT, max_tokens=16, temperature=1, seed=1, n=3, extra_body={"cache_prompt": False}
    )
    texts = [choice.text for choice in several.choices]
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    greedy = _complete(client, n=3, max_tokens=16)
    assert {choice.text for choice in greedy.choices} == {_complete(client, max_tokens=16).choices[0].text}


def test_stop_ends_the_text_before_it(client: openai.OpenAI) -> None:
    whole = _complete(client).choices[0].text
    word = whole[len(whole) // 2 :][:3]
    choice = _complete(client, stop=[word]).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.text == whole[: whole.index(word)]


def test_seed_repeats_the_text(client: openai.OpenAI) -> None:
    first, second, other = (
        _complete(client, temperature=1.5, seed=seed).choices[0].text for seed in (7, 7, 8)
    )
    assert first == second
    assert first != other


def test_chat_answers_whole_and_streamed(client: openai.OpenAI) -> None:
    options = {"model": "", "messages": QUESTION, "max_tokens": 16, "temperature": 0}
    answer = client.chat.completions.create(**options)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage.prompt_tokens > 8  # the question's
    chunks = client.chat.completions.create(**options, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == answer.choices[0].message.content != ""


def test_answer_obeys_a_json_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 10}, "empty": {"type": "boolean"}},
        "required": ["name", "empty"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="",
        messages=QUESTION,
        max_tokens=128,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "file", "schema": schema}},
    )
    value = json.loads(answer.choices[0].message.content)
    assert set(value) == {"name", "empty"}
    assert isinstance(value["name"], str)
    assert isinstance(value["empty"], bool)


def test_tool_is_called_with_arguments_of_its_schema(tiny_gguf: Path, tmp_path: Path) -> None:
    with serving(tiny_gguf, tmp_path / "log", "--chat-template-file", TEMPLATE, key=KEY) as server:
        answer = _client(server).chat.completions.create(
            model="",
            messages=QUESTION,
            max_tokens=128,
            temperature=0,
            tools=[WEATHER],
            tool_choice="required",
            logit_bias={_end_token(server): 100},  # end as soon as the grammar allows it
        )
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls
    assert re.fullmatch("[A-Za-z0-9]{9}", call.id)  # Mistral's templates refuse others
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"place", "today"}
    assert isinstance(arguments["today"], bool)


def _end_token(server: Server) -> str:
    text = server.request("/props").json["eos_token"]
    (token,) = server.request("/tokenize", {"content": text, "parse_special": True}).json["tokens"]
    return str(token)


def test_wrong_key_is_refused(server: Server) -> None:
    with pytest.raises(openai.AuthenticationError) as e:
        _complete(_client(server, "wrong"))
    assert e.value.status_code == 401


def test_prompt_longer_than_the_context_is_a_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="exceeds the available context size") as e:
        _complete(client, prompt=PROMPT * 500)
    assert e.value.body["n_ctx"] == 512
    assert e.value.body["n_prompt_tokens"] > 512


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_tokens": -5}, "max_tokens"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"extra_body": {"hobbit": {"t1": 2}}}, "between 0 and 1"),
    ],
)
def test_wrong_values_are_bad_requests(
    client: openai.OpenAI, options: dict[str, object], problem: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=problem):
        _complete(client, **options)


def test_unknown_path_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.get("/nothing", cast_to=object)


def test_statistics_of_parallel_clients_add_up(client: openai.OpenAI, server: Server) -> None:
    prompts = [f"# {i}\nclass Node{i}:\n" + "    pass\n" * i for i in range(2 * N_SLOTS)]
    before = server.cache()
    prompt_tokens_before = _metric(server, "llamacpp:prompt_tokens_total")
    with ThreadPoolExecutor(N_SLOTS) as pool:
        done = list(pool.map(lambda p: _complete(client, p, extra_body={"cache_prompt": False}), prompts))
    after = server.cache()

    n_prompt = sum(each.usage.prompt_tokens for each in done)
    n_generated = sum(each.usage.completion_tokens for each in done)
    assert _metric(server, "llamacpp:prompt_tokens_total") - prompt_tokens_before == n_prompt

    difference = {key: after[key] - before[key] for key in after if isinstance(after[key], int)}
    selections = sum(difference[f"selections_{kind}"] for kind in ("high", "low", "skipped"))
    # the last token of an answer is not computed; the last layer computes only what a token is drawn from
    n_tokens = (after["n_layers"] - 1) * (n_prompt + n_generated - len(prompts)) + n_generated
    assert selections == n_tokens * after["n_experts_used"]
    needed = difference["hits_high"] + difference["misses_high"]
    assert 0 < needed <= selections
    assert difference["waves"] >= difference["layers_computed"] > 0
    expert = after["tier_bytes_high"] // (after["n_layers"] * after["n_experts"])
    assert difference["bytes_read"] >= difference["misses_high"] * expert


def _metric(server: Server, name: str) -> float:
    lines = server.request("/metrics").text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))
