# SPDX-License-Identifier: MIT
"""pyhobbit bench: figures of the tiny model, and how they follow from the counters."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import RunPyhobbit

from pyhobbit.cli.bench import decoding
from pyhobbit.cli.main import main
from pyhobbit.engine.stats import CacheStats

OPTIONS = ("--prompts", 8, 40, "-n", 12, "--set", "warm_up=4", "--ctx", 256, "--threads", 1)


def test_the_figures_of_a_model_are_consistent(tiny_gguf: Path, run_pyhobbit: RunPyhobbit) -> None:
    done = run_pyhobbit("bench", tiny_gguf, *OPTIONS, "--pools", "6M", "--set", "t1=1", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    found = document["decoding"]
    assert [prompt["n_tokens"] for prompt in document["prompts"]] == pytest.approx([8, 40], rel=0.3)
    assert all(prompt["seconds"] > 0 for prompt in document["prompts"])
    assert found["n_tokens"] == 12
    assert 0 < found["hit_rate"] < 1
    assert 0 < found["stall_share"] < 1
    assert found["high_share"] == 1
    assert 0 < document["pool_bytes"] <= 6 << 20
    assert document["peak_rss_bytes"] > document["pool_bytes"]
    assert 0 < found["busy_cores"] < 3
    assert found["barrier_share"] == 0  # the thread computes alone


def test_figures_at_a_depth_leave_out_the_tokens_before(tiny_gguf: Path, run_pyhobbit: RunPyhobbit) -> None:
    done = run_pyhobbit("bench", tiny_gguf, *OPTIONS, "--depth", 100, "--pools", "200M", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["depth"] == pytest.approx(100, rel=0.3)
    assert [prompt["n_tokens"] for prompt in document["prompts"]] == pytest.approx([8, 40], rel=0.3)
    assert document["decoding"]["n_tokens"] == 12
    shown = run_pyhobbit("bench", tiny_gguf, *OPTIONS, "--depth", 100, "--pools", "200M")
    assert f"{document['depth']} tokens of context before" in shown.stdout
    full = run_pyhobbit("bench", tiny_gguf, *OPTIONS, "--depth", 250, "--pools", "200M")
    assert full.returncode == 1
    assert "context" in full.stderr


def test_pools_that_hold_every_expert_are_hit(tiny_gguf: Path, run_pyhobbit: RunPyhobbit) -> None:
    done = run_pyhobbit("bench", tiny_gguf, *OPTIONS, "--pools", "200M")
    assert done.returncode == 0, done.stderr
    rows = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert "token/s over 12 tokens" in rows["decoding"]
    assert float(rows["hits"].partition("%")[0]) > 90  # an expert may be used for the first time
    assert re.search(r"experts, [\d.]+ ([KM]i)?B read per token", rows["hits"])


def test_the_time_that_threads_wait_for_each_other_is_shown(
    tiny_gguf: Path, run_pyhobbit: RunPyhobbit
) -> None:
    done = run_pyhobbit("bench", tiny_gguf, *OPTIONS, "--threads", 2, "--pools", "200M")
    assert done.returncode == 0, done.stderr
    row = re.search(r"^processors +([\d.]+) cores busy; computing threads wait (\d+)% of", done.stdout, re.M)
    assert row, done.stdout
    assert 0 < float(row[1]) < 4
    assert 0 < int(row[2]) < 100


def test_usual_prompts_that_the_context_cannot_hold_are_left_out(
    tiny_gguf: Path, run_pyhobbit: RunPyhobbit
) -> None:
    done = run_pyhobbit("bench", tiny_gguf, "--ctx", 100, "-n", 4, "--set", "warm_up=0", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["prompts"]) == 1


def test_the_timeline_of_a_run_explains_its_tokens(
    tiny_gguf: Path, run_pyhobbit: RunPyhobbit, tmp_path: Path
) -> None:
    path = tmp_path / "t.json"
    n = 96  # so that a pause before the first or behind the last token counts little
    options = (*OPTIONS, "-n", n, "--pools", "6M", "--set", "t1=1", "--set", f"timeline={path}", "--json")
    done = run_pyhobbit("bench", tiny_gguf, *options)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    spans = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    parts = document["token_parts_s"]
    assert min(parts.values()) >= 0
    assert {"computing experts", "waiting for reads", "layers outside the cache"} <= set(parts)
    assert sum(parts.values()) == pytest.approx(1 / document["decoding"]["tokens_per_second"], rel=0.25)
    assert {span["args"]["layer"] for span in spans if span["name"] == "layer"} == set(range(6))
    n_read = sum(span["args"]["bytes"] for span in spans if span["name"] == "read")
    assert n_read >= n * document["decoding"]["bytes_read_per_token"]
    assert len({span["tid"] for span in spans}) > 1  # threads that read are there too


def _step(decode_s: float, **counters: Any) -> Any:
    zeros = dict.fromkeys(CacheStats.__dataclass_fields__, 0)
    return SimpleNamespace(decode_s=decode_s, cache=replace(CacheStats(**zeros), **counters))


def test_decoding_follows_from_the_counters() -> None:
    steps = [
        _step(0.2, stall_s=0.1, hits_high=3, misses_high=1, bytes_read=60, bytes_prefetched=40, prefetched=2),
        _step(0.3, stall_s=0.1, hits_low=2, misses_low=2, bytes_read=40, prefetched_used=1),
        _step(0.5, stall_s=0.4),
    ]
    found = decoding(steps, cached=True)
    computed = {"n_tokens": 3, "tokens_per_second": pytest.approx(3)}
    assert found == computed | {
        "hit_rate": 5 / 8,
        "bytes_read_per_token": pytest.approx(100 / 3),
        "stall_share": pytest.approx(0.6),
        "high_share": None,
        "low_share": None,
    }
    assert decoding(steps, cached=False) == computed | dict.fromkeys(found.keys() - computed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompts", "0"], "--prompts is 0; it must be at least 1"),
        (["-n", "0"], "-n is 0; it must be at least 1"),
        (["--depth", "-1"], "--depth is -1; it must be at least 0"),
        (["--set", "warm_up=-1"], "warm_up is -1; it must be at least 0"),
    ],
)
def test_a_wrong_number_is_one_sentence(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "m.gguf", *options]) == 2
    assert message in capsys.readouterr().err
