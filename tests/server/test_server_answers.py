# SPDX-License-Identifier: MIT
"""Answers that grow with their request keep to the server's memory, whoever reads them."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import models
import pytest
from servers import Server, running, serving

from bench.harness.system import NoCgroupError, memory_cgroup

_LIMIT = 220 << 20
_SLACK = 8 << 20
_DRAFTS = ("--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", 3, "--spec-ngram-mod-n-min", 1)

pytestmark = pytest.mark.skipif(not models.stock_dir().exists(), reason="needs make stock")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose vectors have 2048 numbers."""
    model = tmp_path_factory.mktemp("wide") / "wide.gguf"
    size = ["--layers", 1, "--experts", 64, "--used", 4, "--embd", 2048, "--heads", 16, "--heads-kv", 4]
    types = ["--ff", 512, "--ctx", 4096, "--experts-type", "q4_0", "--dense-type", "q4_0", "-o", model]
    command = [sys.executable, models.ROOT / "tests/random_moe.py", "--lib-dir", models.stock_dir()]
    subprocess.run(list(map(str, [*command, "--arch", "qwen3moe", *size, *types])), check=True)
    return model


@pytest.fixture(scope="module")
def drafting(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that drafts, in a cgroup of its own limit."""
    serve = [sys.executable, "-m", "pyhobbit", "serve", wide, "--memory", _LIMIT, "--parallel", 4, *_DRAFTS]
    try:
        with memory_cgroup(_LIMIT) as cgroup:
            inside = cgroup.joining(list(map(str, [*serve, "--ctx-size", 1024])))
            with running(inside, tmp_path_factory.mktemp("drafting") / "log") as server:
                yield server
    except NoCgroupError as e:
        pytest.skip(str(e))


@pytest.fixture(scope="module")
def server(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--memory", _LIMIT, "--parallel", 4, "--ctx-size", 1024, "--embeddings", "--pooling", "mean")
    with serving(wide, tmp_path_factory.mktemp("answers") / "log", *options) as started:
        yield started


def _texts(n: int) -> list[tuple[str, dict[str, Any]]]:
    texts = ["ab"] * n
    return [
        ("/embedding", {"content": texts}),
        ("/v1/embeddings", {"input": texts}),
        ("/v1/embeddings", {"input": texts, "encoding_format": "base64"}),
        ("/api/embed", {"model": "m", "input": texts}),
    ]


def test_vectors_of_an_answer_have_their_share(server: Server) -> None:
    for path, body in _texts(20):
        assert server.request(path, body).status == 200, path
    for n in (60, 256, 2000, 20_000):
        for path, body in _texts(n):
            answer = server.request(path, body)
            assert answer.status == 413, (path, n)
            error = answer.json["error"]
            said = error if path == "/api/embed" else error["message"]
            assert f"{n} texts and {2048 * n} numbers of vectors would take" in said
            assert "are planned for that" in said
    assert server.peak() <= _LIMIT + _SLACK


def test_vectors_are_the_same_in_each_form(server: Server) -> None:
    texts = ["def f(x):", "ab", '\u00e9 ]"']
    answer = server.request("/v1/embeddings", {"input": texts, "model": '"embedding":[9],"data":'}).json
    ollama = server.request("/api/embed", {"model": "m", "input": texts}).json
    assert ollama["embeddings"] == [each["embedding"] for each in answer["data"]]
    assert ollama["prompt_eval_count"] == answer["usage"]["prompt_tokens"]
    assert answer["model"] == '"embedding":[9],"data":'
    old = server.request("/api/embeddings", {"model": "m", "prompt": texts[0]}).json
    assert old["embedding"] == ollama["embeddings"][0]


def test_texts_to_rank_have_their_share_with_their_tokens(tiny_gguf: Path, tmp_path: Path) -> None:
    """A text above 4 KiB, which waits for memory of its own elsewhere, gives nothing back meanwhile."""
    options = ("--memory", _LIMIT, "--parallel", 4, "--ctx-size", 4096, "--reranking")
    with serving(tiny_gguf, tmp_path / "log", *options) as server, ThreadPoolExecutor(8) as clients:
        for n, size, query, status in (
            (8, 600, 9, 200),
            (4, 5000, 9, 400),
            (80, 6000, 9, 413),
            (200, 9, 3000, 413),
        ):
            body = {"query": "x " * (query // 2), "documents": ["ab " * (size // 3)] * n}
            answers = list(clients.map(server.request, ["/rerank"] * 8, [body] * 8))
            assert {answer.status for answer in answers} == {status}
            assert status != 413 or f"{n} texts and " in answers[0].error
            assert server.peak() <= _LIMIT + _SLACK


def test_pieces_of_tokens_have_their_share(server: Server) -> None:
    pieces = server.request("/tokenize", {"content": list(range(500)), "with_pieces": True}).json["tokens"]
    longest = max(pieces, key=lambda token: len(token["piece"]))["id"]
    text = "def read_file(path):\n" * 100
    tokens = server.request("/tokenize", {"content": text}).json["tokens"]
    content = server.request("/detokenize", {"tokens": tokens}).json["content"]
    assert content.replace("\u2581", " ").strip() == text.strip()
    for n in (100, 2000, 20_000, 70_000):
        for body in ({"content": "\u0001" * n}, {"content": [longest] * n}, {"content": "q" * n}):
            assert server.request("/tokenize", {**body, "with_pieces": True}).status in (200, 413)
        assert server.request("/tokenize", {"content": [1] * n}).status in (200, 413)
        assert server.request("/detokenize", {"tokens": [longest] * n}).status in (200, 413)
        assert server.peak() <= _LIMIT + _SLACK, n
    assert server.request("/tokenize", {"content": [1] * 2000, "with_pieces": True}).status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/apply-template", {"messages": [{"role": "user", "content": "a" * 800_000}]}),
        ("/tokenize", {"content": [7] * 60_000}),
        ("/v1/embeddings", {"input": ["ab"] * 20}),
    ],
)
def test_answers_that_nobody_reads_keep_to_the_memory(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    data = json.dumps(body).encode()
    lines = (f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json")
    head = "\r\n".join((*lines, f"Content-Length: {len(data)}", "", "")).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        for _ in range(50):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.connect((host, int(port)))
            client.sendall(head + data)
        time.sleep(5)
        assert server.peak() <= _LIMIT + _SLACK
        assert server.request("/health").status == 200
    assert server.request("/tokenize", {"content": "ab" * 3000}).status == 200


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_object_of_many_names_is_not_looked_through(server: Server, wrapped: bool) -> None:
    """Each name is compared with those before it."""
    for path in ("/completion", "/v1/chat/completions", "/v1/responses", "/api/chat", "/tokenize"):
        for n, status in ((300, (200, 400, 501)), (4200, (400,)), (30_000, (400,))):
            names = {f"name{i:05}": i for i in range(n)}
            body = {"prompt": "a", "content": "a", "input": "a", "n_predict": 1, "max_tokens": 1}
            body |= {"model": "m", "messages": [{"role": "user", "content": "a"}]}
            body |= {"options": names} if wrapped else names
            before = server.cpu_s()
            answer = server.request(path, body)
            assert server.cpu_s() - before < 1, (path, n)
            assert answer.status in status, (path, n, answer.text)
            assert n < 4200 or "too many names" in answer.text


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/tokenize", {"content": "a", "x": 1e400}, ""),
        ("/v1/chat/completions", {"messages": "x"}, "messages"),
        ("/v1/chat/completions", {"model": "m"}, "messages"),
        ("/completion", {"prompt": "x", "n_predict": "x"}, "n_predict"),
        ("/detokenize", {"tokens": "x"}, "must be array, but is string (near 'tokens')"),
        (
            "/embedding",
            {"input": "x", "embd_normalize": "x"},
            "must be number, but is string (near 'embd_nor",
        ),
        (
            "/v1/embeddings",
            {"input": "x", "encoding_format": 1},
            "must be string, but is number (near 'encoding",
        ),
        ("/rerank", b"{", ""),
        ("/completion", b'{"prompt": nan}', "parse error at line 1, column 1"),
    ],
)
def test_errors_name_the_field_and_no_library(server: Server, path: str, body: object, said: str) -> None:
    answer = server.request(path, body)
    assert said in answer.text
    assert "exception" not in answer.text


_LONG, _DIGITS = "k" * 300_000, b"9" * 300_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", b'{"prompt": "a", "n_predict": %s}' % _DIGITS),
        ("/completion", b'{"prompt": "a", "top_p": 1e%s}' % _DIGITS),
        ("/v1/chat/completions", b'{"messages": [%s]}' % _DIGITS),
        ("/tokenize", b'{"content": -%s.5e}' % _DIGITS),
        ("/api/embed", b'{"model": "m", "input": %s}' % _DIGITS),
        ("/api/show", {"model": _LONG}),
        ("/api/chat", {"model": "m", "messages": [{"role": _LONG, "content": "a"}], "keep_alive": _LONG}),
        ("/completion", {"prompt": "a", "samplers": _LONG}),
        ("/completion", {"prompt": "a", "grammar": _LONG}),
        ("/completion", {"prompt": "a", "hobbit": {_LONG: 1}}),
        ("/completion", {"prompt": "a", "hobbit": {"quality": _LONG}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tool_choice": _LONG}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": _LONG}]}]}),
        ("/v1/messages", {"messages": [{"role": _LONG, "content": [{"type": _LONG}]}]}),
        ("/v1/responses", {"input": [{"type": _LONG}]}),
        ("/v1/embeddings", {"input": "x", "encoding_format": _LONG}),
    ],
)
def test_errors_repeat_no_long_value(server: Server, path: str, body: object) -> None:
    answer = server.request(path, body)
    assert answer.status < 500, answer.text[:1000]
    assert len(answer.text) < 8000


GRAMMARS: dict[str, Callable[[int], str]] = {
    "literal": lambda n: f'root ::= "{"a" * n}"',
    "alternatives": lambda n: "root ::= " + "|".join(['"a"'] * (n // 4)),
    "class": lambda n: f"root ::= [{'a' * n}]*",
    "groups": lambda n: "root ::= " + '("a")' * (n // 5),
    "rules": lambda n: "root ::= r0\n" + "".join(f'r{i}::="a"\n' for i in range(n // 11)),
    "names": lambda n: f'root ::= {"a" * (n // 2)}\n{"a" * (n // 2)} ::= "a"',
    "choices": lambda n: "root ::= (" + "|".join(['("a")'] * (n // 6)) + ")*",
}


@pytest.mark.parametrize("kind", GRAMMARS)
def test_copies_of_a_large_grammar_keep_to_the_memory(drafting: Server, kind: str) -> None:
    """Each slot has one, and a draft copies it."""

    def ask(n: int) -> int:
        body = {"prompt": "aaa " * 16, "n_predict": 12, "temperature": 0, "grammar": GRAMMARS[kind](n)}
        return drafting.request("/completion", {**body, "n_cmpl": 1 if n > 100_000 else 4}).status

    with ThreadPoolExecutor(4) as clients:
        for n in (50_000, 250_000, 1_000_000):
            assert set(clients.map(ask, [n] * 4)) <= {200, 400, 413}
            assert drafting.peak() <= _LIMIT + _SLACK, n


def test_a_slot_keeps_no_request_that_has_ended(drafting: Server) -> None:
    body = {"prompt": "aaa", "n_predict": 1, "temperature": 0, "id_slot": 2, "stop": ["a" * 300_000]}
    assert drafting.request("/completion", body).status == 200
    assert "params" not in drafting.request("/slots").json[2]
