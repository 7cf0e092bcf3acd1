# SPDX-License-Identifier: MIT
"""llama-server's own drafts through the expert cache: answers and acceptance are those without a cache."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import pytest
from conftest import RunPyhobbit
from servers import PROMPT, Server, running, serving

N_TOKENS = 48
PROMPTS = (PROMPT * 6, "for i in range(10):\n    print(i)\n" * 4)
N_GRAM = (
    *("--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", 3),
    *("--spec-ngram-mod-n-min", 1, "--spec-ngram-mod-n-max", 3),
)
HEAD = ("--spec-type", "draft-mtp", "--spec-draft-n-max", 3)
PLAIN = ("--no-repack", "--parallel", 1, "--ctx-size", 512)  # stock llama.cpp's bits


@pytest.fixture(scope="module")
def with_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, whose last layer with routed experts drafts the next tokens (MTP)."""
    folder = tmp_path_factory.mktemp("head")
    script = models.ROOT / "tests/engine/architecture_run.py"
    command = [sys.executable, script, "--lib-dir", models.stock_dir(), "--folder", folder, "glm4moe"]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    return folder / "glm4moe.gguf"


def _answers(server: Server) -> list[tuple[str, int, int]]:
    """Greedy texts, with the drafted tokens and those that were accepted."""
    found = []
    for prompt in PROMPTS:
        body = {"prompt": prompt, "n_predict": N_TOKENS, "temperature": 0, "ignore_eos": True}
        answer: Any = server.request("/completion", body).json
        timings = answer["timings"]
        found.append((answer["content"], timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)))
    return found


def _without_cache(model: Path, log: Path, *options: object) -> list[tuple[str, int, int]]:
    command = (models.bin_dir() / "llama-server", "-m", model, *PLAIN, *options)
    with running(command, log) as server:
        assert server.cache() == {"cached": False}
        return _answers(server)


@pytest.mark.parametrize("kind", ["n-gram", "draft model"])
def test_drafts_leave_the_text_as_it_is(tmp_path: Path, kind: str) -> None:
    model = models.tiny()
    itself = ("--spec-type", "draft-simple", "--spec-draft-model", model, "--spec-draft-n-max", 3)
    drafts = N_GRAM if kind == "n-gram" else itself
    with serving(model, tmp_path / "none", "--pools", "6M", *PLAIN) as server:
        expected = [text for text, _, _ in _answers(server)]
    with serving(model, tmp_path / "log", "--pools", "6M", *PLAIN, *drafts) as server:
        found = _answers(server)
        assert server.cache()["misses_high"] > 0
    assert [text for text, _, _ in found] == expected
    assert sum(accepted for _, _, accepted in found) > N_TOKENS // 4
    assert found == _without_cache(model, tmp_path / "uncached", *drafts)


def test_the_experts_of_a_draft_head_are_in_the_cache(with_head: Path, tmp_path: Path) -> None:
    options = ("--pools", "3M", "--prefetch", 0, *PLAIN)
    with serving(with_head, tmp_path / "none", *options) as server:
        _answers(server)
        assert server.cache()["hits_by_layer"][-1] == server.cache()["misses_by_layer"][-1] == 0
    with serving(with_head, tmp_path / "log", *options, *HEAD) as server:
        found = _answers(server)
        assert server.cache()["misses_by_layer"][-1] > 0
    assert all(n_drafted > N_TOKENS for _, n_drafted, _ in found)
    # not the text without drafts: random weights like several tokens alike, and kernels round by the batch
    assert found == _without_cache(with_head, tmp_path / "uncached", *HEAD)


def test_a_draft_head_has_no_part_of_a_limit_of_the_process(
    with_head: Path, run_pyhobbit: RunPyhobbit
) -> None:
    done = run_pyhobbit("serve", with_head, "--memory", "400M", *PLAIN, *HEAD, "--port", 0, timeout=120)
    assert done.returncode == 1
    assert "has no room for a second one: give hobbit.pools in its place" in done.stderr
