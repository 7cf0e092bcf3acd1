# SPDX-License-Identifier: MIT
"""llama-server from the package runs a file with tiers through the expert cache, without a flag."""

import json
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import models
import pytest
from conftest import RunPyhobbit

PROMPT = "def read_file(path):\n"
START_TIMEOUT_S = 120


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _request(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def _wait_until_ready(url: str, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server ended"
        try:
            _request(f"{url}/health")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    pytest.fail("the server did not get ready")


@contextmanager
def serving(model: Path, log: Path, *options: str) -> Iterator[str]:
    """llama-server on a free port, ready; yields its address."""
    port = _free_port()
    command = [
        models.bin_dir() / "llama-server",
        "-m",
        model,
        "--port",
        str(port),
        "-c",
        "512",
        "-lv",
        "4",  # shows the library's log
        *options,
    ]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as server:
        url = f"http://127.0.0.1:{port}"
        try:
            _wait_until_ready(url, server)
            yield url
        finally:
            server.terminate()
            server.wait(timeout=30)


def complete(url: str, prompt: str = PROMPT, cache_prompt: bool = False) -> str:
    body = {"prompt": prompt, "n_predict": 32, "temperature": 0, "cache_prompt": cache_prompt}
    return _request(f"{url}/completion", body)["content"]


def test_file_with_tiers_uses_the_cache_without_a_flag(
    tiny_gguf: Path, tmp_path: Path, run_pyhobbit: RunPyhobbit
) -> None:
    log = tmp_path / "server.log"
    with serving(tiny_gguf, log, "-np", "1") as url:
        text = complete(url)
    assert re.search(r"hobbit: high-precision pool of \d+ of 48 experts", log.read_text(errors="replace"))

    chat = run_pyhobbit("chat", tiny_gguf, "-p", PROMPT, "-n", 32, "--temp", 0)
    assert chat.returncode == 0, chat.stderr
    assert chat.stdout.rstrip("\n") == text.rstrip("\n")


def test_pools_can_be_set_as_key_value_overrides(tiny_gguf: Path, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with serving(tiny_gguf, tmp_path / "default.log", "-np", "1") as url:
        expected = complete(url)
    with serving(tiny_gguf, log, "-np", "1", "--override-kv", "hobbit.pools=int:2000000") as url:
        assert complete(url) == expected
    slots = re.search(r"hobbit: high-precision pool of (\d+) of 48 experts", log.read_text(errors="replace"))
    assert slots
    assert int(slots[1]) < 48


def test_unknown_setting_is_refused(tiny_gguf: Path) -> None:
    command = [models.bin_dir() / "llama-server", "-m", tiny_gguf, "--override-kv", "hobbit.pool=int:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S)
    assert done.returncode != 0
    assert "unknown setting hobbit.pool" in done.stderr
