# SPDX-License-Identifier: MIT
"""Quality costs of low precision and of skipping, measured layer by layer or expert by expert."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyhobbit.quality.evaluate import Chunk, Costs, Evaluator, Memo, Progress, Quality, measure_now
from pyhobbit.routing.observe import Observations, observed
from pyhobbit.routing.rules import squared_weights

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
    progress: Progress = lambda _n_tokens: None
    memo: Memo = measure_now

    def by_layer(self) -> Costs:
        """Costs of all layers. Layers that do not run are never low nor skipped. Raises HobbitError."""
        n_layers = self.evaluator.info.n_layers
        found = np.full((2, n_layers), math.inf)
        for i, layer in enumerate(self.seen.layers):
            found[:, layer] = self._of_layer(i, np.arange(n_layers) == layer)
        low, skip = found.tolist()
        return Costs(tuple(low), tuple(skip))

    def _of_layer(self, i: int, where: np.ndarray) -> tuple[float, float]:
        """Costs of the i-th layer seen: all low, and its less important half skipped. Raises HobbitError."""
        layer = self.seen.layers[i]
        square = squared_weights(self.seen.used(observed(self.seen.weights), i))
        low = self._low(f"layer {layer}", where) / float(np.nanmean(square.sum(axis=-1)))
        threshold, lost = less_important_half(square)
        if threshold <= 0:
            return low, math.inf
        never, costs = np.full(where.shape, math.inf), np.where(where, 1.0, math.inf)
        return low, self._divergence(f"skip layer {layer}", never, costs, threshold) / lost

    def by_expert(self) -> Costs:
        """Costs of the rule edgemoe: mean divergences with one expert low. Unused experts come first."""
        info = self.evaluator.info
        found = np.zeros((info.n_layers, info.n_experts))
        for i, layer in enumerate(self.seen.layers):
            for expert in np.unique(self.seen.used(self.seen.experts, i)):
                only = np.zeros(found.shape, bool)
                only[layer, expert] = True
                found[layer, expert] = self._low(f"expert {layer} {expert}", only.ravel())
        return Costs(tuple(found.ravel().tolist()), (math.inf,) * found.size)

    def _low(self, name: str, where: np.ndarray) -> float:
        """The divergence with a part in low precision. where: layers, or experts of all layers."""
        never = np.full(where.shape, math.inf)
        return self._divergence(f"low {name}", np.where(where, 0.0, math.inf), never, _ANY_PRICE)

    def _divergence(self, name: str, low: np.ndarray, skip: np.ndarray, price: float) -> float:
        def measure() -> Quality:
            self.evaluator.set_costs(Costs(tuple(low.tolist()), tuple(skip.tolist())))
            return self.evaluator.measure(self.chunks, self.reference, self.progress, price=price)

        return self.memo(f"{name}, {len(self.chunks)} chunks", measure).mean_kl


def less_important_half(square: np.ndarray) -> tuple[float, float]:
    """The squared weight below which half of all later experts lie, and their mean sum. square: [T, K]."""
    others = np.sort(square, axis=-1)[:, :-1]
    if not np.isfinite(others).any():
        return 0.0, 0.0
    threshold = float(np.nanmedian(others))
    return threshold, float(np.nanmean(np.where(others < threshold, others, 0.0).sum(axis=-1)))
