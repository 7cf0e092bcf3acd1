# SPDX-License-Identifier: MIT
"""Linear maps that predict experts: from a layer's router input to the next routers' outputs."""

from dataclasses import dataclass, field, replace

import numpy as np

from pyhobbit.model.router import Router
from pyhobbit.routing.observe import LayerEvent

MAX_BYTES = 1 << 30
"""Bytes of the sums from which the maps follow."""

_HELD_OUT = 4  # one of so many tokens judges the maps
_RIDGE = 0.1  # share of the mean square of an input value
_OWN_ROUTING = 0.98  # share of the choices that the routers must reproduce
_MIN_GAIN = 0.01  # in recall, or the routers themselves are as good


@dataclass(frozen=True)
class Lookahead:
    """Maps from a layer's router input to the outputs of the routers of the A layers after it.

    maps: float16 [L, A, E, D], zeros past the last layer.  recall, router_recall: [A], share of the experts
    chosen in held-out tokens that the maps name, and that the routers themselves name.
    """

    maps: np.ndarray = field(repr=False, compare=False)
    recall: tuple[float, ...]
    router_recall: tuple[float, ...]


def sum_bytes(n_layers: int, n_embd: int) -> int:
    """Memory that fitting takes."""
    return n_layers * n_embd**2 * 4


class LookaheadFit:
    """An observer that fits the maps while a text runs, and judges them on the text's last quarter.

    X: inputs of a layer, Y: outputs of a later layer's router for its own inputs, W: that router with its own
    norm's gain in place of the one in X. A map M is the minimum of |X M - Y|^2 + a |M - W|^2: where the text
    says little, M stays near the router. a is a tenth of the mean square of X's columns. Only sums over
    tokens are kept.
    """

    def __init__(self, routers: list[Router], n_ahead: int) -> None:
        """routers: of all layers, all of one width.

        Takes its memory at once, so that a model that is opened later plans without it.
        """
        n_layers, n_embd = len(routers), routers[0].weight.shape[1]
        self._routers = routers
        self._n_ahead = min(n_ahead, n_layers - 1)
        self._n_fit = 0
        self._n_seen = [0] * n_layers
        self._squares = np.zeros((n_layers, n_embd, n_embd), np.float32)
        self._squares.fill(0)
        self._products: dict[tuple[int, int], np.ndarray] = {}
        self._recent: dict[int, np.ndarray] = {}
        self._maps: dict[tuple[int, int], np.ndarray] | None = None
        self._own: list[float] = []
        self._shares: dict[int, list[tuple[float, float]]] = {}

    def begin(self, n_tokens: int) -> None:
        """Tells how many tokens every layer will see. Comes before the first of them."""
        self._n_fit = n_tokens - n_tokens // _HELD_OUT

    def __call__(self, event: LayerEvent) -> None:
        """Takes one layer of one batch."""
        if event.router_input is None:
            return
        layer, inputs = event.layer, event.router_input.copy()
        if self._recent and layer <= max(self._recent):
            self._recent.clear()
        self._recent[layer] = inputs
        sources = [
            (layer - ahead, ahead)
            for ahead in range(1, self._n_ahead + 1)
            if len(self._recent.get(layer - ahead, ())) == len(inputs)
        ]
        if self._n_seen[layer] + len(inputs) <= self._n_fit:
            self._learn(layer, inputs, sources)
        else:
            self._judge(layer, inputs, event.experts, sources)
        self._n_seen[layer] += len(inputs)

    def _learn(self, layer: int, inputs: np.ndarray, sources: list[tuple[int, int]]) -> None:
        self._squares[layer] += inputs.T @ inputs
        outputs = inputs @ self._routers[layer].weight.T
        for source, ahead in sources:
            seen = self._recent[source]
            product = seen.T @ (outputs - seen @ self._early(source, ahead).weight.T)
            self._products[source, ahead] = self._products.get((source, ahead), 0) + product

    def _judge(
        self, layer: int, inputs: np.ndarray, experts: np.ndarray, sources: list[tuple[int, int]]
    ) -> None:
        if self._maps is None:
            self._maps = self._solved()
        router, n_used = self._routers[layer], experts.shape[1]

        def share(by: Router, of: np.ndarray) -> float:
            named = by.choose(of, n_used)
            return float((experts[:, :, None] == named[:, None, :]).any(axis=2).mean())

        self._own.append(share(router, inputs))
        for source, ahead in sources:
            if (source, ahead) in self._maps:
                seen = self._recent[source]
                early = self._early(source, ahead)
                fitted = replace(early, weight=self._maps[source, ahead])
                self._shares.setdefault(ahead, []).append((share(fitted, seen), share(early, seen)))

    def _early(self, source: int, ahead: int) -> Router:
        return self._routers[source + ahead].early(self._routers[source])

    def _solved(self) -> dict[tuple[int, int], np.ndarray]:
        maps = {}
        for source in {source for source, _ in self._products}:
            squares = self._squares[source].astype(np.float64)
            squares[np.diag_indices_from(squares)] += _RIDGE * np.trace(squares) / len(squares)
            aheads = [ahead for ahead in range(1, self._n_ahead + 1) if (source, ahead) in self._products]
            steps = np.linalg.solve(squares, np.hstack([self._products[source, ahead] for ahead in aheads]))
            ends = np.cumsum([len(self._routers[source + ahead].weight) for ahead in aheads])[:-1]
            for ahead, step in zip(aheads, np.split(steps, ends, axis=1), strict=True):
                weight = self._early(source, ahead).weight
                maps[source, ahead] = (weight + step.T).astype(np.float16).astype(np.float32)
        return maps

    def result(self) -> Lookahead | None:
        """The maps. None: the routers are not known, or name the experts as well without maps."""
        if not self._maps or not self._own or np.mean(self._own) < _OWN_ROUTING:
            return None
        means = [np.mean(self._shares[ahead], axis=0) for ahead in sorted(self._shares)]
        if means[0][0] < means[0][1] + _MIN_GAIN:
            return None
        n_experts = max(len(router.weight) for router in self._routers)
        maps = np.zeros(
            (*self._squares.shape[:1], self._n_ahead, n_experts, self._squares.shape[1]), np.float16
        )
        for layer in range(len(self._routers)):
            for ahead in range(1, min(self._n_ahead, len(self._routers) - 1 - layer) + 1):
                of = self._maps.get((layer, ahead), self._early(layer, ahead).weight)
                maps[layer, ahead - 1, : len(of)] = of
        return Lookahead(
            maps, tuple(float(mean[0]) for mean in means), tuple(float(mean[1]) for mean in means)
        )
