# SPDX-License-Identifier: MIT
"""The cache that a calibration fits to a text: weights and the division of the pools."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from pyhobbit.quality.calibration import routes
from pyhobbit.quality.fit import CacheFitter, fit_weights
from pyhobbit.routing.observe import Observations
from pyhobbit.routing.trace import ROUTE, Simulation, simulate

LOW_COST = 0.25


def test_weights_are_found_near_the_minimum() -> None:
    target = np.array([0.55, 0.1, 0.3, 0.05])
    found = fit_weights(lambda weights: float(np.square(np.array(weights) - target).sum()))
    assert sum(found) == pytest.approx(1)
    assert min(found) >= 0
    assert np.abs(np.array(found) - target).max() <= 1 / 8


def test_a_cache_that_weights_cannot_help_keeps_the_first() -> None:
    assert fit_weights(lambda _weights: 1.0) == (1.0, 0.0, 0.0, 0.0)


BASE = Simulation(3, 8, 2, slots_high=0, floors=True, t1=0.6, bits_high=1, bits_low=LOW_COST)


@pytest.mark.parametrize("low_share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("capacity", [0.01, 0.1, 0.4, 1.0])
def test_pools_keep_their_budget_and_hold_a_tokens_experts(capacity: float, low_share: float) -> None:
    found = replace(BASE, low_share=low_share).with_slots(capacity)
    high, low = found.slots_high, found.slots_low
    assert 2 <= high <= 24
    assert 2 <= low <= 24
    assert high + LOW_COST * low <= max(24 * capacity, 2 * (1 + LOW_COST)) + 1e-9


def test_without_low_precision_there_is_one_pool() -> None:
    for capacity, n_slots in ((0.5, 12), (0.01, 2)):
        found = replace(BASE, t1=1.0, low_share=0.3).with_slots(capacity)
        assert (found.slots_high, found.slots_low) == (n_slots, 0)


def _seen(n_tokens: int = 400) -> Observations:
    """Layers 0 to 2; a token prefers the experts of its sequence."""
    rng = np.random.default_rng(3)
    sequences = np.repeat(np.arange(n_tokens // 100), 100)
    popularity = rng.dirichlet(np.full(8, 0.4), size=(sequences.max() + 1, 3)) + 1e-6
    experts = np.empty((n_tokens, 3, 2), np.int32)
    for token, layer in product(range(n_tokens), range(3)):
        p = popularity[sequences[token], layer]
        experts[token, layer] = rng.choice(8, 2, replace=False, p=p / p.sum())
    weights = np.sort(rng.dirichlet(np.ones(2), size=(n_tokens, 3)), axis=2)[..., ::-1].astype(np.float32)
    return Observations([0, 1, 2], sequences, experts, weights, None, None, np.arange(0))


def test_routes_are_tokens_then_layers_then_ranks() -> None:
    seen = _seen(200)
    found = routes(seen, slice(90, 110))
    assert found.dtype == ROUTE
    assert found.size == 20 * 3 * 2
    row = found[(15 * 3 + 1) * 2 + 1]
    assert (row["sequence"], row["token"], row["layer"], row["counted"]) == (1, 105, 1, 1)
    assert row["expert"] == seen.experts[105, 1, 1]
    assert row["weight"] == seen.weights[105, 1, 1]


def test_the_fitted_cache_is_no_worse_than_lru_and_the_same_again() -> None:
    seen = _seen()
    first = routes(seen, slice(0, 200))
    counts = []
    fitter = CacheFitter(BASE, first, lambda: counts.append(1))
    low_share = fitter.low_share()
    weights = fitter.weights(low_share)
    assert 0 < low_share < 1
    assert counts
    again = CacheFitter(BASE, first, lambda: None)
    assert (again.low_share(), again.weights(low_share)) == (low_share, weights)
    cache = replace(BASE, low_share=low_share).with_slots(0.2)
    fitted, lru = replace(cache, policy="hobbit", weights=weights), replace(cache, policy="lru")
    assert simulate(first, fitted).penalty < simulate(first, lru).penalty
