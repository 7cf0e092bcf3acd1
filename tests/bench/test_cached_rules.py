# SPDX-License-Identifier: MIT
"""bench/cached_rules.py: rules and cache of the study on many experts, by hand."""

from __future__ import annotations

from types import ModuleType

import bench_scripts
import numpy as np
import pytest

SKIP, LOW, HIGH = 0, 1, 2
WEIGHTS = np.array([[0.5, 0.3, 0.2]])
NONE = np.zeros((1, 3), bool)


@pytest.fixture(scope="module")
def rules() -> ModuleType:
    return bench_scripts.load("cached_rules")


def test_gate_is_eq_2_and_better_resident_versions_serve(rules: ModuleType) -> None:
    experts = np.array([[4, 5, 6]])
    decide = rules.gate(0.0, 0.5)  # 0, 0.5 and 0.8 rank before the three
    assert decide(rules.Uses(0, experts, WEIGHTS, NONE, NONE)).tolist() == [[HIGH, LOW, SKIP]]
    high, low = np.array([[False, True, False]]), np.array([[True, False, True]])
    assert decide(rules.Uses(0, experts, WEIGHTS, high, low)).tolist() == [[HIGH, HIGH, LOW]]


@pytest.mark.parametrize(
    ("price", "expected"),
    [
        (0.0, [HIGH, HIGH, HIGH]),
        (0.06, [HIGH, LOW, LOW]),  # low: 0.1, 0.036, 0.016 lost for 0.75 * 0.06 = 0.045 saved
        (0.1, [HIGH, LOW, SKIP]),  # skipping the last: 0.04 lost; low costs 0.016 + 0.025
        (1e9, [LOW, SKIP, SKIP]),
    ],
)
def test_price_weighs_bytes_against_costs(rules: ModuleType, price: float, expected: list[int]) -> None:
    costs = rules.Costs(np.array([9.0, 0.4]), np.array([9.0, 1.0]))
    uses = rules.Uses(1, np.array([[4, 5, 6]]), WEIGHTS, NONE, NONE)
    assert rules.price(price, costs, 0.25)(uses).tolist() == [expected]


def test_what_is_resident_has_no_price(rules: ModuleType) -> None:
    costs = rules.Costs(np.array([0.4]), np.array([1.0]))
    high, low = np.array([[False, False, True]]), np.array([[False, True, False]])
    uses = rules.Uses(0, np.array([[4, 5, 6]]), WEIGHTS, high, low)
    assert rules.price(0.04, costs, 0.25)(uses).tolist() == [[HIGH, LOW, HIGH]]


def test_the_least_recently_used_version_leaves(rules: ModuleType) -> None:
    cache = rules.LayerCache(2.25, 8, 0.25)
    for expert, precision in ((0, HIGH), (1, HIGH), (2, LOW), (0, HIGH), (3, SKIP), (4, LOW)):
        cache.use(expert, precision)
    assert np.flatnonzero(cache.resident[HIGH]).tolist() == [0]
    assert np.flatnonzero(cache.resident[LOW]).tolist() == [2, 4]
    assert cache.loaded == 2.5


def test_near_ties_take_resident_experts_within_the_margin(rules: ModuleType) -> None:
    scores = np.array([4.0, 3.0, 2.9, 2.0, 0.0])
    resident = np.array([False, False, True, True, False])
    ids = np.array([0, 1])
    assert rules.near_ties(scores, ids, resident, 0.02).tolist() == [0, 1]  # 0.08 is too little
    assert rules.near_ties(scores, ids, resident, 0.05).tolist() == [0, 2]
    assert rules.near_ties(scores, ids, resident, 0.9).tolist() == [0, 2]  # the first one is kept


def test_a_policy_counts_loads_and_gives_a_near_tie_its_own_weight(rules: ModuleType) -> None:
    probs = np.array([[0.5, 0.1, 0.3, 0.1], [0.5, 0.3, 0.2, 0.0001]])
    ids = np.array([[0, 2], [0, 1]])
    weights = np.array([[0.625, 0.375], [0.625, 0.375]])
    policy = rules.Policy(rules.ALL_HIGH, share=0.75, margin=0.1)
    experts, given, precisions = policy.decide(0, probs, ids, weights, 0.25)
    assert experts.tolist() == [[0, 2], [0, 2]]
    assert given[1].tolist() == pytest.approx([5 / 7, 2 / 7])
    assert (precisions == HIGH).all()
    assert (policy.loaded, policy.n_uses) == (2.0, 4)
