# SPDX-License-Identifier: MIT
"""llama-server from the package runs a file with tiers through the expert cache, without a flag."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import models
import pytest
from conftest import RunPyhobbit
from servers import PROMPT, START_TIMEOUT_S, Server, running


@contextmanager
def serving(model: Path, log: Path, *options: str) -> Iterator[Server]:
    """llama-server itself, without `pyhobbit serve`."""
    verbose = ("-lv", "4")  # shows the library's log
    command = [models.bin_dir() / "llama-server", "-m", model, "-c", "512", *verbose, *options]
    with running(command, log) as server:
        yield server


def test_file_with_tiers_uses_the_cache_without_a_flag(
    tiny_gguf: Path, tmp_path: Path, run_pyhobbit: RunPyhobbit
) -> None:
    log = tmp_path / "server.log"
    with serving(tiny_gguf, log, "-np", "1") as server:
        text = server.complete()
    assert re.search(r"hobbit: high-precision pool of \d+ of 48 experts", log.read_text(errors="replace"))

    chat = run_pyhobbit("chat", tiny_gguf, "-p", PROMPT, "-n", 32, "--temp", 0)
    assert chat.returncode == 0, chat.stderr
    assert chat.stdout.rstrip("\n") == text.rstrip("\n")


def test_pools_can_be_set_as_key_value_overrides(tiny_gguf: Path, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with serving(tiny_gguf, tmp_path / "default.log", "-np", "1") as server:
        expected = server.complete()
    with serving(tiny_gguf, log, "-np", "1", "--override-kv", "hobbit.pools=int:2000000") as server:
        assert server.complete() == expected
    slots = re.search(r"hobbit: high-precision pool of (\d+) of 48 experts", log.read_text(errors="replace"))
    assert slots
    assert int(slots[1]) < 48


def test_embeddings_are_stocks(tmp_path: Path) -> None:
    options = ("-m", models.tiny(), "-c", 512, "-np", 1, "-t", 2, "--embeddings", "--pooling", "mean")
    cache = ("--override-kv", "hobbit.enable=bool:true,hobbit.pools=int:3000000")
    found = []
    for folder, more in ((models.stock_dir(), ()), (models.bin_dir(), cache)):
        command = [folder / "llama-server", *options, "--no-repack", *more]
        with running(command, tmp_path / "log") as server:
            answer = server.request("/v1/embeddings", {"input": [PROMPT, "class Node:", "import os\n" * 20]})
            found.append([each["embedding"] for each in answer.json["data"]])
            misses = server.cache()["misses_high"] if more else 1
    assert misses > 0
    assert len(found[0]) == 3
    assert found[0][0] != found[0][1]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("hobbit.pool=int:1", "unknown setting hobbit.pool"),
        ("hobbit.requests=float:2", "the override of hobbit.requests is of type float and must be int"),
        ("hobbit.policy=int:2", "the override of hobbit.policy is of type int and must be str"),
        ("hobbit.t1=bool:true", "the override of hobbit.t1 is of type bool and must be float"),
        ("hobbit.enable=int:1", "the override of hobbit.enable is of type int and must be bool"),
    ],
)
def test_a_setting_of_another_name_or_type_is_refused(tiny_gguf: Path, setting: str, sentence: str) -> None:
    command = [models.bin_dir() / "llama-server", "-m", tiny_gguf, "--override-kv", setting]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S)
    assert done.returncode != 0
    assert sentence in done.stderr
