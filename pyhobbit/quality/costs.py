# SPDX-License-Identifier: MIT
"""Quality costs of low precision and of skipping, measured layer by layer or expert by expert."""

import math
from collections.abc import Callable, Sequence
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
    progress: Progress | None = None
    memo: Memo = measure_now

    @property
    def n_tokens(self) -> int:
        """Tokens of one run."""
        return sum(map(len, self.chunks))

    def by_layer(self) -> Costs:
        """Costs of all layers. Those that do not run are never low nor skipped. Raises HobbitError."""
        n_layers = self.evaluator.info.n_layers
        found = np.full((n_layers, 2), math.inf)
        for i, layer in enumerate(self.seen.layers):
            found[layer] = self.of_layer(i)
        return _costs(found)

    def of_layer(self, i: int) -> tuple[float, float]:
        """Costs of low precision and of skipping in the i-th of the layers seen. Raises HobbitError.

        Two runs: all of it in low precision, and its less important half skipped.
        """
        layer, where = self.seen.layers[i], np.arange(self.evaluator.info.n_layers) == self.seen.layers[i]
        square = squared_weights(self.seen.used(observed(self.seen.weights), i))
        low = skip = math.inf
        if self.evaluator.has_low_tier:
            low = self._low(f"layer {layer}", where) / float(np.nanmean(square.sum(axis=-1)))
        threshold, lost = less_important_half(square)
        if threshold > 0:
            never, costs = np.full(where.shape, math.inf), np.where(where, 1.0, math.inf)
            skip = self._divergence(f"skip layer {layer}", never, costs, threshold) / lost
        return low, skip

    def refined(self, errors: np.ndarray, is_time_left: Callable[[], bool]) -> tuple[Costs, int]:
        """Costs from the errors of one run, see output_errors(), and from how many layers were measured.

        Measured costs stay, and scale the layers between. First come the first and the last layer,
        then, while time is left, those that add most to the divergence. Raises HobbitError.
        """
        n_seen = len(self.seen.layers)
        ends = [0, n_seen - 1] if n_seen > 1 else [0]
        square = np.nanmean(squared_weights(observed(self.seen.weights)).sum(axis=-1), axis=0)
        measured = {i: self.of_layer(i) for i in ends}
        for _ in range(n_seen - len(ends)):
            if not is_time_left():
                break
            low = scaled(errors, measured)[:, 0] * square
            rest = [i for i in range(n_seen) if i not in measured]
            heaviest = max(rest, key=lambda i: low[i])
            measured[heaviest] = self.of_layer(heaviest)
        found = np.full((self.evaluator.info.n_layers, 2), math.inf)
        found[self.seen.layers] = scaled(errors, measured)
        return _costs(found), len(measured)

    def by_expert(self) -> np.ndarray:
        """A run per used expert, alone in low precision: mean divergence, float64 [n_layers, n_experts].

        NaN for experts that are not used (EdgeMoE, III-B). Raises HobbitError.
        """
        info = self.evaluator.info
        found = np.full((info.n_layers, info.n_experts), math.nan)
        for i, layer in enumerate(self.seen.layers):
            for expert in np.unique(self.seen.used(self.seen.experts, i)):
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


def _costs(by_layer: np.ndarray) -> Costs:
    """Costs of low precision and of skipping: [n_layers, 2]."""
    low, skip = by_layer.T.tolist()
    return Costs(tuple(low), tuple(skip))


def output_errors(sums: np.ndarray, seen: Observations) -> np.ndarray:
    """Mean squared error of what a use of weight 1 adds, in low precision and skipped: [L, 2] of L layers.

    sums: OutputErrors.sums().  Skipped is the less important half, as CostRuns.of_layer() does it.
    """
    low, weight = sums.sum(axis=1).T
    found = np.stack([low / weight, np.full(low.shape, math.inf)], axis=1)
    for i in range(len(low)):
        square = squared_weights(seen.used(observed(seen.weights), i))
        threshold, lost = less_important_half(square)
        if threshold > 0:
            is_lost = (square < threshold) & (np.arange(square.shape[-1]) > 0)
            norms = seen.used(observed(seen.output_norms), i)
            outputs = np.where(is_lost, square * np.square(norms, dtype=float), 0.0)
            found[i, 1] = np.nanmean(outputs.sum(axis=-1)) / lost
    return found


def scaled(errors: np.ndarray, measured: dict[int, tuple[float, float]]) -> np.ndarray:
    """Costs [L, 2] from errors [L, 2] and the measured costs of some layers.

    Between measured layers the ratio of cost to error changes evenly on a scale of logarithms. An error
    matters less in a later layer, where it is added to larger sums.
    """
    layers = sorted(measured)
    found = np.array(errors, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        for k in range(2):
            values = np.array([measured[i][k] for i in layers])
            ratios = np.log(values / errors[layers, k])
            known = np.flatnonzero(np.isfinite(ratios))
            if known.size:
                between = np.interp(np.arange(len(errors)), np.array(layers)[known], ratios[known])
                found[:, k] *= np.exp(between)
            found[layers, k] = values
    return found


def less_important_half(square: np.ndarray) -> tuple[float, float]:
    """The squared weight below which half of all but the first experts lie, and their mean sum per token.

    square: [T, K].
    """
    others = np.sort(square, axis=-1)[:, :-1]
    if not np.isfinite(others).any():
        return 0.0, 0.0
    threshold = float(np.nanmedian(others))
    return threshold, float(np.nanmean(np.where(others < threshold, others, 0.0).sum(axis=-1)))


def static_costs(divergences: np.ndarray) -> Costs:
    """Costs of the rule edgemoe: the measured divergences themselves; unused experts come first."""
    low = np.nan_to_num(divergences, nan=0.0).ravel()
    return Costs(tuple(low.tolist()), (math.inf,) * low.size)
