# SPDX-License-Identifier: MIT
"""No field of a request for text sizes what the server allocates or computes beyond its memory."""

import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import models
import pytest
from servers import PROMPT, Answer, Server, running, serving

from bench.harness.system import NoCgroupError, memory_cgroup

_SCHEMA = Path(__file__).parents[2] / "vendor" / "llama.cpp" / "tools" / "server" / "server-schema.cpp"
_LIMIT = 200 << 20
_SLACK = 8 << 20
_MOST_S = 30
_INT = 2**31 - 1
# A penalty uses its window only where it is given.
_WINDOWS = {"repeat_penalty": 1.1, "dry_multiplier": 0.8}

# A row for each field of the schema: its least, a usual, its largest, and values beyond. A comment names the
# bound where it is not the field's own range.
FIELDS: dict[str, tuple[Any, ...]] = {
    "verbose": (False, True, 2),
    "timings_per_token": (False, True, 2),
    "stream": (False, True, "x"),
    "stream_options": ({}, {"include_usage": True}, [1]),
    "include_usage": (False, True, 1),  # within stream_options
    "cache_prompt": (False, True, 0),
    "return_tokens": (False, True, 1),
    "return_progress": (False, True, 1),
    "sse_ping_interval": (-1, 1, _INT, 2**40),
    "n_predict": (-1, 8, _INT, 2.9, 2**40),  # the context
    "n_indent": (0, 4, _INT, -1),
    "n_keep": (-1, 8, _INT, -2),
    "n_discard": (0, 8, _INT, -1),
    "n_cmpl": (1, 2, 4, 0, 5, _INT),  # the slots
    "n_cache_reuse": (0, 8, _INT, -1),
    "t_max_predict_ms": (-1, 100, _INT),
    "response_fields": ([], ["content"], ["x" * 1000] * 1000),
    "top_k": (0, 40, _INT, -1),
    "top_p": (0, 0.9, 1, 1e30),
    "min_p": (0, 0.1, 1, -1e30),
    "top_n_sigma": (-1, 2, 1e30),
    "xtc_probability": (0, 0.5, 1, 1e30),
    "xtc_threshold": (0, 0.1, 1, 1e30),
    "typical_p": (0, 0.5, 1, 1e30),
    "temperature": (0, 0.8, 1e30, -1),
    "dynatemp_range": (0, 0.5, 1e30),
    "dynatemp_exponent": (0, 1, 1e30),
    "repeat_last_n": (0, 64, 20_000_000, _INT, -1),  # the context
    "repeat_penalty": (0, 1.1, 1e30),
    "frequency_penalty": (-2, 0.5, 1e30),
    "presence_penalty": (-2, 0.5, 1e30),
    "dry_multiplier": (0, 0.8, 1e30),
    "dry_base": (1, 1.75, 1e30),
    "dry_allowed_length": (0, 2, _INT, -1),
    "dry_penalty_last_n": (0, 64, 20_000_000, _INT, -1),  # the context
    "mirostat": (0, 2, 3),
    "mirostat_tau": (0, 5, 1e30),
    "mirostat_eta": (0, 0.1, 1e30),
    "adaptive_target": (-1, 0.5, 1),
    "adaptive_decay": (0, 0.9, 0.99, 1),
    "seed": (0, 7, _INT),
    "n_probs": (0, 5, 100_000, _INT, -1),  # the vocabulary, and memory of answers
    "min_keep": (0, 5, _INT),
    "backend_sampling": (False, True, 1),
    "post_sampling_probs": (False, True, 1),
    "lora": ([], [{"id": 0, "scale": 1}], [{"id": 0, "scale": 1}] * 5000),
    "dry_sequence_breakers": (["\n"], ["\n", ":"], ["x" * 40] * 32, ["x" * 41], ["x"] * 33, []),
    "json_schema": ({}, {"type": "object"}, {"enum": ["x" * 50] * 2000}),
    "grammar_lazy": (False, True, 1),
    "chat_format": (0, 1, 99),
    "reasoning_format": ("none", "auto", "x"),
    "generation_prompt": ("", "x", "x" * 10_000),
    "parse_tool_calls": (False, True, 1),
    "chat_parser": ("", "x"),
    "continue_final_message": (False, True, 1),
    "echo": (False, True, 1),
    "preserved_tokens": ([], ["x"], ["x"] * 5000),
    "grammar_triggers": (
        [],
        [{"type": 1, "value": "x"}],
        [{"type": 1, "value": "x" * 8193}],
        [{"type": 99, "value": "x"}],
    ),
    "reasoning_control": (False, True, 1),
    "reasoning_budget_tokens": (-1, 8, _INT),
    "reasoning_budget_start_tag": ("", "x", "x" * 10_000),
    "reasoning_budget_end_tags": ([], ["x"], ["x" * 10] * 1000),
    "reasoning_budget_message": ("", "x", "x" * 10_000),
    "logit_bias": ([], [[5, 1]], [["xyz" * 400, 1]] * 20, {"5": 1}),  # the vocabulary
    "ignore_eos": (False, True, 1),
    "stop": ([], ["x"], ["x" * 100] * 1000, ""),
    "samplers": ([], ["top_k"], ["penalties"] * 4000, ["dry"] * 2000, "k" * 100_000),  # each once
}


