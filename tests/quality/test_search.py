# SPDX-License-Identifier: MIT
"""The search for thresholds, on invented models."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from pyhobbit.quality.evaluate import Quality, upper_bound
from pyhobbit.quality.search import (
    Bound,
    Trials,
    cheapest_that_holds,
    cheapest_thresholds,
    expected_cost,
    threshold_candidates,
)
from pyhobbit.routing.rules import unimportance

LOW_COST = 0.25

T1S = [i / 20 for i in range(20)]
T2S = [i / 10 for i in range(11)]


def _cost(t1: float, t2: float) -> float:
    return t1 + LOW_COST * (t2 - t1)


def _loss(skip_cost: float) -> Callable[[float, float], float]:
    """Grows with rank; of skipping it is skip_cost times that of low precision."""
    return lambda t1, t2: ((1 - t1) ** 2 - (1 - t2) ** 2) + skip_cost * (1 - t2) ** 2


@pytest.mark.parametrize(("skip_cost", "bound"), [*product((1.5, 5, 40), (0.01, 0.1, 0.3, 0.8))])
def test_thresholds_are_the_cheapest_of_all_that_hold(skip_cost: float, bound: float) -> None:
    loss = _loss(skip_cost)
    found = cheapest_thresholds(T1S, T2S, _cost, lambda t1, t2: loss(t1, t2) <= bound)
    candidates = [(t1, t2) for t1, t2 in product([*T1S, 1.0], T2S) if t1 <= t2]
    best = min((pair for pair in candidates if loss(*pair) <= bound), key=lambda pair: _cost(*pair))
    assert loss(*found) <= bound
    assert _cost(*found) == pytest.approx(_cost(*best))


def test_thresholds_take_few_measurements() -> None:
    asked = []

    def holds(t1: float, t2: float) -> bool:
        asked.append((t1, t2))
        return _loss(5)(t1, t2) <= 0.3

    cheapest_thresholds([i / 64 for i in range(64)], T2S, _cost, holds)
    assert len(set(asked)) < 30


def test_nothing_holds_means_everything_high() -> None:
    assert cheapest_thresholds(T1S, T2S, _cost, lambda _t1, _t2: False) == (1.0, 1.0)
    assert cheapest_thresholds([], [1.0], _cost, lambda _t1, _t2: True) == (1.0, 1.0)


def test_everything_holds_means_the_best_experts_only() -> None:
    assert cheapest_thresholds(T1S, T2S, _cost, lambda _t1, _t2: True) == (0.0, 0.0)


@pytest.fixture
def scores() -> np.ndarray:
    weights = np.random.default_rng(2).dirichlet(np.ones(4), size=(50, 3)).astype(np.float32)
    return unimportance(weights)


def _share_high(scores: np.ndarray, t1: float) -> float:
    return float(np.mean((scores <= t1) | (t1 >= 1)))


def _share_skipped(scores: np.ndarray, t2: float) -> float:
    return float(np.mean((scores > t2) & (t2 < 1)))


@pytest.mark.parametrize(("t1", "t2"), [(0, 0), (0, 1), (0.4, 0.8), (0.8, 0.8), (1, 1), (0.5, 1)])
def test_expected_cost_is_that_of_the_decisions(scores: np.ndarray, t1: float, t2: float) -> None:
    high, skipped = _share_high(scores, t1), _share_skipped(scores, t2)
    cost = expected_cost(np.sort(scores, axis=None), LOW_COST, t1, t2)
    assert cost == pytest.approx(high + LOW_COST * (1 - high - skipped))


def test_candidates_cover_all_mixes(scores: np.ndarray) -> None:
    t1s, t2s = threshold_candidates(scores)
    assert all(0 <= value < 1 for value in t1s + t2s)
    assert sorted(t1s) == t1s
    highs = [_share_high(scores, t1) for t1 in t1s]
    assert highs[0] == 0.25  # each token's best
    assert np.diff([*highs, 1.0]).max() < 0.03
    skipped = sorted(_share_skipped(scores, t2) for t2 in t2s)
    assert skipped[0] < 0.01
    assert skipped[-1] == 0.75


def test_a_model_with_one_expert_per_token_has_no_candidates() -> None:
    assert threshold_candidates(np.zeros((5, 2, 1))) == ([], [])


#
# the check on other text
#


def _quality(price: float, kl: float) -> Quality:
    """The upper bound is a fifth above the mean."""
    return Quality({"price": price}, 1, 1, kl, *[0.0] * 7, 1.2 * kl)


class Part:
    """Text on which a price costs as much divergence as it is high, times a factor."""

    rule = "price"

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.prices: list[float] = []

    def measure(self, *_: object, price: float = 0.0) -> Quality:
        self.prices.append(price)
        return _quality(price, self.factor * price)

    def cheapest(self, bound: Bound) -> Quality:
        prices = np.linspace(0, 1, 1001)
        return self.measure(price=max(p for p in prices if bound.holds(self.measure(price=p))))


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.3, 4.0])
def test_the_bound_shrinks_until_the_other_part_keeps_it(factor: float) -> None:
    bound = Bound(0.1, is_sure=True)
    fit, other = Part(1.0), Part(factor)
    check = Trials(other, [], np.empty(0))
    found, checked = cheapest_that_holds(fit.cheapest, Trials(fit, [], np.empty(0)), check, bound)
    assert bound.holds(checked)
    assert checked.numbers == found.numbers
    # little more than needed is given up
    assert found.numbers["price"] == pytest.approx(min(1, 1 / factor) / 12, rel=0.1)
    assert len(other.prices) == (1 if factor <= 1 else 2)


def test_where_nothing_holds_all_stays_high_after_few_checks() -> None:
    class Noisy(Part):
        def measure(self, *_: object, price: float = 0.0) -> Quality:
            self.prices.append(price)
            return _quality(price, 0.0 if price == 0 else 1.0)

    fit, other = Part(1.0), Noisy(1.0)
    parts = Trials(fit, [], np.empty(0)), Trials(other, [], np.empty(0))
    found, checked = cheapest_that_holds(fit.cheapest, *parts, Bound(0.5, is_sure=True))
    assert (found.numbers, checked.numbers, checked.mean_kl) == ({"price": 0}, {"price": 0}, 0)
    assert len(other.prices) <= 7


def test_a_mean_lies_below_its_upper_bound_as_often_as_stated() -> None:
    for n, t in ((3, 2.9200), (4, 2.3534), (8, 1.8946), (16, 1.7531)):  # Student's, tables
        values = np.arange(n, dtype=float)
        wanted = values.mean() + t * values.std(ddof=1) / np.sqrt(n)
        assert upper_bound(list(values)) == pytest.approx(wanted, rel=0.01)
    rng = np.random.default_rng(5)
    kept = np.mean([upper_bound(list(rng.gamma(8.0, size=16))) >= 8 for _ in range(4000)])
    assert 0.91 < kept < 0.96  # a skewed mean of texts is above somewhat more often
    assert upper_bound([1.0, 2.0]) == np.inf
    assert upper_bound([0.0] * 4) == 0
