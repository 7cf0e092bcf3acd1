# SPDX-License-Identifier: MIT
"""Fits the cache's policy and the sizes of its pools, by replay of a run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Any

import numpy as np

from pyhobbit.engine.stats import ModelInfo
from pyhobbit.quality.evaluate import Costs, Quality
from pyhobbit.routing.trace import NEED_PRIOR, Simulation, policy_names, pool_slots, simulate, use_rates

Weights = tuple[float, float, float, float]
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
    for a in range(_COARSE, -1, -1):
        for b in range(_COARSE - a, -1, -1):
            for c in range(_COARSE - a - b, -1, -1):
                yield a / _COARSE, b / _COARSE, c / _COARSE, (_COARSE - a - b - c) / _COARSE


def _exchanges(weights: Weights, step: float) -> list[Weights]:
    """The weights with `step` moved from one to another. Never empty: one of the four is at least 1/4."""
    moved: list[Weights] = []
    for giver, taker in permutations(range(4), 2):
        if weights[giver] >= step:
            values = list(weights)
            values[giver] -= step
            values[taker] += step
            a, b, c, d = values
            moved.append((a, b, c, d))
    return moved


#
# the cache
#

CAPACITIES = (0.1, 0.2, 0.4)
"""Bytes of both pools by those of all experts in high precision, over which a cache is fitted."""

_LOW_SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7)
_PAPER_POLICY = "hobbit"


@dataclass(frozen=True)
class CacheModel:
    """Experts as a cache sees them.

    low_cost: bytes of one in low precision by those of one in high, 0 without a low tier.
    rule, costs: what decides where price is above 0; otherwise the rule is gate.
    """

    n_layers: int
    n_experts: int
    n_used: int
    low_cost: float
    t1: float
    t2: float
    rule: str = "gate"
    price: float = 0.0
    costs: Costs | None = None

    @classmethod
    def of(cls, info: ModelInfo, rule: str, quality: Quality, costs: Costs | None) -> "CacheModel":
        """An opened model with the numbers of a measured setting."""
        high_bytes, low_bytes = info.mean_expert_bytes
        return cls(
            n_layers=info.n_layers,
            n_experts=info.n_experts,
            n_used=info.n_experts_used,
            low_cost=low_bytes / high_bytes,
            t1=quality.t1,
            t2=quality.t2,
            rule=rule,
            price=quality.price,
            costs=costs,
        )

    @property
    def uses_low(self) -> bool:
        return self.low_cost > 0 and (self.t1 < 1 or self.price > 0)

    def slots(self, capacity: float, low_share: float) -> tuple[int, int]:
        """Slots of the high and the low pool, which hold at least one token's experts of a layer."""
        n_all, uses_low = self.n_layers * self.n_experts, float(self.uses_low)
        share = low_share * uses_low
        return pool_slots(n_all, capacity, share, self.low_cost, self.n_used, uses_low)


@dataclass(frozen=True)
class CacheFit:
    """The fitted cache.

    penalties: of each policy at CAPACITIES, by LRU's with the same pools, on routes that were not fitted to.
    """

    policy: str
    weights: Weights
    low_share: float
    penalties: dict[str, tuple[float, ...]]


class CacheFitter:
    """Fits policy, weights and the split of the pools by replay. `progress` is called after each replay."""

    def __init__(
        self, model: CacheModel, progress: Callable[[], object], capacities: Sequence[float] = CAPACITIES
    ) -> None:
        self._model = model
        self._progress = progress
        self._capacities = capacities
        self._prior: tuple[float, ...] = ()  # for the policies that need one

    def fit(self, fitting: np.ndarray, choosing: np.ndarray) -> CacheFit:
        """fitting, choosing: arrays of trace.ROUTE; the second decides between policies."""
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
        n_tokens, model = len(np.unique(routes["token"])), self._model
        self._prior = use_rates(routes, model.n_layers, model.n_experts, n_tokens)
        if not model.uses_low:
            return 0.0
        penalties = {share: self._penalties(routes, policy, weights, share) for share in _LOW_SHARES}
        base = penalties[_LOW_SHARES[0]]
        return min(penalties, key=lambda share: _mean_ratio(penalties[share], base))

    def _penalties(self, routes: np.ndarray, policy: str, weights: Weights, low_share: float) -> np.ndarray:
        """Per token, at each of CAPACITIES."""
        model = self._model
        penalties = []
        for capacity in self._capacities:
            slots_high, slots_low = model.slots(capacity, low_share)
            simulation = Simulation(
                n_layers=model.n_layers,
                n_experts=model.n_experts,
                n_used=model.n_used,
                slots_high=slots_high,
                slots_low=slots_low,
                policy=policy,
                weights=weights,
                floors=True,
                **self._rule(),
                prior=self._prior if policy in NEED_PRIOR else (),
                bits_high=1.0,
                bits_low=model.low_cost if model.uses_low else 1.0,
            )
            penalties.append(simulate(routes, simulation).penalty_per_token)
            self._progress()
        return np.array(penalties)

    def _rule(self) -> dict[str, Any]:
        model = self._model
        if not model.uses_low:
            return {}
        if model.costs is None or model.price == 0:
            return {"t1": model.t1, "t2": model.t2}
        costs = {"low_costs": model.costs.low, "skip_costs": model.costs.skip}
        return {"rule": model.rule, "price": model.price, **costs}


def _mean_ratio(penalties: np.ndarray, base: np.ndarray) -> float:
    return float(np.mean(penalties / base))