def _schema() -> set[str]:
    """The names of llama.cpp's fields, without those that its preprocessor leaves out."""
    text = re.sub(r"(?ms)^#if 0\n.*?^#endif\n", "", _SCHEMA.read_text())
    text = re.sub(r"(?m)^\s*//.*", "", text)
    return set(re.findall(r'new field_\w+(?:<\w+>)?\("([\w.]+)"', text))


def test_each_field_of_the_schema_has_a_row() -> None:
    assert _schema() == FIELDS.keys()


@pytest.fixture(scope="module")
def bounded(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("bounds") / "log"
    with serving(tiny_gguf, log, "--memory", _LIMIT, "--parallel", 4, "--ctx-size", 2048) as server:
        yield server


def _ask(server: Server, **fields: object) -> Answer:
    start = time.monotonic()
    answer = server.request("/completion", {"prompt": PROMPT, "n_predict": 4, **_WINDOWS, **fields})
    assert time.monotonic() - start < _MOST_S
    assert answer.status in (200, 400, 413), answer.text
    return answer


def test_each_field_keeps_to_the_memory_whatever_its_value(bounded: Server) -> None:
    accepted = 0
    for name, values in FIELDS.items():
        for value in values:
            accepted += _ask(bounded, **{name: value}).status == 200
            assert bounded.peak() <= _LIMIT + _SLACK, (name, str(value)[:50])
    assert accepted * 2 > sum(map(len, FIELDS.values()))


# Each field's largest value once more, and texts that only a share of the memory bounds.
LONG = [
    *({name: value} for name, values in FIELDS.items() for value in values if len(json.dumps(value)) > 1000),
    {"stop": ["y" * 100] * 1500},
    {"grammar": f'root ::= "{"a" * 200_000}"'},
    {"generation_prompt": "x" * 200_000},
    {"response_fields": ["x" * 1000] * 200},
    {"logit_bias": [[i, 1] for i in range(500)]},
]


@pytest.mark.parametrize("fields", LONG, ids=lambda fields: next(iter(fields)))
def test_each_of_many_texts_counts_its_copy_of_the_fields(bounded: Server, fields: dict[str, Any]) -> None:
    _ask(bounded, **{"prompt": ["x"] * 256, "n_predict": 1, **fields})
    _ask(bounded, **{"n_cmpl": 4, "n_predict": 1, **fields})
    assert bounded.peak() <= _LIMIT + _SLACK


def _properties(names: Iterable[str], **further: object) -> dict[str, Any]:
    return {"json_schema": {"type": "object", "properties": {name: {} for name in names}, **further}}


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        pytest.param({"grammar": "root ::= " + '"q"? ' * 3000}, 400, id="optional parts"),
        pytest.param({"grammar": "root ::= " + '"a"{1,1900} ' * 500}, 400, id="repetitions"),
        pytest.param(
            {"grammar": 'root ::= ("a" "b"){0,9223372036854775808}'}, 200, id="number of repetitions"
        ),
        pytest.param({"grammar": f'root ::= "{"a" * 100_000}"{{1900}}'}, 400, id="long repetition"),
        pytest.param(_properties(map(str, range(200))), 200, id="200 properties"),
        pytest.param(_properties(map(str, range(1500))), 400, id="1500 properties"),
        pytest.param(_properties("é" * i for i in range(600)), 400, id="properties of one name"),
        pytest.param(_properties(["é" * 150_000]), 400, id="name of a property"),
        pytest.param(_properties(["a" * 150_000], additionalProperties={}), 400, id="other names"),
        pytest.param({"grammar_triggers": [{"type": 2, "value": "((.*)*)*Z"}]}, 400, id="pattern"),
    ],
)
def test_what_a_grammar_costs_is_bounded(bounded: Server, fields: dict[str, Any], status: int) -> None:
    lazy = {"grammar": 'root ::= "z"', "grammar_lazy": True} if "grammar_triggers" in fields else {}
    assert _ask(bounded, **{"n_predict": 60, **lazy, **fields}).status == status
    assert bounded.peak() <= _LIMIT + _SLACK
    assert bounded.complete(n=1)


def test_grammars_that_no_token_starts_have_each_their_steps(bounded: Server) -> None:
    lazy = {"grammar_lazy": True, "grammar_triggers": [{"type": 1, "value": "no answer has this"}]}
    for _ in range(30):
        assert _ask(bounded, n_predict=1, grammar="root ::= " + '"q"? ' * 250, **lazy).status == 200


