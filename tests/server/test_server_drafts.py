# SPDX-License-Identifier: MIT
"""llama-server's own drafts through the expert cache: answers and acceptance are those without a cache."""

import sys
from pathlib import Path
from typing import Any

import architecture_file
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


@pytest.fixture(scope="module", params=["qwen35moe", "glm-dsa", "deepseek2", "glm4moe"])
def with_head(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Random weights, whose last layer with routed experts drafts the next tokens (MTP)."""
    return architecture_file.with_head(request.param, tmp_path_factory.mktemp("head") / "m.gguf")


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


def test_a_draft_head_that_nobody_loads_has_no_slots(
    with_head: Path, tmp_path: Path, run_pyhobbit: RunPyhobbit
) -> None:
    slots = []
    for name, head in (("none", ()), ("head", HEAD)):
        with serving(with_head, tmp_path / name, "--pools", "60M", *PLAIN, *head) as server:
            cache = server.cache()
            slots.append(cache["pool_slots_high"])
    assert slots == [(cache["n_layers"] - 1) * cache["n_experts"], cache["n_layers"] * cache["n_experts"]]
    shown = run_pyhobbit("inspect", with_head, "--no-speed", "--pools", "60M")
    assert f"all {slots[0]}" in shown.stdout, shown.stdout


def test_a_limit_of_the_process_holds_with_a_draft_head(with_head: Path, tmp_path: Path) -> None:
    limit = 400 << 20
    options = ("--memory", limit, "--ctx-size", 512, "--parallel", 2, *HEAD)
    with serving(with_head, tmp_path / "log", *options) as server:
        assert all(n_drafted > N_TOKENS for _, n_drafted, _ in _answers(server))
        server.complete(PROMPT * 9)
        assert server.cache()["pool_bytes_high"] > 0
        assert server.peak() <= limit + (8 << 20)


def test_a_draft_head_that_nobody_has_measured_has_no_part_of_a_limit(
    with_head: Path, run_pyhobbit: RunPyhobbit
) -> None:
    options = ("--memory", "400M", "--batch-size", 1024, *PLAIN, *HEAD)  # the plan is left out
    done = run_pyhobbit("serve", with_head, *options, "--port", 0, timeout=120)
    assert done.returncode == 1
    assert "has no room for a second one: give hobbit.pools in its place" in done.stderr


@pytest.mark.parametrize("name", ["qwen35moe", "glm4moe", "deepseek4"])
def test_a_head_that_is_announced_and_absent_is_left_out(
    name: str, tmp_path: Path, run_pyhobbit: RunPyhobbit
) -> None:
    model = tmp_path / "m.gguf"
    if name == "deepseek4":  # llama.cpp makes no draft block of it from its metadata
        keys = {"block_count": 5, "nextn_predict_layers": 1, "attention.compress_ratios": [0, 0, 4, 128, 0]}
        architecture_file.write(name, model, r"^blk\.4\.", **keys)
    else:
        architecture_file.with_head(name, model, r"^blk\.4\.")
    with serving(model, tmp_path / "log", "--pools", "3M", *PLAIN) as server:
        assert len(_answers(server)) == len(PROMPTS)
    done = run_pyhobbit("serve", model, "--pools", "3M", *HEAD, timeout=120)
    assert done.returncode == 1
    assert "announces a draft head (MTP) and does not hold it" in done.stderr


def test_the_table_of_drafts_by_n_grams_is_planned(tmp_path: Path, run_pyhobbit: RunPyhobbit) -> None:
    model = architecture_file.with_head("qwen35moe", tmp_path / "m.gguf")
    drafts = ("--spec-type", "draft-mtp,ngram-mod")
    limit = 150 << 20
    command = [sys.executable, "-m", "pyhobbit", "serve", model, "--memory", limit, *drafts]
    with running(command, tmp_path / "log") as server:
        _answers(server)
        assert server.peak() <= limit + (8 << 20)
    less = run_pyhobbit("serve", model, "--memory", "120M", *drafts, "--port", 0, timeout=120)
    assert less.returncode == 1  # it suffices without the table of 16 MiB
    assert "the smallest that works is" in less.stderr
