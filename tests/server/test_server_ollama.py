# SPDX-License-Identifier: MIT
"""The real ollama client against `pyhobbit serve`: one model, and a folder of models."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from servers import PROMPT, Server, running, serving, wait_until

KEY = "secret"
GREEDY = {"temperature": 0, "num_predict": 24}


@pytest.fixture(scope="module")
def server(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("ollama") / "log"
    lossy = ("--pools", "6M", "--set", "t1=0.3", "--set", "t2=0.9", "--set", "strict=true")
    with serving(tiny_gguf, log, *lossy, key=KEY) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[ollama.Client]:
    with _client(server, headers={"Authorization": f"Bearer {KEY}"}) as client:
        yield client


def _client(server: Server, **options: Any) -> ollama.Client:
    """One that takes a new connection each time: on a slow machine the server closes idle ones meanwhile."""
    return ollama.Client(server.url, limits=httpx.Limits(max_keepalive_connections=0), **options)


def _chat(client: ollama.Client, **options: object) -> str:
    messages = [{"role": "user", "content": PROMPT}]
    return client.chat("tiny", messages, options={**GREEDY, **options}).message.content or ""


def test_both_names_are_listed(client: ollama.Client) -> None:
    assert [each.model for each in client.list().models] == ["tiny", "tiny-exact"]
    assert [each.model for each in client.ps().models] == ["tiny"]
    (first, *_) = client.list().models
    assert first.size
    assert first.size > 10_000_000


def test_a_model_is_described(client: ollama.Client) -> None:
    shown = client.show("tiny:latest")
    assert shown.details
    assert shown.details.format == "gguf"
    assert shown.capabilities is not None
    assert "completion" in shown.capabilities
    assert shown.modelinfo
    assert shown.modelinfo["hobbit.context_length"] == 512
    with pytest.raises(ollama.ResponseError, match=r"^model 'other' not found") as error:
        client.show("other")
    assert error.value.status_code == 404


def test_a_chat_streams_the_text_that_it_gives_whole(client: ollama.Client) -> None:
    whole = client.chat("tiny", [{"role": "user", "content": PROMPT}], options=GREEDY)
    assert whole.message.content
    assert (whole.done, whole.done_reason, whole.eval_count) == (True, "length", 24)
    assert whole.prompt_eval_count
    assert whole.eval_duration
    pieces = list(client.chat("tiny", [{"role": "user", "content": PROMPT}], options=GREEDY, stream=True))
    assert len(pieces) > 10
    assert "".join(each.message.content or "" for each in pieces) == whole.message.content
    assert [each.done for each in pieces] == [*[False] * (len(pieces) - 1), True]
    assert pieces[-1].eval_count == 24


def test_raw_prompts_are_completed(client: ollama.Client, server: Server) -> None:
    whole = client.generate("tiny", PROMPT, raw=True, options={**GREEDY, "cache_prompt": False})
    assert whole.response == server.complete(n=24)
    pieces = client.generate("tiny", PROMPT, raw=True, options={**GREEDY, "cache_prompt": False}, stream=True)
    assert "".join(each.response for each in pieces) == whole.response
    templated = client.generate("tiny", PROMPT, system="Write code.", options=GREEDY)
    assert templated.response
    assert templated.prompt_eval_count
    assert whole.prompt_eval_count
    assert templated.prompt_eval_count > whole.prompt_eval_count


def test_a_schema_is_kept(client: ollama.Client) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]}
    answer = client.chat("tiny", [{"role": "user", "content": "n"}], format=schema, options=GREEDY)
    assert (answer.message.content or "").replace(" ", "").replace("\n", "") == '{"n":7}'


def test_the_second_name_is_lossless(client: ollama.Client, server: Server) -> None:
    def low(model: str) -> int:
        before = server.cache()["selections_low"]
        client.generate(model, PROMPT, raw=True, options={**GREEDY, "cache_prompt": False})
        return server.cache()["selections_low"] - before

    assert low("tiny") > 0
    assert low("tiny-exact") == 0
    body = {"prompt": PROMPT, "max_tokens": 8, "model": "tiny-exact"}
    before = server.cache()["selections_low"]
    assert server.request("/v1/completions", body).status == 200
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "model": "tiny-exact"}
    assert server.request("/v1/messages", chat).status == 200
    assert server.cache()["selections_low"] == before  # in OpenAI's and Anthropic's API, too
    assert server.request("/v1/completions", {**body, "model": "tiny"}).status == 200
    assert server.cache()["selections_low"] > before


def test_tool_calls_go_there_and_back(client: ollama.Client) -> None:
    call = {"function": {"name": "read", "arguments": {"path": "x"}}}
    messages = [
        {"role": "user", "content": "Read x."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "text of x", "tool_name": "read"},
    ]
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    tools = [{"type": "function", "function": {"name": "read", "parameters": parameters}}]
    answer = client.chat("tiny", messages, tools=tools, options={"temperature": 0, "num_predict": 8})
    assert answer.done


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": [{"role": "user", "content": "x"}], "keep_alive": "soon"}, "keep_alive must be"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "context"),
        (
            {"messages": [{"role": "user", "content": "x", "images": ["AAAA"]}]},
            "image input is not supported",
        ),
        ({"messages": 3}, ""),
        (b"{", ""),
    ],
)
def test_errors_are_sentences(server: Server, body: object, said: str) -> None:
    answer = server.request("/api/chat", body if isinstance(body, bytes) else {"model": "tiny", **body})  # type: ignore[dict-item]
    assert answer.status == 400
    error = answer.json["error"]
    assert said in (error if isinstance(error, str) else error["message"])
    assert server.request("/health").status == 200


def test_an_idle_model_is_unloaded_by_keep_alive(tiny_gguf: Path, tmp_path: Path) -> None:
    with (
        serving(tiny_gguf, tmp_path / "log", "--pools", "6M") as server,
        _client(server) as client,
    ):
        text = _chat(client)
        assert client.ps().models
        done = client.generate("tiny", keep_alive=0)
        assert (done.done, done.done_reason) == (True, "unload")
        wait_until(lambda: not client.ps().models)
        assert [each.model for each in client.list().models] == ["tiny", "tiny-exact"]
        assert server.complete(n=2)  # though it would sleep again at once
        assert client.generate("tiny", keep_alive=-1).done  # asks to stay
        assert _chat(client, cache_prompt=True) == text  # without keep_alive: the server decides
        time.sleep(2.5)
        assert client.ps().models


def test_the_models_of_a_folder_answer_by_name(tiny_gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.gguf").symlink_to(tiny_gguf)
    command = [sys.executable, "-m", "pyhobbit", "serve", "--models-dir", folder, "--ctx-size", 512]
    with running(command, tmp_path / "log") as server, _client(server) as client:
        assert [each.model for each in client.list().models] == ["a", "a-exact", "b", "b-exact"]
        assert not client.ps().models
        texts = [
            client.generate(name, PROMPT, raw=True, options=GREEDY).response
            for name in ("a", "b:latest", "b-exact")
        ]
        assert len(set(texts)) == 1
        assert [each.model for each in client.ps().models] == ["b"]
        pieces = list(client.chat("b", [{"role": "user", "content": PROMPT}], options=GREEDY, stream=True))
        assert pieces[-1].done
        assert client.generate("b", keep_alive=0).done_reason == "unload"
        wait_until(lambda: not client.ps().models)
        with pytest.raises(ollama.ResponseError):
            client.chat("c", [{"role": "user", "content": PROMPT}])


def test_a_model_that_is_asked_for_without_a_prompt_is_loaded(tiny_gguf: Path, tmp_path: Path) -> None:
    with (
        serving(tiny_gguf, tmp_path / "log", "--pools", "6M") as server,
        _client(server) as client,
    ):
        time.sleep(4)
        assert client.generate("tiny", keep_alive=3).done_reason == "load"  # from now on
        time.sleep(1.5)
        assert client.ps().models
        wait_until(lambda: not client.ps().models)
        assert client.chat("tiny", keep_alive=-1).done_reason == "load"
        assert client.ps().models


def test_a_model_has_what_ollamas_own_program_reads(server: Server, client: ollama.Client) -> None:
    (listed, exact) = client.list().models
    assert listed.digest
    assert len(listed.digest) == 64
    assert int(listed.digest, 16)
    assert listed.digest == client.list().models[0].digest == exact.digest
    assert listed.modified_at
    assert listed.details
    assert (listed.details.family, listed.details.format) == ("hobbit", "gguf")
    assert listed.details.parameter_size
    (loaded,) = client.ps().models
    assert loaded.expires_at
    assert loaded.context_length == 512
    with httpx.Client(base_url=server.url) as plain:
        assert plain.head("/").status_code == plain.get("/").status_code == 200


def test_routes_that_serve_does_not_have_answer_in_ollamas_form(
    client: ollama.Client, server: Server
) -> None:
    with pytest.raises(ollama.ResponseError, match="pyhobbit pull") as error:
        client.pull("x")
    assert error.value.status_code == 501
    with pytest.raises(ollama.ResponseError, match="pyhobbit rm"):
        client.delete("x")
    assert server.request("/api/blobs", {}).json == {"error": "File Not Found"}
    assert server.request("/nowhere", {}).json["error"]["code"] == 404


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"model": 5}, "model must be a text"),
        ({"model": "tiny", "keep_alive": "9e8h"}, "keep_alive must be seconds, or a text like 5m"),
        ({"model": "tiny", "keep_alive": "9e8h" * 1000}, "keep_alive must be seconds, or a text like 5m"),
        ({"model": "tiny", "keep_alive": -1e300}, "keep_alive must be seconds, or a text like 5m"),
    ],
)
def test_odd_fields_are_sentences(server: Server, body: dict[str, Any], said: str) -> None:
    answer = server.request(
        "/api/chat", {"messages": [{"role": "user", "content": "x"}], **body, "stream": False}
    )
    assert (answer.status, answer.json) == (400, {"error": said})


def test_texts_are_embedded(tiny_gguf: Path, tmp_path: Path) -> None:
    options = ("--pools", "6M", "--embeddings", "--pooling", "mean")
    with serving(tiny_gguf, tmp_path / "log", *options) as server, _client(server) as client:
        found = client.embed("tiny", [PROMPT, "class Node:"])
        asked = server.request("/v1/embeddings", {"input": [PROMPT, "class Node:"]}).json["data"]
        assert list(map(list, found.embeddings)) == [each["embedding"] for each in asked]
        assert found.prompt_eval_count
        assert list(client.embeddings("tiny", PROMPT).embedding) == asked[0]["embedding"]
        assert server.request("/v1/embeddings", {"input": [5] * 500}).json["usage"]["prompt_tokens"] == 500
        for path in ("/v1/embeddings", "/api/embed"):
            answer = server.request(path, {"model": "tiny", "input": "x = 1\n" * 500})
            assert answer.status == 400
            assert "512 can be embedded: shorten it, or start the server with a larger" in answer.text


def test_texts_are_embedded_by_a_model_of_a_folder(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.gguf").symlink_to(tiny_gguf)
    options = ("--models-dir", tmp_path / "models", "--pools", "6M", "--embeddings", "--pooling", "mean")
    command = [sys.executable, "-m", "pyhobbit", "serve", *options]
    with running(list(map(str, command)), tmp_path / "log") as server, _client(server) as client:
        asked = server.request("/v1/embeddings", {"model": "tiny", "input": PROMPT}).json["data"]
        assert list(client.embeddings("tiny:latest", PROMPT).embedding) == asked[0]["embedding"]
        assert list(map(list, client.embed("tiny", [PROMPT]).embeddings)) == [asked[0]["embedding"]]
        with pytest.raises(ollama.ResponseError, match=r"model 'other' not found"):
            client.embed("other", PROMPT)


def test_a_server_that_pools_nothing_says_so(tiny_gguf: Path, tmp_path: Path) -> None:
    with serving(tiny_gguf, tmp_path / "log", "--pools", "6M", "--embeddings") as server:
        for path in ("/v1/embeddings", "/api/embed"):
            answer = server.request(path, {"model": "tiny", "input": "x"})
            assert (answer.status, "Pooling type 'none' is not OAI compatible" in answer.text) == (400, True)


def test_a_strict_template_takes_tool_calls(tiny_gguf: Path, tmp_path: Path) -> None:
    """Mistral's wants ids of nine letters and digits, and the call's id with each result."""
    templates = Path(__file__).parents[2] / "vendor" / "llama.cpp" / "models" / "templates"
    template = templates / "mistralai-Mistral-Nemo-Instruct-2407.jinja"
    options = ("--pools", "6M", "--chat-template-file", template)
    with serving(tiny_gguf, tmp_path / "log", *options) as server, _client(server) as client:
        calls = [{"function": {"name": name, "arguments": {"x": 1}}} for name in ("f", "g")]
        results = [{"role": "tool", "content": "1", "tool_name": name} for name in ("g", "f")]
        answer = {"role": "assistant", "content": "1"}
        turn = [
            {"role": "user", "content": "f"},
            {"role": "assistant", "tool_calls": calls},
            *results,
            answer,
        ]
        messages = [*turn, *turn, {"role": "user", "content": "and?"}]
        assert client.chat("tiny", messages, options=GREEDY).done
        ours = server.request(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "f"}], "max_tokens": 4}
        )
        assert ours.status == 200


def test_a_long_prompt_gives_signs_of_life(tiny_gguf: Path, tmp_path: Path) -> None:
    slow = (
        "--pools",
        "1M",
        "--threads",
        1,
        "--ctx-size",
        8192,
        "--override-kv",
        "llama.context_length=int:8192",
    )
    with (
        serving(tiny_gguf, tmp_path / "log", *slow, "--sse-ping-interval", 1) as server,
        _client(server) as client,
    ):
        messages = [{"role": "user", "content": PROMPT * 600}]
        pieces = list(client.chat("tiny", messages, options={"num_predict": 2}, stream=True))
        assert pieces[-1].done
        start = [each for each in pieces if not each.message.content and not each.done]
        assert start


def test_keep_alive_holds_for_its_own_request(tiny_gguf: Path, tmp_path: Path) -> None:
    options = ("--pools", "4M", "--sleep-idle-seconds", 1)
    with serving(tiny_gguf, tmp_path / "log", *options) as server:
        assert server.request("/api/generate", {"model": "x", "prompt": "", "keep_alive": -1}).status == 200
        server.complete(n=1)  # this one says nothing, so the server's own time holds
        wait_until(lambda: server.request("/props").json["is_sleeping"])
