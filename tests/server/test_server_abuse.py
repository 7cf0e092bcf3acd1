# SPDX-License-Identifier: MIT
"""A server with careless or hostile clients: it answers others, and stays as it was."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import models
import pytest
from servers import Server, serving

KEY = "secret"
DEEP = 20_000

# Paths of llama.cpp and ours; each needs the key.
GETS = (
    *("/hobbit", "/metrics", "/props", "/slots", "/models", "/v1/models", "/lora-adapters", "/api/tags"),
    *("/v1/stream", "/tools", "/cors-proxy", "/models/sse"),
)
POSTS = (
    *("/completion", "/completions", "/v1/completions", "/chat/completions", "/v1/chat/completions"),
    *("/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/infill", "/embedding", "/embeddings"),
    *("/v1/embeddings", "/rerank", "/v1/rerank", "/tokenize", "/detokenize", "/apply-template"),
    *("/lora-adapters", "/slots/0?action=erase", "/props", "/api/show", "/api/chat"),
    *("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens", "/v1/chat/completions/control"),
    *("/responses", "/responses/input_tokens", "/v1/responses/input_tokens", "/v1/streams/lookup"),
    *("/audio/transcriptions", "/v1/audio/transcriptions", "/reranking", "/v1/reranking"),
    *("/models/load", "/models/unload", "/tools", "/cors-proxy"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model, log = models.tiny_tiers("q8_0", "q4_0"), tmp_path_factory.mktemp("server") / "log"
    with serving(model, log, "--pools", "6M", "--parallel", 2, key=KEY) as running:
        yield running


@pytest.mark.parametrize("key", ["", "wrong", KEY[:-1], f"{KEY}x"])
def test_nothing_but_the_health_is_told_without_the_key(server: Server, key: str) -> None:
    assert server.request("/health", key=key or " ").status == 200
    for path in GETS:
        assert server.request(path, key=key or " ").status == 401, path
    for path in POSTS:
        assert server.request(path, {"prompt": "x"}, key=key or " ").status == 401, path


def test_a_request_without_any_key_is_refused(server: Server) -> None:
    for path in (*GETS, "/v1/completions"):
        with _connection(server) as client:
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            assert b" 401 " in client.makefile("rb").readline(), path


@pytest.fixture(scope="module")
def without_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("without") / "log"
    with serving(models.tiny(), log, "--pools", "6M", "--ctx-size", 512) as running:
        yield running


def _answer(
    server: Server, path: str, headers: dict[str, str], method: str = "GET"
) -> tuple[int, str | None]:
    """Status, and the page that may read the answer."""
    with contextlib.closing(server.connection()) as connection:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Access-Control-Allow-Origin")


@pytest.mark.parametrize(
    "path", ["/hobbit", "/v1/models", "/api/tags", "/slots", "/metrics", "/props", "/panel"]
)
def test_pages_of_other_sites_learn_nothing(without_key: Server, path: str) -> None:
    port = without_key.url.rpartition(":")[2]
    for page in (
        "https://site.example",
        "null",
        "http://localhost.site.example",
        "http://[::2]",
        "http://1.2.3.4",
    ):
        assert _answer(without_key, path, {"Origin": page}) == (403, None), page
        assert _answer(without_key, path, {"Origin": page}, "OPTIONS") == (200, None), page
    for host in (f"site.example:{port}", f"localhost.site.example:{port}", "x" * 4000):  # its own name for us
        for headers in ({"Host": host}, {"Host": host, "Origin": f"http://{host}"}):
            assert _answer(without_key, path, headers)[0] == 403, host
    for page in ("http://localhost:3000", "https://127.0.0.1", f"http://[::1]:{port}"):
        assert _answer(without_key, path, {"Origin": page}) == (200, page), page
    for host in (f"localhost:{port}", "127.0.0.1", "[::1]", "10.0.0.2:8080"):
        assert _answer(without_key, path, {"Host": host})[0] == 200, host
        assert _answer(without_key, path, {"Host": host, "Origin": f"http://{host}"})[0] == 200, host


def test_pages_may_ask_with_the_key_or_by_the_option(server: Server, tmp_path: Path) -> None:
    headers = {"Origin": "https://site.example", "Host": "site.example"}
    assert _answer(server, "/v1/models", headers)[0] == 401
    assert _answer(server, "/v1/models", {**headers, "Authorization": f"Bearer {KEY}"})[0] == 200
    options = ("--pools", "6M", "--ctx-size", 512, "--cors-origins", "*")
    with serving(models.tiny(), tmp_path / "log", *options) as running:
        assert _answer(running, "/v1/models", headers) == (200, "https://site.example")


def test_requests_of_one_packet_are_all_answered(without_key: Server) -> None:
    post = b'POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 15\r\n\r\n{"content":"a"}'
    get = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    end = b"GET /props HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with _connection(without_key) as client:
        client.sendall((get * 20 + post) * 10 + end)  # more than a buffer
        answers = client.makefile("rb").read()
    assert answers.count(b"HTTP/1.1 200 OK") == 211
    assert answers.count(b'"tokens":[') == 10


@pytest.mark.parametrize(("n", "status"), [(4, b"200"), (40, b"400"), (95, b"400")])
def test_headers_have_a_bound_together(without_key: Server, n: int, status: bytes) -> None:
    headers = b"".join(b"X-%d: %s\r\n" % (number, b"a" * 7000) for number in range(n))
    with _connection(without_key) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n")
        assert client.recv(12) == b"HTTP/1.1 " + status


def _connection(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def nested(n: int) -> dict[str, Any]:
    """A schema of n arrays within each other."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(n):
        schema = {"type": "array", "items": schema}
    return schema