def test_random_requests_keep_to_the_memory(bounded: Server) -> None:
    numbers = random.Random(3)
    accepted = 0
    for _ in range(60):
        names = numbers.sample(sorted(FIELDS.keys() - {"n_predict"}), 2)
        fields = {name: numbers.choice(FIELDS[name][:3]) for name in names}
        accepted += _ask(bounded, **fields).status == 200
    assert accepted >= 30
    assert bounded.peak() <= _LIMIT + _SLACK


def _drawn(numbers: random.Random) -> tuple[str, dict[str, Any]]:
    """A path, and a body for it in which up to three fields have any of their values."""
    names = numbers.sample(sorted(FIELDS), numbers.randint(1, 3))
    fields = {name: numbers.choice(FIELDS[name]) for name in names}
    fields = {"n_predict": 4, "t_max_predict_ms": 2000, **_WINDOWS, **fields}
    path = numbers.choice(["/completion", "/v1/completions", "/v1/chat/completions", "/api/generate"])
    if path == "/api/generate":
        return path, {"model": "m", "prompt": PROMPT, "stream": numbers.random() < 0.5, "options": fields}
    if path == "/v1/chat/completions":
        return path, {"messages": [{"role": "user", "content": PROMPT}], **fields}
    return path, {"prompt": PROMPT, **fields}


@pytest.mark.skipif(not models.stock_dir().exists(), reason="needs make stock")
def test_random_requests_of_eight_clients_live_in_a_cgroup(tmp_path: Path) -> None:
    """The limit of the cgroup is the server's own, below the size of the model."""
    model, limit, n = tmp_path / "m.gguf", 220 << 20, 2000
    size = ["--layers", 6, "--experts", 128, "--used", 4, "--embd", 512, "--heads", 8, "--heads-kv", 2]
    types = ["--ff", 512, "--ctx", 4096, "--experts-type", "q4_0", "--dense-type", "q4_0", "-o", model]
    command = [sys.executable, models.ROOT / "tests/random_moe.py", "--lib-dir", models.stock_dir()]
    subprocess.run(list(map(str, [*command, "--arch", "qwen3moe", *size, *types])), check=True)
    serve = [sys.executable, "-m", "pyhobbit", "serve", model, "--memory", limit, "--parallel", 4]

    def ask(number: int) -> tuple[int, float]:
        path, body = _drawn(random.Random(number))
        start = time.monotonic()
        answer = server.request(path, body)
        assert answer.status in (200, 400, 413), (path, str(body)[:500], answer.text)
        return answer.status, time.monotonic() - start

    try:
        with memory_cgroup(limit) as cgroup:
            inside = ["sh", "-c", 'echo $$ > "$0"; exec "$@"', cgroup.procs, *serve, "--ctx-size", 1024]
            with running(inside, tmp_path / "log") as server, ThreadPoolExecutor(8) as clients:
                found = list(clients.map(ask, range(n)))
                assert server.peak() <= limit + _SLACK
    except NoCgroupError as e:
        pytest.skip(str(e))
    statuses = Counter(status for status, _ in found)
    assert statuses[200] * 2 > n, statuses
    assert max(seconds for _, seconds in found) < _MOST_S


def test_a_window_reaches_as_far_as_the_context(bounded: Server) -> None:
    wide, context = (_ask(bounded, n_predict=32, temperature=0, repeat_last_n=n).json for n in (_INT, 512))
    assert wide["content"] == context["content"]
    assert wide["generation_settings"]["repeat_last_n"] == 512  # 2048 for four slots


def test_a_sampler_runs_once(bounded: Server) -> None:
    answer = _ask(bounded, samplers=["penalties"] * 4000 + ["top_k"]).json
    assert answer["generation_settings"]["samplers"] == ["penalties", "top_k"]


@pytest.mark.parametrize("stream", [False, True])
def test_probabilities_of_an_answer_have_their_share(bounded: Server, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "stream": stream}
    few = bounded.request("/v1/chat/completions", {**body, "max_tokens": 16, "top_logprobs": 20})
    assert few.status == 200
    assert few.text.count('"top_logprobs"') == 16 or not stream
    many = {**body, "max_tokens": 400, "top_logprobs": 512, "ignore_eos": True}
    answer = bounded.request("/v1/chat/completions", many)
    if stream:
        assert answer.status == 200
    else:
        assert answer.status == 413
        assert (
            "512 probabilities for each of 400 tokens, and the request's fields, would take" in answer.error
        )
    assert bounded.peak() <= _LIMIT + _SLACK


def test_an_escape_in_a_name_counts_as_what_it_spells(bounded: Server) -> None:
    messages = ", ".join(['{"\\u0072ole": "user", "content": "a"}'] * 5000)
    body = f'{{"max_tokens": 1, "messages": [{messages}]}}'.encode()
    plain = json.dumps({"max_tokens": 1, "messages": [{"role": "user", "content": "a"}] * 5000}).encode()
    for path in ("/apply-template", "/v1/chat/completions", "/api/chat"):
        assert bounded.request(path, body).status == 413
        assert bounded.request(path, plain).status == 413
    assert bounded.peak() <= _LIMIT + _SLACK
