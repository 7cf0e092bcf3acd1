# SPDX-License-Identifier: MIT
"""Fits the cache's policy and the sizes of its pools, by replay of a run."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from pyhobbit.engine.stats import ModelInfo
from pyhobbit.quality.evaluate import Costs, Quality
from pyhobbit.routing.trace import NEED_PRIOR, Simulation, policy_names, simulate, use_rates

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


@dataclass(frozen=True)
class CacheFit:
    """The fitted cache. penalties: by policy and CAPACITY, relative to LRU, on routes of the check."""

    policy: str
    low_share: float
    penalties: dict[str, tuple[float, ...]]


class CacheFitter:
    """Fits the policy and the split of the pools by replay. `progress` is called after each replay."""

    def __init__(self, base: Simulation, progress: Callable[[], object]) -> None:
        """Fits to replays of a base: see simulation_of()."""
        self._base = base
        self._progress = progress
        self._prior: tuple[float, ...] = ()  # for the policies that need one

    def fit(self, fitting: np.ndarray, choosing: np.ndarray) -> CacheFit:
        """Fits a cache. fitting, choosing: arrays of trace.ROUTE; the second decides between policies."""
        low_share = self.best_share(fitting, "lru")
        lru = self._penalties(choosing, "lru", low_share)
        penalties = {name: tuple(self._penalties(choosing, name, low_share) / lru) for name in policy_names()}
        policy = min(penalties, key=lambda name: np.mean(penalties[name]))
        return CacheFit(policy, self.best_share(fitting, policy), penalties)

    def best_share(self, routes: np.ndarray, policy: str) -> float:
        """The best share of the pools for the low tier, with this policy."""
        n_tokens, base = len(np.unique(routes["token"])), self._base
        self._prior = use_rates(routes, base.n_layers, base.n_experts, n_tokens)
        if base.with_slots(1.0).slots_low == 0:
            return 0.0
        penalties = {share: self._penalties(routes, policy, share) for share in _LOW_SHARES}
        least = penalties[_LOW_SHARES[0]]
        return min(penalties, key=lambda share: float(np.mean(penalties[share] / least)))

    def _penalties(self, routes: np.ndarray, policy: str, low_share: float) -> np.ndarray:
        """Per token, at each of CAPACITIES."""
        prior = self._prior if policy in NEED_PRIOR else ()
        base = replace(self._base, policy=policy, prior=prior, low_share=low_share)
        penalties = []
        for capacity in CAPACITIES:
            penalties.append(simulate(routes, base.with_slots(capacity)).penalty_per_token)
            self._progress()
        return np.array(penalties)
