# SPDX-License-Identifier: MIT
"""Codes that are cut, and what a cache of versions reads, worked by hand."""

from types import SimpleNamespace
from typing import Any

import ideas
import numpy as np
import pytest

ROWS = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)


@pytest.mark.parametrize(("kind", "n_bits"), [("q4_0", 4), ("q8_0", 8)])
def test_cut_codes_differ_by_their_lower_half_alone(kind: str, n_bits: int) -> None:
    whole, upper = (of(ROWS).reshape(-1, 32) for of in (ideas.plain(kind), ideas.cut(n_bits)))
    most = 2 ** (n_bits - 1) - (n_bits == 8)
    step = np.abs(whole).max(1, keepdims=True) / most
    off = np.abs(whole - upper) / step
    assert off.max() == pytest.approx((2 ** (n_bits // 2) - 1) / 2, abs=0.01)
    assert off.min() == pytest.approx(0.5, abs=0.01)


def moe(*versions: ideas.Version) -> Any:
    return SimpleNamespace(versions=versions, n_layers=1, n_experts=4, n_used=1)


def uses(*pairs: tuple[int, int]) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """One chunk of one layer: a token's expert and version."""
    experts, versions = np.array(pairs).T[..., None]
    return [[(experts, versions)]]


def test_a_better_version_serves_and_planes_are_read_once() -> None:
    raised, served = uses((0, 1), (0, 0)), uses((0, 0), (0, 1))
    two = moe(ideas.Q4, ideas.TWO)
    assert ideas.read_bits(two, raised, 1.0) == (2.5 + 4.5) / 2
    assert ideas.read_bits(two, served, 1.0) == 4.5 / 2
    planes = moe(ideas.Q4_BOTH, ideas.Q4_CUT)
    assert ideas.read_bits(planes, raised, 1.0) == ideas.read_bits(planes, served, 1.0) == 4.5 / 2


def test_a_full_cache_forgets_what_was_used_longest_ago_and_skipped_uses_read_nothing() -> None:
    room_for_two = 0.5
    found = ideas.read_bits(
        moe(ideas.Q4), uses((0, 0), (1, 0), (0, 0), (2, 0), (1, 0), (0, -1)), room_for_two
    )
    assert found == 4 * 4.5 / 6


def test_eq_2_keeps_high_until_the_better_experts_weigh_the_threshold() -> None:
    weights = np.array([[0.5, 0.3, 0.2]])
    trial: Any = SimpleNamespace(moe=SimpleNamespace(use=lambda _versions: None), chunks=[])
    trial.all_first = lambda chunks: chunks
    trial.measured = lambda _chunks, _references, decide: decide(0, weights, weights).tolist()
    found = dict(zip(ideas.T1, ideas.Trial.by_weight(trial, [ideas.Q8, ideas.Q4]), strict=True))
    assert (found[0.9], found[0.6], found[0.3]) == ([[0, 0, 0]], [[0, 0, 1]], [[0, 1, 1]])
