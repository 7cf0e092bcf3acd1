# SPDX-License-Identifier: MIT
"""The predictors paths and paths-exact, from the command line."""

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from traces import SHAPES, write_recorded, write_trace

from pyhobbit.cli.main import main
from pyhobbit.errors import HobbitError
from pyhobbit.quality.calibration import routes
from pyhobbit.routing.observe import Observations
from pyhobbit.routing.paths import chosen_of, path_table
from pyhobbit.routing.trace import ROUTE, Simulation, read_trace, simulate

TABLES = (0, 1 << 14, 1 << 16, 1 << 18, 1 << 20)


@pytest.mark.parametrize("name", ["paths", "paths-exact"])
def test_paths_are_learnt_from_a_trace(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # four experts in turn: layer 1 chooses the one after layer 0's, and is right from the fifth token on
    rows = [(0, 1, step, layer, 0, (step + layer) % 4, 1.0) for step in range(12) for layer in range(2)]
    path = write_trace(tmp_path / "t.csv", rows, n_layers=2, n_experts=4, n_used=1)
    judged = ("--trace", path, "--policy", "lru", "--capacity", 0, "--set")
    for predictor, right in ((name, 8), ("repeat", 0)):
        assert main(["simulate", "--json", *map(str, judged), f"predictor={predictor}"]) == 0
        (run,) = json.loads(capsys.readouterr().out)["runs"]
        assert (run["predictable"], run["predicted_right"]) == (12, right)


def test_an_earlier_trace_tells_the_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [(0, 1, step, layer, 0, (step + layer) % 4, 1.0) for step in range(12) for layer in range(2)]
    path = write_trace(tmp_path / "t.csv", rows, n_layers=2, n_experts=4, n_used=1)
    judged = (
        "--trace",
        path,
        "--set",
        f"prior={path}",
        "--policy",
        "lru",
        "--capacity",
        0,
        "--set",
        "predictor=paths",
    )
    assert main(["simulate", "--json", *map(str, judged)]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["recall"] == 1


def _routes(*tokens: list[list[int]]) -> np.ndarray:
    """Tokens as their layers' experts."""
    rows = [
        (0, token, layer, expert, 1.0, 1)
        for token, layers in enumerate(tokens)
        for layer, experts in enumerate(layers)
        for expert in experts
    ]
    return np.array(rows, ROUTE)


def test_the_table_by_hand() -> None:
    few = _routes([[2], [0], [1]], [[2], [0], [1]], [[3], [0], [2]])
    frequencies = [0, 3, 0, 0, 2, 2 * 256 + 2, 3 * 256 + 1, 1, 3, 0, 0, 1, 3, 2, 3, 0, 0, 2, 256 + 2, 512 + 1]
    pairs = [2, 3, 1, 0, 2, 0, 256 + 2, 512 + 1, 1, 2, 1, 0, 1, 2, 2, 1, 1, 1, 0, 1, 3, 1]
    paths = [2, 2, 1, 1, 1, 0, 2, 256 + 2, 2, 1, 1, 1, 1, 0, 3, 512 + 1]
    assert list(path_table(chosen_of(few), 4)) == frequencies + pairs + paths
    assert list(path_table(chosen_of(few), 4, 4 * len(frequencies + pairs))) == frequencies + pairs
    assert len(path_table(chosen_of(few), 4, 100)) <= 25
    # shares are kept where there are many tokens, and rare experts left out
    many = _routes(*[[[0], [1]]] * 770, *[[[0], [2]]] * 200, *[[[0], [3]]] * 30)
    assert list(path_table(chosen_of(many), 4, 4 * 13))[6:] == [1, 255, 0, 0, 2, 256 + 196, 512 + 51]


def test_observations_give_the_table_of_their_routes_in_little_memory() -> None:
    experts = np.random.default_rng(1).permuted(np.tile(np.arange(8, dtype=np.int32), (20_000, 3, 1)), axis=2)
    experts[:, 1, 3:] = -1  # a layer that uses fewer
    seen = Observations([0, 2, 3], np.zeros(len(experts)), experts[:, :, :4], None, None, None, np.arange(1))
    tracemalloc.start()
    found = path_table(seen.by_layer(), 8, 1 << 14)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == path_table(chosen_of(routes(seen, slice(None))), 8, 1 << 14)
    assert peak < 12 * np.count_nonzero(seen.experts >= 0)  # bytes; half of what routes take


@pytest.mark.parametrize("name", SHAPES)
def test_a_table_names_more_than_nothing_learnt(name: str, tmp_path: Path) -> None:
    """The second half of a recorded run after the paths of its first half: the figures of docs/results."""
    trace = read_trace(write_recorded(name, tmp_path))
    decoded = trace.routes[trace.routes["counted"] != 0]
    half = int(np.median(decoded["token"]))
    learnt, judged = decoded[decoded["token"] < half], decoded[decoded["token"] >= half]
    base = Simulation(*SHAPES[name], slots_high=0, predictor="paths-exact")

    def found(max_bytes: int, rows: np.ndarray, bar: float = 0.0) -> tuple[float, float]:
        """Recall and precision."""
        paths = path_table(chosen_of(learnt), base.n_experts, max_bytes)
        assert 4 * len(paths) <= max_bytes
        result = simulate(rows, replace(base, paths=paths, prefetch_bar=bar))
        return result.recall or 0.0, result.precision_on_misses or 0.0

    first = judged[judged["token"] < half + 8]
    recalls = [(found(size, first)[0], found(size, judged)[0]) for size in TABLES]
    print(name, *recalls, sep="\n")
    assert recalls == sorted(recalls)
    assert recalls[-1][0] > 1.25 * recalls[0][0]
    decoded["counted"] = decoded["token"] >= half  # learns the first half itself
    assert recalls[-1][1] == pytest.approx(simulate(decoded, base).recall, abs=0.01)
    by_bar = [found(TABLES[-1], judged, bar) for bar in (0.0, 0.2, 0.3, 0.4, 0.5)]
    print(*by_bar, sep="\n")
    assert by_bar == sorted(by_bar, reverse=True) == sorted(by_bar, key=lambda each: each[1])


def test_paths_of_another_model_are_an_error() -> None:
    few = _routes([[2], [0], [1]], [[2], [0], [1]])
    paths = path_table(chosen_of(few), 4)
    with pytest.raises(HobbitError, match="the activation paths are not of these layers and experts"):
        simulate(few[:2], Simulation(2, 3, 1, slots_high=0, predictor="paths", paths=paths))
