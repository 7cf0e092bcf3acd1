# SPDX-License-Identifier: MIT
"""The predictors paths and paths-exact, from the command line."""

import json
from pathlib import Path

import pytest
from traces import write_trace

from pyhobbit.cli.main import main


@pytest.mark.parametrize("name", ["paths", "paths-exact"])
def test_paths_are_learnt_from_a_trace(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # four experts in turn: layer 1 chooses the one after layer 0's, and is right from the fifth token on
    rows = [(0, 1, step, layer, 0, (step + layer) % 4, 1.0) for step in range(12) for layer in range(2)]
    path = write_trace(tmp_path / "t.csv", rows, n_layers=2, n_experts=4, n_used=1)
    judged = ("--trace", path, "--policy", "lru", "--capacity", 0, "--predictor")
    for predictor, right in ((name, 8), ("repeat", 0)):
        assert main(["simulate", "--json", *map(str, judged), predictor]) == 0
        (run,) = json.loads(capsys.readouterr().out)["runs"]
        assert (run["predictable"], run["predicted_right"]) == (12, right)
