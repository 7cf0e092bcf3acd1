# SPDX-License-Identifier: MIT
"""Fits the weights of Eq. 3 and the sizes of the pools, by replay of a run."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from pyhobbit.engine.stats import ModelInfo
from pyhobbit.quality.evaluate import Costs, Quality
from pyhobbit.routing.trace import Simulation, simulate

Weights = tuple[float, ...]
"""Weights of LRU, LFU, LHU and FLD in Eq. 3 of HOBBIT."""

_STEPS = 5  # between 0 and 1


def fit_weights(penalty: Callable[[Weights], float]) -> Weights:
    """Weights of Eq. 3 with the least penalty of a grid."""
    steps = (each for each in product(range(_STEPS, -1, -1), repeat=4) if sum(each) == _STEPS)
    return min((tuple(n / _STEPS for n in each) for each in steps), key=penalty)


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
