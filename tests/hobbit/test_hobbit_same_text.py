# SPDX-License-Identifier: MIT
"""Everything in high precision, every way to run a model writes what stock llama.cpp writes."""

from contextlib import AbstractContextManager
from pathlib import Path

import models
import pytest
from conftest import RunPyhobbit
from servers import Server, running

from pyhobbit import Hobbit

PROMPTS = (
    "def read_file(path):\n",
    "import os\n\nclass Node:\n    def __init__(self, ",
    "# größer als 10 €: 🙂\n",
)
N_TOKENS = 48
POOLS = 3 << 20  # a sixth of the experts


def _serving(folder: Path, model: Path, log: Path, *options: object) -> AbstractContextManager[Server]:
    """The llama-server of a folder."""
    command = [folder / "llama-server", "-m", model, "-c", 512, "-np", 1]
    return running([*command, *options], log)


@pytest.fixture(scope="module")
def stock_texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The text of stock llama.cpp's server, on the plain file that equals the high tier."""
    log = tmp_path_factory.mktemp("stock") / "log"
    with _serving(models.stock_dir(), models.tiny(), log) as server:
        texts = [server.complete(prompt, N_TOKENS) for prompt in PROMPTS]
    assert len(set(texts)) == len(texts)
    assert min(map(len, texts)) > N_TOKENS / 2
    return texts


def test_hobbit_writes_what_stock_llama_cpp_writes(stock_texts: list[str], tiny_gguf: Path) -> None:
    with Hobbit(tiny_gguf, pools=POOLS, verbose=False) as model:
        texts = [
            model(prompt, max_tokens=N_TOKENS, temperature=0.0)["choices"][0]["text"] for prompt in PROMPTS
        ]
        assert model.stats().cache.evictions > 0
    assert texts == stock_texts


def test_chat_writes_what_stock_llama_cpp_writes(
    stock_texts: list[str], tiny_gguf: Path, run_pyhobbit: RunPyhobbit
) -> None:
    for prompt, text in zip(PROMPTS, stock_texts, strict=True):
        done = run_pyhobbit("chat", tiny_gguf, "-p", prompt, "-n", N_TOKENS, "--temp", 0, "--pools", POOLS)
        assert done.returncode == 0, done.stderr
        assert done.stdout.rstrip("\n") == text.rstrip("\n")


def test_the_server_writes_what_stock_llama_cpp_writes(
    stock_texts: list[str], tiny_gguf: Path, tmp_path: Path
) -> None:
    pools = f"hobbit.pools=int:{POOLS}"
    with _serving(models.bin_dir(), tiny_gguf, tmp_path / "log", "--override-kv", pools) as server:
        assert [server.complete(prompt, N_TOKENS) for prompt in PROMPTS] == stock_texts
