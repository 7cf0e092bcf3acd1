# SPDX-License-Identifier: MIT
"""Everything in high precision, chat answers what the unpatched llama-server answers."""

from collections.abc import Iterator
from pathlib import Path

import models
import pytest
from chat_models import write_with_template
from conftest import RunPyhobbit
from servers import Server, running

SYSTEM, QUESTION = "You write Python.", "def read_file(path, mode):"
N_TOKENS = 40


@pytest.fixture(scope="module")
def plain_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "plain.gguf"
    write_with_template(models.tiny(), path)
    return path


@pytest.fixture(scope="module")
def stock(plain_gguf: Path) -> Iterator[Server]:
    """A llama-server without our patches."""
    options = ("-m", plain_gguf, "-c", 512, "-np", 1, "--jinja", "-t", 2)
    with running([models.stock_dir() / "llama-server", *options], plain_gguf.with_suffix(".log")) as server:
        yield server


def test_an_answer_is_that_of_stock_llama_cpp(
    stock: Server, plain_gguf: Path, run_pyhobbit: RunPyhobbit
) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    body = {"messages": messages, "max_tokens": N_TOKENS, "temperature": 0, "cache_prompt": False}
    answer = stock.request("/v1/chat/completions", body)
    expected = answer.json["choices"][0]["message"]["content"]
    assert len(expected) > N_TOKENS
    done = run_pyhobbit(
        "chat", plain_gguf, "--system", SYSTEM, "-p", QUESTION, "-n", N_TOKENS, "--pools", "8M", "--temp", "0"
    )
    assert done.returncode == 0, done.stderr
    assert "hits" in done.stderr
    assert done.stdout.removesuffix("\n") == expected.removesuffix("\n")


def test_a_completion_is_that_of_stock_llama_cpp(stock: Server, run_pyhobbit: RunPyhobbit) -> None:
    expected = stock.complete(QUESTION, N_TOKENS)
    done = run_pyhobbit("chat", models.tiny(), "-p", QUESTION, "-n", N_TOKENS, "--pools", "8M", "--temp", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.removesuffix("\n") == expected.removesuffix("\n")
