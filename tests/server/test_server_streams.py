# SPDX-License-Identifier: MIT
"""Streams of the web page, which may be picked up again: what nobody reads any more is not computed."""

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import pytest
from servers import LONG, LONG_ANSWER, PROMPT, Server, serving, wait_until

_UNREAD_S = 5  # until what nobody reads ends
_PAGE = "a-page"
_N_LAYERS = 6
_BATCH = 512


@pytest.fixture(scope="module")
def server(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("streams") / "log"
    with serving(
        tiny_gguf, log, "--pools", "3M", "--parallel", 1, "--threads", 1, "--batch", _BATCH, *LONG
    ) as running:
        yield running


@contextmanager
def _request(
    server: Server, method: str, path: str, body: object = None
) -> Iterator[http.client.HTTPResponse]:
    """An answer as a page reads it; leaving closes its connection."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=60)) as connection:
        headers = {"Content-Type": "application/json", "X-Conversation-Id": _PAGE}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        yield connection.getresponse()


def _stream(server: Server, prompt: object, n: int) -> AbstractContextManager[http.client.HTTPResponse]:
    body = {"prompt": prompt, "n_predict": n, "stream": True, "ignore_eos": True, "cache_prompt": False}
    return _request(server, "POST", "/completion", body)


def _layers_computed_until_free(server: Server) -> int:
    wait_until(lambda: not server.busy_slots())
    return server.cache()["layers_computed"]


@pytest.mark.parametrize("reads_prompt", [False, True])
def test_a_closed_page_ends_its_request(server: Server, reads_prompt: bool) -> None:
    prompt = [3 + i * 7919 % 250 for i in range(39_000)] if reads_prompt else PROMPT
    before = server.cache()["layers_computed"]
    with _stream(server, prompt, LONG_ANSWER) as answer:
        assert reads_prompt or answer.readline()
    assert server.busy_slots() == 1
    n_passes = len(prompt) // _BATCH if reads_prompt else LONG_ANSWER
    assert _layers_computed_until_free(server) - before < _N_LAYERS * n_passes, "computed to its end"
    assert server.complete(n=4)


def test_a_page_that_is_loaded_again_goes_on_reading(server: Server) -> None:
    before = server.cache()["layers_computed"]
    with _stream(server, PROMPT, LONG_ANSWER) as answer:
        first = answer.readline()
    with _request(server, "GET", f"/v1/stream?conv_id={_PAGE}") as again:
        assert again.readline() == first
        end = time.monotonic() + _UNREAD_S + 1
        while time.monotonic() < end:
            assert again.read1(1 << 16)
        assert server.busy_slots() == 1
    assert _layers_computed_until_free(server) - before < _N_LAYERS * LONG_ANSWER
