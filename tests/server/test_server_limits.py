# SPDX-License-Identifier: MIT
"""Full contexts, answers of a bad form, and templates that refuse: an answer or status 400, never 500."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import RunPyhobbit
from ports import free_port
from servers import PROMPT, Answer, Server, running, serving, streaming, wait_until
from test_server_openai import TEMPLATE, WEATHER

BEGUN = '<tool_call>\n{"name": "f", '


@pytest.fixture(scope="module")
def shared(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--pools", "4M", "--threads", 1, "--chat-template-file", TEMPLATE)
    with serving(tiny_gguf, tmp_path_factory.mktemp("limits") / "log", *options) as server:
        yield server


def _long_answers(server: Server, lengths: list[int], n: int, **options: object) -> list[Answer]:
    """Answers of n tokens to prompts of these lengths, all at once."""

    def ask(length: int) -> Answer:
        prompt = [3 + i * 7919 % 250 for i in range(length)]
        body = {"prompt": prompt, "n_predict": n, "ignore_eos": True, "temperature": 0, **options}
        return server.request("/completion", body)

    with ThreadPoolExecutor(len(lengths)) as pool:
        return list(pool.map(ask, lengths))


@pytest.mark.parametrize(
    "lengths", [[74, 74], [74, 74, 74, 74], [400, 400, 20, 20], [500, 20, 20, 20], [200, 300]]
)
@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_fill_the_shared_context_all_get_answers(
    shared: Server, lengths: list[int], stream: bool
) -> None:
    alone = shared.complete(n=64, ignore_eos=True)
    for answer in _long_answers(shared, lengths, 350, stream=stream):
        assert answer.status == 200
        assert "error" not in answer.text
        last = answer.text.splitlines()[-2].removeprefix("data: ") if stream else answer.text
        assert json.loads(last)["stop_type"] == "limit"
        assert json.loads(last)["tokens_predicted"] > 0
    assert shared.busy_slots() == 0
    assert shared.complete(n=64, ignore_eos=True) == alone  # nothing of the others is left


def test_the_others_texts_stay_when_the_longest_answer_ends(tiny_gguf: Path, tmp_path: Path) -> None:
    with serving(tiny_gguf, tmp_path / "log", "--pools", "4M") as server:
        (alone,) = _long_answers(server, [60], 350)
        longest = [3 + i * 7919 % 250 for i in range(120)]
        for _ in range(20):  # on a busy machine it may have ended before the other begins
            with streaming(server, prompt=longest, n_predict=350) as stream:
                (answer,) = _long_answers(server, [60], 350)
                last = json.loads(stream.read().decode().splitlines()[-2].removeprefix("data: "))
            if last["tokens_predicted"] < 350:
                break
        assert last["tokens_predicted"] < 350
        assert answer.json["content"] == alone.json["content"]


def test_several_answers_to_one_prompt_share_its_cells(shared: Server) -> None:
    body = {"prompt": [65] * 200, "max_tokens": 20, "n": 4, "temperature": 0, "ignore_eos": True}
    answer = shared.request("/v1/completions", body)
    assert answer.status == 200, answer.text
    texts = [each["text"] for each in answer.json["choices"]]
    assert len(texts) == 4
    assert len(set(texts)) == 1


def test_a_full_context_is_shifted(tiny_gguf: Path, tmp_path: Path) -> None:
    options = ("--pools", "4M", "--context-shift", "--parallel", 1)
    with serving(tiny_gguf, tmp_path / "log", *options) as server:
        (answer,) = _long_answers(server, [100], 900)
        assert answer.json["tokens_predicted"] == 900
        assert answer.json["truncated"]
        assert server.complete(n=8) == server.complete(n=8)


def test_short_requests_after_one_as_long_as_the_context(shared: Server) -> None:
    text = shared.complete(n=8)
    (longest,) = _long_answers(shared, [511], 8)
    assert longest.json["tokens_predicted"] == 1
    assert shared.complete(n=8) == text
    assert [each.status for each in _long_answers(shared, [512, 600], 8)] == [400, 400]
    assert [each.status for each in _long_answers(shared, [40] * 6, 8)] == [200] * 6


def _messages(last: str) -> dict[str, Any]:
    question = {"role": "user", "content": PROMPT}
    messages = [question, {"role": "assistant", "content": last}] if last else [question]
    return {"messages": messages, "max_tokens": 8, "temperature": 0}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "begun", [BEGUN, "<tool_call>", '<tool_call>\n{"name": "get_weather", "arguments": {']
)
def test_a_malformed_tool_call_is_content(shared: Server, begun: str, stream: bool) -> None:
    body = {**_messages(begun), "tools": [WEATHER], "stream": stream}
    answer = shared.request("/v1/chat/completions", body)
    assert answer.status == 200, answer.text
    assert "error" not in answer.text
    assert '"finish_reason":"length"' in answer.text
    assert shared.complete(n=1)


def test_a_template_that_refuses_is_a_bad_request(tiny_gguf: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.content == 'x' %}{{ raise_exception('no such messages') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    with serving(tiny_gguf, tmp_path / "log", "--pools", "4M", "--chat-template-file", template) as server:
        for path in ("/v1/chat/completions", "/apply-template"):
            refused = server.request(path, {"messages": [{"role": "user", "content": "x"}]})
            assert refused.status == 400, refused.text
            assert "no such messages" in refused.error
        assert server.request("/v1/chat/completions", _messages("")).status == 200


def test_a_slot_that_cannot_be_saved_leaves_the_earlier_file(tiny_gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "slots"
    folder.mkdir()
    options = ("--pools", "4M", "--parallel", 1, "--slot-save-path", f"{folder}/")
    with serving(tiny_gguf, tmp_path / "log", *options) as server:
        server.complete(n=8)
        assert server.request("/slots/0?action=save", {"filename": "a"}).status == 200
        saved = (folder / "a").read_bytes()
        (folder / "a.new").mkdir()  # where the next one is written first
        server.complete("class Node:\n" * 20, n=8)
        answer = server.request("/slots/0?action=save", {"filename": "a"})
        assert (answer.status, answer.error) == (500, "Unable to save slot: Is a directory")
        assert (folder / "a").read_bytes() == saved
        assert server.request("/slots/0?action=restore", {"filename": "a"}).status == 200


@pytest.mark.parametrize("slot", ["-1", "99", "1e1", "0.5", "0%00", "x"])
def test_a_slot_is_named_by_a_whole_number(tiny_gguf: Path, tmp_path: Path, slot: str) -> None:
    options = ("--pools", "4M", "--slot-save-path", f"{tmp_path}/")
    with serving(tiny_gguf, tmp_path / "log", *options) as server:
        assert server.request(f"/slots/{slot}?action=erase", {}).status == 400


@pytest.mark.parametrize("fields", [{"n_predict": 2.9}, {"seed": 1e30}, {"top_k": -1e300}])
def test_a_whole_number_has_no_fraction(shared: Server, fields: dict[str, float]) -> None:
    answer = shared.request("/completion", {"prompt": PROMPT, "n_predict": 2, **fields})
    assert (answer.status, answer.error) == (
        400,
        f"Field '{next(iter(fields))}': Value must be a whole number",
    )
    assert shared.request("/completion", {"prompt": PROMPT, "n_predict": 2.0}).status == 200


def test_public_paths_need_no_key_behind_a_prefix(
    tiny_gguf: Path, tmp_path: Path, run_pyhobbit: RunPyhobbit
) -> None:
    options = ("--pools", "4M", "--api-prefix", "/llm", "--api-key", "k", "--port", port := free_port())
    command = [sys.executable, "-m", "pyhobbit", "serve", tiny_gguf, "--ctx-size", 512, *options]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(list(map(str, command)), stdout=log, stderr=log) as process,
    ):
        server = Server(f"http://127.0.0.1:{port}", process, tmp_path / "log")
        try:
            wait_until(lambda: _answers(server, "/llm/health"))
            url = f"{server.url}/llm"
            told = f"address   {url}, the cache at {url}/panel, OpenAI's API at {url}/v1\n"
            assert told in (tmp_path / "log").read_text().replace(" with the web page", "")
            for address in (f"{url}/v1", f"{port}/llm"):
                assert f"serve at {url}\n" in run_pyhobbit("top", address, "--once", "--api-key", "k").stdout
            outside = run_pyhobbit("top", port, "--once", "--api-key", "k")
            assert "with --api-prefix /NAME, for example, give HOST:PORT/NAME" in outside.stderr
            assert server.request("/llm/panel").status == server.request("/llm/").status == 200
            assert server.request("/llm/hobbit").status == server.request("/llm/slots").status == 401
            assert server.request("/health").status != 200
        finally:
            process.terminate()


def _answers(server: Server, path: str) -> bool:
    with suppress(OSError):
        return server.request(path).status == 200
    return False


def test_the_least_memory_that_is_told_works(
    tiny_gguf: Path, tmp_path: Path, run_pyhobbit: RunPyhobbit
) -> None:
    said = run_pyhobbit("serve", tiny_gguf, "--memory", "10M", "--port", 0).stderr
    least = int(said.split("the smallest that works is ")[1].split()[0])
    assert said.startswith("pyhobbit: error: a memory budget of 10.0 MiB is too small: ")
    assert "20.0 MiB for the server; the rest" in said
    command = [sys.executable, "-m", "pyhobbit", "serve", tiny_gguf, "--memory", f"{least + 1}M"]
    with running(command, tmp_path / "log") as server:  # this process may differ by a page or two
        assert server.complete(n=4)
