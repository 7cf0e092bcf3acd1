# SPDX-License-Identifier: MIT
"""Fits the weights of Eq. 3 and the sizes of the pools, by replay of a run."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import permutations, product
from typing import Any

import numpy as np

from pyhobbit.engine.stats import ModelInfo
from pyhobbit.quality.evaluate import Costs, Quality
from pyhobbit.routing.trace import Simulation, simulate

Weights = tuple[float, ...]
"""Weights of LRU, LFU, LHU and FLD in Eq. 3 of HOBBIT."""

_COARSE = 4  # steps between 0 and 1
_FINE_STEPS = (1 / 8, 1 / 16)


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


def simulation_of(info: ModelInfo, rule: str, found: Quality, costs: Costs | None) -> Simulation:
    """A replay without slots, in which the rule decides as it was found. costs: of a rule that has some."""
    high, low = info.mean_expert_bytes
    base = Simulation(info.n_layers, info.n_experts, info.n_experts_used, floors=True)
    base = replace(base, bits_high=high, bits_low=low or high)
    if costs is not None and "price" in found.numbers:
        base = replace(base, low_costs=costs.low, skip_costs=costs.skip)
    return replace(base, rule=rule, **found.numbers)


class CacheFitter:
    """Fits the split of the pools and the weights by replay. `progress` is called after each replay."""

    def __init__(self, base: Simulation, routes: np.ndarray, progress: Callable[[], object]) -> None:
        """Fits to replays of an array of trace.ROUTE. base: see simulation_of()."""
        self._base, self._routes, self._progress = base, routes, progress

    def low_share(self) -> float:
        """The best share of the pools for the low tier, with the default policy."""
        if self._base.with_slots(1.0).slots_low == 0:
            return 0.0
        penalties = {share: self._penalties(low_share=share) for share in _LOW_SHARES}
        least = penalties[_LOW_SHARES[0]]
        return min(penalties, key=lambda share: _mean_ratio(penalties[share], least))

    def weights(self, low_share: float) -> Weights:
        """The best weights of Eq. 3."""
        lru = self._penalties(low_share=low_share, policy="lru")

        def penalty(weights: Weights) -> float:
            own = self._penalties(low_share=low_share, policy="hobbit", weights=weights)
            return _mean_ratio(own, lru)

        return fit_weights(penalty)

    def _penalties(self, **settings: Any) -> np.ndarray:
        """Per token, at each of CAPACITIES."""
        base = replace(self._base, **settings)
        penalties = []
        for capacity in CAPACITIES:
            penalties.append(simulate(self._routes, base.with_slots(capacity)).penalty_per_token)
            self._progress()
        return np.array(penalties)


def _mean_ratio(penalties: np.ndarray, base: np.ndarray) -> float:
    return float(np.mean(penalties / base))
