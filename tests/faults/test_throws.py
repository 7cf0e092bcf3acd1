# SPDX-License-Identifier: MIT
"""Allocations that fail below what Python and the server call: errors, then the right text, and no end."""

from __future__ import annotations

import http.client
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import models
import pytest
from servers import PROMPT, Server, serving

HERE = Path(__file__).resolve().parent
TEMPLATE = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}# assistant:\n"
MOST = 30_000  # allocations of a request
TURNS = [{"role": "user", "content": "def f("}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
REQUESTS: list[tuple[str, Any]] = [
    ("/completion", {"prompt": PROMPT, "n_predict": 4}),
    ("/completion", {"prompt": [PROMPT, "x"], "n_predict": 4, "stream": True, "n_probs": 3}),
    ("/completion", {"prompt": "x", "n_predict": 4, "grammar": 'root ::= [a-z]+ "("'}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 3, "n": 2, "logit_bias": {"5": 2}}),
    ("/v1/chat/completions", {"messages": TURNS, "max_tokens": 4, "tools": [TOOL]}),
    (
        "/v1/chat/completions",
        {"messages": TURNS, "max_tokens": 4, "response_format": {"type": "json_object"}},
    ),
    ("/v1/messages", {"messages": TURNS, "max_tokens": 4}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 4}),
    ("/api/chat", {"model": "m", "messages": TURNS, "options": {"num_predict": 4}}),
    ("/api/generate", {"model": "m", "prompt": "x", "options": {"num_predict": 4}}),
    ("/tokenize", {"content": "a text", "with_pieces": True}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
    ("/apply-template", {"messages": TURNS}),
    ("/slots/0?action=save", {"filename": "s"}),
    ("/slots/0?action=restore", {"filename": "s"}),
    ("/slots/1?action=erase", {}),
    *(
        (path, None)
        for path in ("/metrics", "/hobbit", "/props", "/slots", "/health", "/api/tags", "/v1/models")
    ),
]


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    library = tmp_path / "memory.so"
    subprocess.run(
        ["g++", "-O1", "-shared", "-fPIC", "-o", library, HERE / "memory.cpp"], check=True, timeout=300
    )
    return library


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return models.copy_gguf(models.tiny(), tmp_path / "m.gguf", TEMPLATE)


def test_no_allocation_ends_python(memory: Path, model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", HERE / "throws.py", model, "--tries", "9"],
        capture_output=True, text=True, timeout=900,
        env={**os.environ, "LD_PRELOAD": str(memory), "PYTHONPATH": str(HERE.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) > 15


def ask_each(server: Server, fail: Path, numbers: random.Random, n: int, statuses: Counter[int]) -> int:
    """Asks at most n times while an allocation fails; returns how often. statuses: of answers, 0 for none.

    Ends where the expert cache says that the model is to be opened again.
    """
    expected = server.complete()
    for i in range(n):
        path, body = numbers.choice(REQUESTS)
        first = int(MOST ** numbers.random()) - 1
        fail.write_text(f"{first} 1")
        os.kill(server.process.pid, signal.SIGUSR1)
        try:
            answer = server.request(path, body)
            statuses[answer.status] += 1
            if "open the model again" in answer.text:
                return i + 1
        except (http.client.HTTPException, OSError):
            statuses[0] += 1
        assert server.process.poll() is None, f"{path} at {first}: {server.log.read_text()[-3000:]}"
        fail.write_text("-1 0")
        os.kill(server.process.pid, signal.SIGUSR1)
        if i % 10 == 9:
            again = server.request("/completion", {"prompt": PROMPT, "n_predict": 32, "temperature": 0})
            if "open the model again" in again.text:
                return i + 1
            assert again.json["content"] == expected, path
    return n


def test_no_allocation_ends_the_server(
    memory: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One allocation of the thread that computes fails."""
    fail = tmp_path / "fail"
    options = ("--pools", "3M", "--parallel", 2, "--slot-save-path", f"{tmp_path}/", "--metrics")
    numbers, left, statuses = random.Random(7), int(os.environ.get("TRIES", "60")), Counter[int]()
    while left > 0:
        with monkeypatch.context() as patched:
            patched.setenv("LD_PRELOAD", str(memory))
            patched.setenv("MEMORY_FAIL", str(fail))
            with serving(model, tmp_path / "log", *options) as server:
                left -= ask_each(server, fail, numbers, left, statuses)
    print(statuses)
    assert statuses[200] > 20, statuses
    assert statuses[500] > 5, statuses
