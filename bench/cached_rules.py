# SPDX-License-Identifier: MIT
"""Rules for experts that are not resident, and the cache they see: what bench/many_experts.py compares."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pyhobbit.routing.analysis import (
    HIGH,
    LOW,
    SKIPPED,
    decide,
    decide_by_price,
    squared_weights,
    unimportance,
)

#
# rules
#


@dataclass(frozen=True)
class Uses:
    """Experts of some tokens, best first, normalised weights, what is resident: each [tokens, top_k]."""

    layer: int
    experts: np.ndarray
    weights: np.ndarray
    high: np.ndarray
    low: np.ndarray


Rule = Callable[[Uses], np.ndarray]
"""Precisions, [tokens, top_k]."""


def gate(t1: float, t2: float) -> Rule:
    """Eq. 2; resident versions that are better serve instead."""

    def choose(uses: Uses) -> np.ndarray:
        wanted = decide(unimportance(uses.weights), t1, t2)
        return np.where(uses.high, HIGH, np.where(uses.low, np.maximum(wanted, LOW), wanted))

    return choose


ALL_HIGH = gate(1, 1)


@dataclass(frozen=True)
class Costs:
    """Nats of divergence of a use with weight 1: [layers]."""

    low: np.ndarray
    skip: np.ndarray


def price(price: float, costs: Costs, low_bytes: float) -> Rule:
    """The smallest w^2 * cost + price * bytes to load, in high experts; the first one is never skipped."""

    def choose(uses: Uses) -> np.ndarray:
        low, skip = costs.low[uses.layer], costs.skip[uses.layer]
        squared = squared_weights(uses.weights)
        return decide_by_price(squared, low, skip, price, low_bytes, uses.high, uses.low)

    return choose


def only(layer: int, ranks: slice, precision: int) -> Rule:
    """These ranks of one layer in another precision, all else high: what costs are measured with."""

    def choose(uses: Uses) -> np.ndarray:
        wanted = np.full(uses.weights.shape, HIGH)
        if uses.layer == layer:
            wanted[:, ranks] = precision
        return wanted

    return choose


#
# what is resident
#


class LayerCache:
    """One layer's experts, least recently used ones evicted; both versions share a limit of bytes."""

    def __init__(self, limit: float, n_experts: int, low_bytes: float) -> None:
        self.limit, self.size = limit, {LOW: low_bytes, HIGH: 1.0}
        self.resident = np.zeros((3, n_experts), bool)  # by precision
        self.loaded = 0.0
        self._order: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._used = 0.0

    def use(self, expert: int, precision: int) -> None:
        if precision == SKIPPED:
            return
        key = (precision, expert)
        if not self.resident[key]:
            self.loaded += self.size[precision]
            self._used += self.size[precision]
            self.resident[key] = True
        self._order[key] = None
        self._order.move_to_end(key)
        while self._used > self.limit:
            victim, _ = self._order.popitem(last=False)
            self.resident[victim] = False
            self._used -= self.size[victim[0]]


def near_ties(scores: np.ndarray, ids: np.ndarray, resident: np.ndarray, margin: float) -> np.ndarray:
    """The token's experts, where resident ones gain `margin` of the scores' range; the first one is kept."""
    raised = scores + margin * (scores.max() - scores.min()) * resident
    raised[ids[0]] = np.inf
    chosen = np.argpartition(-raised, len(ids) - 1)[: len(ids)]
    return chosen[np.argsort(-scores[chosen])]


@dataclass
class Policy:
    """A rule, and a cache of `share` of each layer's bytes, or none; margin: of near ties, 0: none."""

    rule: Rule
    share: float = 0.0
    margin: float = 0.0
    n_uses: int = 0
    loaded: float = 0.0
    caches: dict[int, LayerCache] = field(default_factory=dict)

    def decide(
        self, layer: int, probs: np.ndarray, ids: np.ndarray, weights: np.ndarray, low_bytes: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Experts, weights and precisions [tokens, top_k] from the router's, probs [tokens, experts]."""
        self.n_uses += ids.size
        if not self.share:
            nothing = np.zeros(ids.shape, bool)
            precisions = self.rule(Uses(layer, ids, weights, nothing, nothing))
            self.loaded += (precisions == HIGH).sum() + low_bytes * (precisions == LOW).sum()
            return ids, weights, precisions
        if layer not in self.caches:
            self.caches[layer] = LayerCache(self.share * probs.shape[1], probs.shape[1], low_bytes)
        cache, before = self.caches[layer], self.caches[layer].loaded
        ids, weights, precisions = ids.copy(), weights.copy(), np.empty(ids.shape, int)
        for t in range(len(ids)):
            if self.margin:
                ids[t] = near_ties(np.log(probs[t]), ids[t], cache.resident.any(0), self.margin)
                weights[t] = probs[t, ids[t]] / probs[t, ids[t]].sum()
            here = cache.resident[:, ids[t]]
            precisions[t] = self.rule(Uses(layer, ids[t], weights[t], here[HIGH], here[LOW]))
            for expert, precision in zip(ids[t, ::-1].tolist(), precisions[t, ::-1].tolist(), strict=True):
                cache.use(expert, precision)
        self.loaded += cache.loaded - before
        return ids, weights, precisions
