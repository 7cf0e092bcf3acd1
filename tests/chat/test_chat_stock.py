# SPDX-License-Identifier: MIT
"""Everything in high precision, chat answers what the unpatched llama-server answers."""

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
from chat_models import write_with_template
from conftest import RunPyhobbit

SYSTEM, QUESTION = "You write Python.", "def read_file(path, mode):"
N_TOKENS = 40


@pytest.fixture(scope="module")
def plain_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "plain.gguf"
    write_with_template(models.tiny(), path)
    return path


@pytest.fixture(scope="module")
def stock(plain_gguf: Path) -> Iterator[str]:
    """The address of a llama-server without our patches."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    options = ["-m", plain_gguf, "--port", port, "-c", 512, "-np", 1, "--jinja", "-t", 2]
    command = [models.stock_dir() / "llama-server", *map(str, options)]
    log = plain_gguf.with_suffix(".log")
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as server:
        try:
            _wait_until_ready(f"http://127.0.0.1:{port}", server, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


def _wait_until_ready(address: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()[-2000:]
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    pytest.fail("the server did not get ready")


def _post(url: str, **body: Any) -> Any:
    data = json.dumps({**body, "temperature": 0, "cache_prompt": False}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def test_an_answer_is_that_of_stock_llama_cpp(
    stock: str, plain_gguf: Path, run_pyhobbit: RunPyhobbit
) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    answer = _post(f"{stock}/v1/chat/completions", messages=messages, max_tokens=N_TOKENS)
    expected = answer["choices"][0]["message"]["content"]
    assert len(expected) > N_TOKENS
    done = run_pyhobbit(
        "chat", plain_gguf, "--system", SYSTEM, "-p", QUESTION, "-n", N_TOKENS, "--pools", "8M", "--temp", "0"
    )
    assert done.returncode == 0, done.stderr
    assert "hits" in done.stderr
    assert done.stdout.removesuffix("\n") == expected.removesuffix("\n")


def test_a_completion_is_that_of_stock_llama_cpp(stock: str, run_pyhobbit: RunPyhobbit) -> None:
    expected = _post(f"{stock}/completion", prompt=QUESTION, n_predict=N_TOKENS)["content"]
    done = run_pyhobbit("chat", models.tiny(), "-p", QUESTION, "-n", N_TOKENS, "--pools", "8M", "--temp", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.removesuffix("\n") == expected.removesuffix("\n")