def trigger(kind: int, text: str) -> dict[str, Any]:
    """A grammar that begins where the answer has this text, or matches it."""
    found = {"type": kind, "value": text}
    return {"grammar": 'root ::= "x"', "grammar_lazy": True, "grammar_triggers": [found]}


LINKS = 3900  # an object has no more names
CHAIN = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(LINKS)} | {f"d{LINKS}": {"type": "null"}}
MANY = 30_500  # more than a grammar may have, in a text that fits
RULES = "root ::= r0\n" + "\n".join(f"r{i:x}::=r{i + 1:x}" for i in range(MANY)) + f'\nr{MANY:x} ::= "x"'


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"grammar": "root ::= " + "(" * DEEP + '"x"' + ")" * DEEP}, id="groups"),
        pytest.param({"grammar": RULES}, id="rules"),
        pytest.param({"json_schema": nested(400)}, id="schema"),
        pytest.param({"json_schema": {"$ref": "#/$defs/d0", "$defs": CHAIN}}, id="references"),
        pytest.param(
            {"json_schema": {"type": "string", "pattern": "^" + "(" * DEEP + "x" + ")" * DEEP + "$"}},
            id="pattern",
        ),
        pytest.param(trigger(2, "(?:" * DEEP + ")" * DEEP), id="trigger"),
        pytest.param(trigger(2, "x" * 10 * DEEP), id="long trigger"),
        pytest.param(trigger(4, "x"), id="type of a trigger"),
        pytest.param(trigger(-1, "x"), id="negative type of a trigger"),
    ],
)
def test_what_nests_too_deep_is_a_bad_request(server: Server, body: dict[str, Any]) -> None:
    answer = server.request("/completion", {"prompt": "x", "n_predict": 1, **body})
    assert answer.status == 400, answer.text[:500]
    assert server.complete(n=1)


@pytest.mark.parametrize(
    "body",
    [
        *(b"[" * 200_000, b'{"prompt":' * 50_000, b"\xff" * 1000, b"{}" * 1000),
        b'{"prompt":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    ],
)
def test_bodies_that_are_no_request_are_refused(server: Server, body: bytes) -> None:
    assert server.request("/completion", body).status == 400
    assert server.complete(n=1)


_ASKED = {
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 1,
    "stop": "z",
    "tools": [],
    "seed": 1,
}
_RAW = {"prompt": "x", "max_tokens": 1, "logprobs": 1, "echo": False, "logit_bias": [], "samplers": []}
_OWN = {
    "model": "m",
    "options": {"num_predict": 1},
    "stream": False,
    "format": "",
    "keep_alive": 5,
    "think": False,
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {**_RAW, "json_schema": {}, "hobbit": {}, "n_probs": 1, "grammar": ""}),
        ("/v1/completions", _RAW),
        ("/v1/chat/completions", {**_ASKED, "response_format": {}, "tool_choice": "auto", "logprobs": False}),
        ("/v1/messages", {**_ASKED, "system": "x", "thinking": {}, "stop_sequences": []}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1, "instructions": "x", "reasoning": {}}),
        ("/api/chat", {**_OWN, "messages": _ASKED["messages"], "tools": []}),
        ("/api/generate", {**_OWN, "prompt": "x", "system": "x", "raw": False, "images": []}),
    ],
)
def test_odd_values_are_no_failure_of_the_server(server: Server, path: str, body: dict[str, Any]) -> None:
    odd = (None, True, -1, 2.5, 1e30, "x", [], {}, [None], {"a": 1})
    for asked in (*odd, *({**body, name: value} for name in body for value in odd)):
        answer = server.request(path, json.dumps(asked).encode())
        assert answer.status in (200, 400), (asked, answer.text)
        assert "json.exception" not in answer.text, asked
        if answer.status == 400:
            error = answer.json["error"]
            assert isinstance(error if path.startswith("/api/") else error["message"], str)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/detokenize", {"tokens": [-5]}, "a token that the model does not have"),
        ("/detokenize", {"tokens": [10**6]}, "a token that the model does not have"),
        ("/v1/chat/completions", {"reasoning_format": "x"}, "Unknown reasoning format: x"),
        ("/api/chat", {"model": "m", "options": {"reasoning_format": "x"}}, "Unknown reasoning format: x"),
    ],
)
def test_what_fails_while_a_request_is_read_is_a_bad_request(
    server: Server, path: str, body: dict[str, Any], said: str
) -> None:
    answer = server.request(path, {"messages": [{"role": "user", "content": "x"}], **body})
    assert (answer.status, said in answer.text) == (400, True), answer.text


