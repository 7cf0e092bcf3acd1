# SPDX-License-Identifier: MIT
"""bench.clients: that every server answers and each column is filled, not how fast."""

import json
import subprocess
import sys
from pathlib import Path

import models
import pytest

from bench import clients
from bench.harness import system
from bench.harness.files import SHAPES, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        with system.memory_cgroup(None):
            return write_model(tmp_path_factory.mktemp("m"), "tiny", SHAPES["tiny"], "q4_0")
    except system.NoCgroupError as e:
        pytest.skip(str(e))


@pytest.mark.slow
def test_every_server_answers_several_clients(model: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "bench.clients",
        model,
        "--reps",
        1,
        "--tokens",
        8,
        "--ctx",
        1024,
        "--output",
        tmp_path / "out",
    ]
    command += ["--clients", 1, 3, "--limits", 1]
    done = subprocess.run(
        list(map(str, command)), cwd=models.ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    head, *records = map(json.loads, (tmp_path / "out/results.jsonl").read_text().splitlines())
    assert head["model"] == model.name
    found = {(each["arm"], each["clients"]) for each in records}
    assert found == {(arm, n) for arm in clients.ARMS for n in (1, 3)}
    for each in records:
        assert each["gap_95_s"] >= each["gap_s"] > 0
        assert each["rate"] > 0
        assert 0 <= each["same"] <= each["clients"]
        assert (each["hits"] is not None) == (each["arm"] == "ours")
        if each["arm"] == "ours":
            assert each["peak"] <= model.stat().st_size
    single = next(each for each in records if (each["arm"], each["clients"]) == ("ours", 1))
    assert single["same"] == 1  # alone it gets what it gets alone


def test_a_server_that_is_killed_for_its_memory_is_named(model: Path) -> None:
    args = clients.parsed([str(model), "--reps", "1", "--limits", "0.01", "--arms", "ours"])
    (record,) = clients.run(args, print)
    assert "status -9" in record["error"]


def test_the_table_has_medians_of_the_repetitions() -> None:
    base = {name: 1.0 for name, _, _ in clients.COLUMNS.values()} | {"peak": 2e6}
    base |= {"arm": "ours", "limit": 0.5, "clients": 2, "hits": None}
    text = clients.table([base | {"rate": rate} for rate in (1.0, 9.0, 2.0)])
    cells = [cell.strip() for cell in text.rstrip().splitlines()[-1].split("|")[1:5]]
    assert cells == ["ours", "50%", "2", "2.0"]
