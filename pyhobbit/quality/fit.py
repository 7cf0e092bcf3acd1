# SPDX-License-Identifier: MIT
"""Fits the cache's policy and the sizes of its pools, by replay of a run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations, product

import numpy as np

from pyhobbit.engine.stats import ModelInfo
from pyhobbit.quality.evaluate import Costs, Quality
from pyhobbit.routing.trace import NEED_PRIOR, Simulation, policy_names, simulate, use_rates

Weights = tuple[float, ...]
"""Weights of LRU, LFU, LHU and FLD in Eq. 3 of HOBBIT."""

_COARSE = 4  # steps between 0 and 1
_FINE_STEPS = (1 / 8, 1 / 16)
_LRU: Weights = (1.0, 0.0, 0.0, 0.0)


def fit_weights(penalty: Callable[[Weights], float]) -> Weights:
    """Weights of Eq. 3 with a small penalty: the best of a coarse grid, then of ever smaller exchanges."""
    penalty = cache(penalty)
    best = min(_grid(), key=penalty)
    for step in _FINE_STEPS:
        while (better := min(_exchanges(best, step), key=penalty)) and penalty(better) < penalty(best):
            best = better
    return best


def _grid() -> Iterator[Weights]:
    for steps in product(range(_COARSE, -1, -1), repeat=4):
        if sum(steps) == _COARSE:
            yield tuple(n / _COARSE for n in steps)


def _exchanges(weights: Weights, step: float) -> list[Weights]:
    """The weights with `step` moved from one to another. Never empty: one of the four is at least 1/4."""
    moved: list[Weights] = []
    for giver, taker in permutations(range(4), 2):
        if weights[giver] >= step:
            values = list(weights)
            values[giver] -= step
            values[taker] += step
            moved.append(tuple(values))
    return moved


# --- the cache

CAPACITIES = (0.1, 0.2, 0.4)
"""Bytes of both pools by those of all experts in high precision, over which a cache is fitted."""

_LOW_SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7)
_PAPER_POLICY = "hobbit"


def simulation_of(info: ModelInfo, rule: str, found: Quality, costs: Costs | None) -> Simulation:
    """A replay without slots, in which the rule decides as it was found. costs: of a rule that has some."""
    high, low = info.mean_expert_bytes
    base = Simulation(info.n_layers, info.n_experts, info.n_experts_used, floors=True)
    base = replace(base, bits_high=high, bits_low=low or high)
    if costs is not None and "price" in found.numbers:
        base = replace(base, low_costs=costs.low, skip_costs=costs.skip)
    return replace(base, rule=rule, **found.numbers)


@dataclass(frozen=True)
class CacheFit:
    """The fitted cache. penalties: by policy and CAPACITY, relative to LRU, on routes of the check."""

    policy: str
    weights: Weights
    low_share: float
    penalties: dict[str, tuple[float, ...]]


class CacheFitter:
    """Fits policy, weights and the split of the pools by replay. `progress` is called after each replay."""

    def __init__(self, base: Simulation, progress: Callable[[], object]) -> None:
        """Fits to replays of a base: see simulation_of()."""
        self._base = base
        self._progress = progress
        self._prior: tuple[float, ...] = ()  # for the policies that need one

    def fit(self, fitting: np.ndarray, choosing: np.ndarray) -> CacheFit:
        """Fits a cache. fitting, choosing: arrays of trace.ROUTE; the second decides between policies."""
        low_share = self.best_share(fitting, "lru")
        lru = self._penalties(fitting, "lru", _LRU, low_share)
        weights = fit_weights(
            lambda weights: _mean_ratio(self._penalties(fitting, _PAPER_POLICY, weights, low_share), lru)
        )
        lru = self._penalties(choosing, "lru", _LRU, low_share)
        penalties = {
            name: tuple(self._penalties(choosing, name, weights, low_share) / lru) for name in policy_names()
        }
        policy = min(penalties, key=lambda name: np.mean(penalties[name]))
        return CacheFit(policy, weights, self.best_share(fitting, policy, weights), penalties)

    def best_share(self, routes: np.ndarray, policy: str, weights: Weights = _LRU) -> float:
        """The best share of the pools for the low tier, with this policy; weights: of policy hobbit."""
        n_tokens, base = len(np.unique(routes["token"])), self._base
        self._prior = use_rates(routes, base.n_layers, base.n_experts, n_tokens)
        if base.with_slots(1.0).slots_low == 0:
            return 0.0
        penalties = {share: self._penalties(routes, policy, weights, share) for share in _LOW_SHARES}
        least = penalties[_LOW_SHARES[0]]
        return min(penalties, key=lambda share: _mean_ratio(penalties[share], least))

    def _penalties(self, routes: np.ndarray, policy: str, weights: Weights, low_share: float) -> np.ndarray:
        """Per token, at each of CAPACITIES."""
        prior = self._prior if policy in NEED_PRIOR else ()
        base = replace(self._base, policy=policy, weights=weights, prior=prior, low_share=low_share)
        penalties = []
        for capacity in CAPACITIES:
            penalties.append(simulate(routes, base.with_slots(capacity)).penalty_per_token)
            self._progress()
        return np.array(penalties)


def _mean_ratio(penalties: np.ndarray, base: np.ndarray) -> float:
    return float(np.mean(penalties / base))
