# SPDX-License-Identifier: MIT
"""bench.compare --clients: that every server answers and each column is filled, not how fast."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import pytest

from bench import compare
from bench.harness import system, table
from bench.harness.arms import SERVER_ARMS
from bench.harness.files import SHAPES, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        with system.memory_cgroup(None):
            return write_model(tmp_path_factory.mktemp("m"), "tiny", SHAPES["tiny"], "q4_0")
    except system.NoCgroupError as e:
        pytest.skip(str(e))


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_every_server_answers_several_clients(model: Path, tmp_path: Path) -> None:
    given: dict[str, object] = {"--model": model, "--reps": 1, "--tokens": 8, "--limits": 1}
    given |= {"--output": tmp_path / "out", "--stock": models.stock_dir()}
    words = [str(word) for option in given.items() for word in option]
    done = subprocess.run(
        [sys.executable, "-m", "bench.compare", *words, "--clients", "1", "3"],
        cwd=models.ROOT, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    head, *records = _lines(tmp_path / "out")
    assert head["model"] == model.name
    found = {(each["arm"], each["clients"]) for each in records}
    assert found == {(arm, n) for arm in SERVER_ARMS for n in (1, 3)}
    for each in records:
        assert each["gap_95_s"] >= each["gap_s"] > 0
        assert each["tokens_per_second"] > 0
        assert (each["hit_rate"] is not None) == (each["arm"] == "ours")
        if each["arm"] == "ours":
            assert each["peak_bytes"] <= model.stat().st_size
    assert "| clients | token/s |" in done.stdout


def test_a_server_that_is_killed_for_its_memory_is_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(model), "--reps", "1", "--limits", "0.01", "--arms", "ours", "--clients", "2"]
    assert compare.main([*words, "-o", str(tmp_path)]) == 1
    assert "compare: some runs failed: ours at 1%: the server does not get ready" in capsys.readouterr().err
    *_, record = _lines(tmp_path)
    assert "status -9" in record["error"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("2 --warm-up 3", "servers take no warm-up; leave it out, or --clients"),
        ("2 --prompts 16 32", "servers take no second prompt; leave it out, or --clients"),
        ("0 1", "--clients takes positive numbers"),
    ],
)
def test_what_servers_do_not_have_is_refused(
    options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(["--shape", "tiny", "--clients", *options.split()]) == 1
    assert capsys.readouterr().err == f"compare: {message}\n"


def test_the_table_has_medians_of_the_repetitions() -> None:
    base: dict[str, Any] = {name: 1.0 for name, _, _ in table.OWN.values()}
    base |= {"limit": 0.5, "clients": 2, "hit_rate": None}
    records = [base | {"arm": "ours", "tokens_per_second": rate} for rate in (1.0, 9.0, 2.0)]
    records += [base | {"arm": arm, "tokens_per_second": 4.0} for arm in ("stock", "stock-mapped")]
    records[3]["limit"] = None
    cells = table.Results([{"options": {"prompts": [16]}}, *records]).cells((0.5, "ours", 2))
    assert {name: cells[name] for name in ("clients", "token/s", "kept", "to stock", "last first, s")} == {
        "clients": "2", "token/s": "2.00", "kept": "50%", "to stock": "0.50", "last first, s": "1.00",
    }  # fmt: skip
