# SPDX-License-Identifier: MIT
"""The policy static in simulations: it needs the uses of an earlier run."""

import json
from pathlib import Path
from typing import Any

import pytest
from traces import letters, write_trace

from pyhobbit.cli.main import main
from pyhobbit.errors import HobbitError
from pyhobbit.routing.trace import Simulation, policy_names, read_trace, simulate


def _error(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["simulate", *map(str, arguments)]) != 0
    return capsys.readouterr().err


def _json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["simulate", "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def test_static_needs_a_prior(tmp_path: Path) -> None:
    assert set(policy_names()) - set(policy_names(has_prior=False)) == {"static"}
    path = write_trace(tmp_path / "t.csv", letters("ABCCAB"), n_layers=1, n_experts=4, n_used=1)
    options = Simulation(1, 4, 1, slots_high=2, policy="static")
    with pytest.raises(HobbitError, match="the policy static needs the uses of an earlier run"):
        simulate(read_trace(path).routes, options)


def test_static_keeps_what_the_earlier_run_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {"n_layers": 1, "n_experts": 4, "n_used": 1}
    path = write_trace(tmp_path / "t.csv", letters("ABCCAB"), **shape)
    before = write_trace(tmp_path / "before.csv", letters("cccAABBD"), **shape)
    given = ("--trace", path, "--capacity", 0.5, "--policy", "static", "lru")
    assert "give a prior, such as its trace" in _error(capsys, *given)
    static, lru = _json(capsys, *given, "--set", f"prior={before}")["runs"]
    # the pool begins with A and B, the most used in decoding; C passes through in A's place
    assert (static["misses_high"], lru["misses_high"]) == (2, 3)
    everything = _json(capsys, "--trace", path, "--capacity", 0.5)["runs"]
    assert "static" not in [run["policy"] for run in everything]
    other = write_trace(tmp_path / "other.csv", letters("AB"), n_layers=1, n_experts=8, n_used=1)
    assert "is a trace of another model" in _error(capsys, *given, "--set", f"prior={other}")
