# SPDX-License-Identifier: MIT
"""What low precision and skipping cost in quality, measured layer by layer or expert by expert."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyhobbit.quality.evaluate import Chunk, Costs, Evaluator, Memo, Progress, Quality, measure_now
from pyhobbit.routing.analysis import squared_weights
from pyhobbit.routing.observe import Observations

_ANY_PRICE = 1.0  # with costs of 0 and infinity all prices give the same decisions


@dataclass(frozen=True)
class CostRuns:
    """Measures what changes in one place cost. evaluator: strict, with a rule that takes a price.

    chunks: of a text.  reference: their logits in high precision.  seen: their routing.  memo: keeps runs.
    """

    evaluator: Evaluator
    chunks: Sequence[Chunk]
    reference: np.ndarray
    seen: Observations
    progress: Progress | None = None
    memo: Memo = measure_now

    @property
    def n_tokens(self) -> int:
        """Of one run."""
        return sum(map(len, self.chunks))

    def by_layer(self) -> Costs:
        """Two runs per layer: all of it in low precision, and its less important half skipped.

        Layers that do not run are never low nor skipped. Raises HobbitError.
        """
        n_layers = self.evaluator.info.n_layers
        low, skip = np.full(n_layers, math.inf), np.full(n_layers, math.inf)
        for i, layer in enumerate(self.seen.layers):
            square = squared_weights(self.seen.weights[:, i])
            if self.evaluator.has_low_tier:
                low[layer] = self._low(f"layer {layer}", np.arange(n_layers) == layer) / np.nanmean(
                    square.sum(axis=-1)
                )
            threshold, lost = less_important_half(square)
            if threshold > 0:
                costs = np.where(np.arange(n_layers) == layer, 1.0, math.inf)
                never = np.full(n_layers, math.inf)
                skip[layer] = self._divergence(f"skip layer {layer}", never, costs, threshold) / lost
        return Costs(tuple(low.tolist()), tuple(skip.tolist()))

    def by_expert(self) -> np.ndarray:
        """A run per used expert, alone in low precision: mean divergence, float64 [n_layers, n_experts].

        NaN for experts that are not used (EdgeMoE, III-B). Raises HobbitError.
        """
        info = self.evaluator.info
        found = np.full((info.n_layers, info.n_experts), math.nan)
        for i, layer in enumerate(self.seen.layers):
            for expert in np.unique(self.seen.experts[:, i]):
                only = np.zeros(found.shape, bool)
                only[layer, expert] = True
                found[layer, expert] = self._low(f"expert {layer} {expert}", only.ravel())
        return found

    def _low(self, name: str, where: np.ndarray) -> float:
        """where: layers, or experts of all layers, in low precision."""
        never = np.full(where.shape, math.inf)
        return self._divergence(f"low {name}", np.where(where, 0.0, math.inf), never, _ANY_PRICE)

    def _divergence(self, name: str, low: np.ndarray, skip: np.ndarray, price: float) -> float:
        def measure() -> Quality:
            self.evaluator.set_costs(Costs(tuple(low.tolist()), tuple(skip.tolist())))
            return self.evaluator.measure(self.chunks, 1.0, 1.0, self.reference, self.progress, price=price)

        return self.memo(f"{name}, {len(self.chunks)} chunks", measure).mean_kl


def less_important_half(square: np.ndarray) -> tuple[float, float]:
    """The squared weight below which half of all but the first experts lie, and their mean sum per token.

    square: [T, K].
    """
    others = np.sort(square, axis=-1)[:, :-1]
    if not np.isfinite(others).any():
        return 0.0, 0.0
    threshold = float(np.nanmedian(others))
    return threshold, float(np.nanmean(np.where(others < threshold, others, 0.0).sum(axis=-1)))


def expert_costs(by_layer: Costs, divergences: np.ndarray, seen: Observations) -> Costs:
    """Costs by expert of the rule price from CostRuns.by_expert; unused experts have their layer's cost."""
    n_experts = divergences.shape[1]
    low = np.repeat(by_layer.low, n_experts).reshape(divergences.shape)
    for i, layer in enumerate(seen.layers):
        square = squared_weights(seen.weights[:, i])
        for expert in np.flatnonzero(~np.isnan(divergences[layer])):
            used = np.where(seen.experts[:, i] == expert, square, 0.0).sum(axis=-1)
            low[layer, expert] = divergences[layer, expert] / np.nanmean(used)
    return Costs(tuple(low.ravel().tolist()), tuple(np.repeat(by_layer.skip, n_experts).tolist()))


def static_costs(divergences: np.ndarray) -> Costs:
    """Costs of the rule edgemoe: the measured divergences themselves; unused experts come first."""
    low = np.nan_to_num(divergences, nan=0.0).ravel()
    return Costs(tuple(low.tolist()), (math.inf,) * low.size)
