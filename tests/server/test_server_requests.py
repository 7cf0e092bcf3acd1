# SPDX-License-Identifier: MIT
"""Requests of several clients: memory of their bodies, clients that leave, passes that others wait for."""

import http.client
import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from itertools import pairwise
from pathlib import Path
from select import select

import models
import pytest
from servers import PROMPT, Server, serving, wait_until

from pyhobbit.native.threads import processor_cores

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not models.stock_dir().exists(), reason="needs make stock"),
]

_MIB = 1 << 20
_LIMIT = 200 * _MIB
_CONTEXT = 8192


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of 150 MB, of which a fourth fits in the cache."""
    path = tmp_path_factory.mktemp("requests") / "model.gguf"
    size = ("--layers", 6, "--experts", 64, "--used", 8, "--embd", 512, "--heads", 8, "--heads-kv", 2)
    types = ("--ff", 512, "--experts-type", "q4_0", "--dense-type", "q4_0", "--ctx", _CONTEXT)
    command = [sys.executable, models.ROOT / "tests/random_moe.py", "--arch", "qwen3moe", *size, *types]
    lib_dir = models.stock_dir()
    subprocess.run(list(map(str, [*command, "--lib-dir", lib_dir, "-o", path])), check=True)
    return path


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    """With four slots and a bound on the memory of the process."""
    limit = ("--memory", _LIMIT, "--ctx-size", _CONTEXT, "--parallel", 4, "--batch", 1024)
    with serving(model, model.with_suffix(".log"), *limit) as running:
        yield running


@contextmanager
def _asked(server: Server, **body: object) -> Iterator[http.client.HTTPConnection]:
    """A request that has been sent; leaving closes its connection."""
    with closing(server.connection()) as connection:
        text = json.dumps({"temperature": 0, "ignore_eos": True, **body})
        connection.request("POST", "/completion", text, {"Content-Type": "application/json"})
        yield connection


def _many(count: int, piece: str, head: str = '{"n_predict": 1, "prompt": "a", "x": [') -> bytes:
    return f"{head}{','.join([piece] * count)}]}}".encode()


@pytest.mark.parametrize(
    ("body", "statuses"),
    [
        pytest.param(_many(1_200_000, '""'), {413}, id="longer than any"),
        pytest.param(_many(300_000, "1"), {413}, id="numbers"),
        pytest.param(_many(100_000, "[1]"), {413}, id="arrays"),
        pytest.param(_many(20_000, '""'), {200}, id="texts"),
        pytest.param(_many(1, f'"{"a" * 900_000}"'), {200}, id="one text"),
        pytest.param(_many(3000, '"a"', '{"n_predict": 1, "prompt": ['), {400}, id="prompts"),
        pytest.param(_many(100_000, "1", '{"n_predict": 1, "prompt": ['), {413}, id="tokens"),
        pytest.param(
            _many(1, f'["{"def f(x): " * 40_000}", 1]', '{"prompt": "a", "logit_bias": ['), {413}, id="bias"
        ),
    ],
)
def test_large_bodies_at_once_stay_within_the_memory(server: Server, body: bytes, statuses: set[int]) -> None:
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _number: server.request("/completion", body), range(6)))
    assert {answer.status for answer in answers} == statuses
    for answer in answers:
        assert answer.status == 200 or "memory" in answer.error or "at most 256" in answer.error
    assert server.peak() <= _LIMIT + 8 * _MIB


def test_biases_of_long_texts_at_once_stay_within_the_memory(server: Server) -> None:
    text = "def f(x): " * 4000
    one = {"prompt": "a", "n_predict": 1, "logit_bias": [[text, 0.5]]}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(server.request, ["/completion"] * 8, [one] * 8))
    assert {answer.status for answer in answers} == {200}
    assert len(answers[0].text) < 20_000  # not repeated
    assert server.request("/completion", {**one, "logit_bias": [[text, 0.5]] * 2}).status == 400
    assert server.peak() <= _LIMIT + 8 * _MIB


def test_many_messages_stay_within_the_memory(server: Server) -> None:
    messages = [{"role": "user", "content": "a b"}] * 150_000
    for n, status in ((150_000, 413), (800, 200)):
        body = {"max_tokens": 1, "messages": messages[:n]}
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(server.request, ["/v1/chat/completions"] * 4, [body] * 4))
        assert {answer.status for answer in answers} <= {status, 400}  # or longer than the context
    assert server.peak() <= _LIMIT + 8 * _MIB


@pytest.mark.parametrize(("n", "clients"), [(100, 4), (300, 8)])
def test_many_tools_stay_within_the_memory(server: Server, n: int, clients: int) -> None:
    values = {f"p{i}": {"type": "string", "enum": ["a" * 10] * 3} for i in range(20)}
    parameters = {"type": "object", "properties": values, "required": ["p0"]}
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "description": "d" * 50, "parameters": parameters}}
        for i in range(n)
    ]
    for choice in ("auto", "required"):
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "tools": tools}
        with ThreadPoolExecutor(clients) as pool:
            paths, bodies = ["/v1/chat/completions"] * clients, [{**body, "tool_choice": choice}] * clients
            assert {answer.status for answer in pool.map(server.request, paths, bodies)} <= {200, 400, 413}
        assert server.peak() <= _LIMIT + 8 * _MIB


def test_connections_that_say_nothing_hold_little_memory(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, soft + 900), hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        head = b"POST /completion HTTP/1.1\r\nHost: localhost\r\n"
        headers = b"".join(b"X-%d: %s\r\n" % (number, b"a" * 7000) for number in range(4))
        for number in range(900):
            client = stack.enter_context(socket.create_connection((host, int(port))))
            client.sendall((b"", head + headers, head)[number % 3])
        start = time.monotonic()
        assert len(list(Path(f"/proc/{server.process.pid}/task").iterdir())) < 200
        assert server.request("/health").status == 200
        assert server.complete(n=1)
        assert time.monotonic() - start < 90  # ten seconds of the first ones, one of each later
    assert server.peak() <= _LIMIT + 8 * _MIB


def test_requests_beyond_the_threads_are_refused(server: Server) -> None:
    with ExitStack() as stack:
        first = [stack.enter_context(_asked(server, prompt=PROMPT, n_predict=3500)) for _ in range(60)]
        wait_until(lambda: server.busy_slots() == 4)
        answer = server.request("/completion", {"prompt": "a"})
        assert (answer.status, "ask again" in answer.error) == (503, True)
        assert server.request("/health").status == 200
        first[0].close()
        wait_until(lambda: server.request("/tokenize", {"content": "a"}).status == 200)
    wait_until(lambda: server.busy_slots() == 0)
    assert server.peak() <= _LIMIT + 8 * _MIB


def test_a_small_request_is_not_behind_a_large_one(server: Server) -> None:
    """A large body holds memory while it is read, not while its answer is computed."""
    padding = "x" * 700_000
    with _asked(server, prompt=PROMPT, n_predict=3500, padding=padding):
        wait_until(lambda: server.busy_slots() == 1)
        with _asked(server, prompt=PROMPT, n_predict=3500, stream=True, padding=padding) as other:
            assert other.getresponse().status == 200
            assert server.complete(n=1)
            assert server.busy_slots() == 2
    wait_until(lambda: server.busy_slots() == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_pass(model: Path, tmp_path: Path, stream: bool) -> None:
    n = 8000
    options = ("--pools", "40M", "--ctx-size", _CONTEXT, "--parallel", 1, "--batch", n)
    with serving(model, tmp_path / "log", *options) as server:
        text = server.complete(n=8)
        tokens = [3 + i * 7919 % 250 for i in range(n)]
        before = server.cache()["layers_computed"]
        with _asked(server, prompt=tokens, n_predict=1, stream=stream):
            wait_until(lambda: server.cache()["layers_computed"] > before)
        computed = server.cpu_s()
        with _asked(server, prompt=tokens, n_predict=64, stream=stream):
            pass  # waits for the slot, and is never computed
        wait_until(lambda: server.busy_slots() == 0)
        assert server.cpu_s() - computed < 2.0 * processor_cores()  # the whole pass takes far more
        layers = server.cache()["layers_computed"] - before
        assert layers < 6, "the pass was computed to its end"
        time.sleep(1)
        assert server.cache()["layers_computed"] - before == layers
        assert server.complete(n=8) == text  # nothing of it is left
    assert "failed" not in (tmp_path / "log").read_text()


def test_a_request_that_waits_for_a_slot_has_its_headers(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path / "log", "--pools", "40M", "--parallel", 1, "--ctx-size", 2048) as server:
        with _asked(server, prompt=PROMPT, n_predict=2000):
            wait_until(lambda: server.busy_slots() == 1)
            with _asked(server, prompt=PROMPT, n_predict=1, stream=True) as other:
                assert other.getresponse().status == 200
                assert server.busy_slots() == 1
        too_long = server.request("/completion", {"prompt": [65] * 2048, "stream": True})
        assert (too_long.status, too_long.json["error"]["n_ctx"]) == (400, 2048)


def _written(server: Server) -> int:
    """Tokens of the answers that go on."""
    slots = (slot for slot in server.request("/slots").json if slot["is_processing"])
    return sum(slot["next_token"][0]["n_decoded"] for slot in slots)


def _reading(server: Server, n: int) -> list[dict[str, int]]:
    """Progress with prompts of n tokens."""
    return [each for each in server.cache()["reading"] if each["tokens_all"] == n]


def test_eight_clients_of_whom_some_leave_stay_within_the_memory(server: Server) -> None:
    def ask(number: int) -> None:
        is_long = number % 4 == 1
        tokens = [3 + i * (7919 + number) % 250 for i in range(1800 if is_long else 40 + 40 * number)]
        with _asked(server, prompt=tokens, n_predict=32) as client:
            if is_long:
                wait_until(lambda: _reading(server, 1800) or select([client.sock], [], [], 0)[0])
            else:
                assert client.getresponse().status == 200

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    wait_until(lambda: server.busy_slots() == 0)
    assert server.peak() <= _LIMIT + 8 * _MIB


def test_an_answer_goes_on_while_a_long_prompt_is_read(model: Path, tmp_path: Path) -> None:
    options = ("--pools", "40M", "--ctx-size", _CONTEXT, "--parallel", 2, "--batch", 4096)
    with (
        serving(model, tmp_path / "log", *options) as server,
        _asked(server, prompt=PROMPT, n_predict=4000, stream=True),
    ):
        wait_until(lambda: _written(server) > 0)
        before, seen = _written(server), list[dict[str, int]]()
        tokens = [3 + i * 7919 % 250 for i in range(4000)]
        with _asked(server, prompt=tokens, n_predict=1) as other:
            wait_until(lambda: seen.extend(_reading(server, 4000)) or seen)
            answered = json.loads(other.getresponse().read())
        assert _written(server) - before >= 20  # between two parts of the prompt
        assert answered["timings"]["prompt_n"] == 4000
        assert 0 < seen[0]["tokens_pass"] < 4000
        assert 0 <= seen[0]["layers"] <= seen[0]["layers_all"] == 6


def test_a_stream_tells_how_far_its_prompt_is(tmp_path: Path) -> None:
    n = 9000  # one pass of one thread, which takes many seconds
    context = ("--override-kv", f"llama.context_length=int:{n}", "--ctx-size", n, "--batch-size", n)
    options = (*context, "--parallel", 1, "--threads", 1)
    body = {"prompt": [65] * (n - 100), "n_predict": 1, "stream": True, "return_progress": True}
    with (
        serving(models.tiny(), tmp_path / "log", "--pools", "3M", *options) as server,
        closing(server.connection()) as connection,
    ):
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        events = [json.loads(line[6:]) for line in connection.getresponse() if line.startswith(b"data:")]
    told = [each["prompt_progress"] for each in events if "prompt_progress" in each]
    read = [each["processed"] for each in told]
    assert len(read) >= 4
    assert read == sorted(read)
    assert (read[0], read[-1]) == (0, n - 100)
    assert any(0 < each < n - 100 for each in read)
    assert all(later["time_ms"] - each["time_ms"] >= 900 for each, later in pairwise(told[1:-1]))