def test_arguments_of_a_call_are_json_in_a_text_and_may_nest_too_deep_as_well(tmp_path: Path) -> None:
    template = models.ROOT / "vendor/llama.cpp/models/templates/GLM-4.6.jinja"
    function = {"name": "f", "arguments": '{"a":' * 100_000 + "1" + "}" * 100_000}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    body = {"messages": [{"role": "user", "content": "x"}, call, {"role": "user", "content": "x"}]}
    model = models.tiny_tiers("q8_0", "q4_0")
    with serving(model, tmp_path / "log", "--pools", "6M", "--chat-template-file", template) as server:
        answer = server.request("/v1/chat/completions", body)
        assert answer.status >= 400, answer.text[:500]
        assert "nest more than 1000 deep" in answer.text
        assert server.complete(n=1)


def test_a_body_in_chunks_is_bounded(server: Server) -> None:
    """It does not say how long it will be."""
    chunk = b"10000\r\n" + b" " * (1 << 16) + b"\r\n"
    lines = (
        "POST /tokenize HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {KEY}",
        "Transfer-Encoding: chunked",
    )

    def status_of(n_chunks: int) -> bytes:
        with _connection(server) as client:
            client.sendall("\r\n".join((*lines, "", "")).encode() + b"2\r\n{}\r\n")
            with contextlib.suppress(ConnectionError):  # it may close before it has everything
                for _ in range(n_chunks):
                    client.sendall(chunk)
                client.sendall(b"0\r\n\r\n")
            return client.makefile("rb").readline()

    assert b" 200 " in status_of(2)
    before = server.memory()
    assert b" 413 " in status_of(1024)
    assert server.memory() - before < 16 << 20


def test_grammars_and_schemas_of_a_common_size_are_taken(server: Server) -> None:
    grammar = {"grammar": "root ::= " + "(" * 50 + '"x"' + ")" * 50}
    assert server.complete(n=4, **grammar) == "x"
    assert (
        server.request("/completion", {"prompt": "x", "n_predict": 4, "json_schema": nested(50)})
        .json["content"]
        .startswith("[")
    )


def test_clients_that_send_half_a_body_keep_nobody_waiting(server: Server) -> None:
    lines = ("POST /completion HTTP/1.1", "Host: x", f"Authorization: Bearer {KEY}", "Content-Length: 1000")
    head = "\r\n".join((*lines, "", "{"))
    with contextlib.ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(_connection(server)).sendall(head.encode())
        for _ in range(20):
            assert server.request("/health").status == 200
        assert server.complete(n=1)


def test_a_body_that_stops_in_the_middle_gives_its_memory_back(server: Server) -> None:
    """One in chunks may become as long as all bodies together."""
    lines = ("POST /completion HTTP/1.1", "Host: x", f"Authorization: Bearer {KEY}")
    head = "\r\n".join((*lines, "Transfer-Encoding: chunked", "", "1", "{", ""))
    with _connection(server) as client:
        client.sendall(head.encode())
        assert server.complete(n=1)


def test_200_connections_get_the_same_text(server: Server) -> None:
    expected = server.complete(n=2)
    begin = threading.Barrier(200)

    def ask(_number: int) -> str:
        begin.wait(60)
        return server.complete(n=2)

    with ThreadPoolExecutor(200) as pool:
        assert set(pool.map(ask, range(200))) == {expected}
    assert server.busy_slots() == 0
