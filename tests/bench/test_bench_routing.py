# SPDX-License-Identifier: MIT
"""The routing that the bench replays: a trace laid over a model's shape, and a sweep over all experts."""

from pathlib import Path

import numpy as np
import pytest
import traces

from bench.harness import trace as routing
from pyhobbit.routing.trace import read_trace


def test_a_trace_of_the_same_shape_is_replayed_as_it_is(tmp_path: Path) -> None:
    trace = read_trace(traces.write_random_trace(tmp_path / "t.csv", 5, 3, 8, 2))
    laid = routing.lay_over(trace, routing.MoeShape(3, 8, 2))
    rows = trace.routes.reshape(5, 3, 2)
    np.testing.assert_array_equal(laid.experts, rows["expert"])
    np.testing.assert_allclose(laid.weights, rows["weight"] / rows["weight"].sum(axis=2, keepdims=True), 1e-6)


@pytest.mark.parametrize(
    ("n_layers", "n_experts", "n_used"), [(2, 8, 2), (5, 4, 2), (3, 8, 6), (3, 32, 4), (2, 3, 3)]
)
def test_a_trace_of_another_shape_is_laid_over_it(
    tmp_path: Path, n_layers: int, n_experts: int, n_used: int
) -> None:
    trace = read_trace(traces.write_random_trace(tmp_path / "t.csv", 9, 3, 8, 2))
    shape = routing.MoeShape(n_layers, n_experts, n_used)
    laid = routing.lay_over(trace, shape)
    assert laid.experts.shape == (9, n_layers, n_used)
    assert laid.experts.min() >= 0
    assert laid.experts.max() < n_experts
    assert all(len(set(chosen)) == n_used for chosen in laid.experts.reshape(-1, n_used).tolist())
    assert (laid.weights > 0).all()
    np.testing.assert_allclose(laid.weights.sum(axis=2), 1, 1e-5)
    again = routing.lay_over(trace, shape)
    np.testing.assert_array_equal(again.experts, laid.experts)


def test_further_ranks_come_from_the_layer_half_the_trace_away(tmp_path: Path) -> None:
    """Layers 0 and 1 choose 0, 1 and 2, 1: rank by rank, then the other layer's from the last rank on."""
    rows = [
        (0, 1, 0, 0, 0, 0, 0.6), (0, 1, 0, 0, 1, 1, 0.4),
        (0, 1, 0, 1, 0, 2, 0.7), (0, 1, 0, 1, 1, 1, 0.3),
    ]  # fmt: skip
    trace = read_trace(traces.write_trace(tmp_path / "t.csv", rows, 2, 4, 2))
    laid = routing.lay_over(trace, routing.MoeShape(2, 4, 4))
    assert laid.experts[0, 0].tolist() == [0, 1, 2, 3]  # 3: none of the trace's, so what follows the last
    np.testing.assert_allclose(laid.weights[0, 0], np.array([0.6, 0.4, 0.4, 0.4]) / 1.8, 1e-6)
    assert laid.experts[0, 1].tolist() == [2, 1, 0, 3]


def test_a_sweep_chooses_every_expert() -> None:
    swept = routing.sweep(routing.MoeShape(2, 10, 4)).experts
    assert swept.shape == (3, 2, 4)
    for layer in range(2):
        assert set(swept[:, layer].ravel().tolist()) == set(range(10))
