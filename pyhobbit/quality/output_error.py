# SPDX-License-Identifier: MIT
"""How far experts' outputs are off in low precision, from the inputs of one run in high precision.

The experts are computed here from their weights, as the engine computes an expert in one precision only.
"""

from collections.abc import Callable, Sequence

import numpy as np

from pyhobbit.model.expert_weights import ExpertWeights
from pyhobbit.model.tiers import HIGH, LOW, Part
from pyhobbit.routing.observe import Observations, observed
from pyhobbit.routing.rules import squared_weights

_MAX_EXPERTS = 16  # the most used experts of a layer
_MAX_USES = 32  # uses of an expert
_KNOWN_NORMS = 0.03  # relative, or the experts are not what they seem; activations of 8 bits take 0.013

Activation = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _silu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return gate / (1 + np.exp(-gate)) * up


def _gelu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up


def _clamped_swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """The activation of gpt-oss."""
    gate = np.minimum(gate, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (np.clip(up, -7, 7) + 1)


_ACTIVATIONS: tuple[Activation, ...] = (_silu, _gelu, _clamped_swiglu)


class OutputErrors:
    """Measures |E_high(x) - E_low(x)|^2.  blocks: of all layers with experts.  seen: of a run all high."""

    def __init__(self, weights: ExpertWeights, blocks: Sequence[int], seen: Observations) -> None:
        self._weights, self._seen = weights, seen
        self._blocks = [blocks[layer] for layer in seen.layers]
        self._activation: Activation | None = None

    def sums(self, n_experts: int, progress: Callable[[], object] = lambda: None) -> np.ndarray | None:
        """Sums over the uses of an expert, of w^2 |E_high(x) - E_low(x)|^2 and of w^2: float64 [L, E, 2].

        From some uses of the most used experts of each layer seen; 0 for the others.  None: experts here give
        other outputs than in the engine, as of an architecture that is not known here.
        """
        seen = self._seen
        is_seen = seen.inputs is not None and seen.weights is not None and seen.output_norms is not None
        if not is_seen or not all(map(self._first_parts, self._blocks)):
            return None
        found = np.zeros((len(self._blocks), n_experts, 2))
        for i in range(len(found)):
            chosen = seen.used(seen.experts, i)[seen.input_tokens]
            n_uses = np.bincount(chosen.ravel(), minlength=n_experts)
            for expert in np.argsort(-n_uses, kind="stable")[:_MAX_EXPERTS]:
                if n_uses[expert] == 0:
                    break
                means = self._means(i, int(expert), chosen == expert)
                if means is None:
                    return None
                found[i, expert] = n_uses[expert] * means
            progress()
        return found

    def _means(self, i: int, expert: int, is_chosen: np.ndarray) -> np.ndarray | None:
        """Mean errors of the first uses in the i-th layer seen; is_chosen: [N, K]."""
        seen = self._seen
        rows, ranks = (places[:_MAX_USES] for places in np.nonzero(is_chosen))
        tokens = seen.input_tokens[rows]
        # exp may overflow, and a norm may be 0
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            norms = observed(seen.output_norms)[tokens, i, ranks]
            errors = self._of_expert(self._blocks[i], expert, observed(seen.inputs)[rows, i], norms)
        if errors is None:
            return None
        squares = squared_weights(observed(seen.weights)[tokens, i])
        square = np.nan_to_num(squares[np.arange(len(rows)), ranks])
        return np.array([np.mean(square * errors), np.mean(square)])

    def _of_expert(self, block: int, expert: int, inputs: np.ndarray, norms: np.ndarray) -> np.ndarray | None:
        """Squared errors for inputs [n, D] whose outputs have these norms in high precision: [n]."""
        hidden = self._hidden(block, HIGH, expert, inputs)
        if hidden is None:  # it is low for all tokens
            return np.zeros(len(inputs))
        for activation in [self._activation] if self._activation else _ACTIVATIONS:
            high = self._down(block, HIGH, expert, activation(*hidden))
            if np.median(np.abs(np.linalg.norm(high, axis=1) - norms) / norms) < _KNOWN_NORMS:
                self._activation = activation
                in_low = self._hidden(block, LOW, expert, inputs)
                assert in_low is not None  # the low tier has all experts
                low = activation(*in_low)
                return np.square(high - self._down(block, LOW, expert, low)).sum(axis=1)
        return None

    def _hidden(
        self, block: int, tier: str, expert: int, inputs: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Inputs of an activation; None if the tier lacks the expert."""
        products = []
        for part in self._first_parts(block):
            matrix = self._weights.matrix(part, tier, expert)
            if matrix is None:
                return None
            products.append(inputs @ matrix.T + self._weights.bias(part, expert))
        gate, up = products if len(products) == 2 else np.split(products[0], 2, axis=1)
        return gate, up

    def _first_parts(self, block: int) -> list[Part]:
        """Gate and up, which may be one; empty: experts of another form, or that read no router's input."""
        n_in = observed(self._seen.inputs).shape[2]
        names = (("ffn_gate_up_exps",), ("ffn_gate_exps", "ffn_up_exps"))
        candidates = ([Part(block, name) for name in of] for of in names)
        return next(
            (parts for parts in candidates if all(self._weights.has(part, n_in) for part in parts)), []
        )

    def _down(self, block: int, tier: str, expert: int, hidden: np.ndarray) -> np.ndarray:
        part = Part(block, "ffn_down_exps")
        matrix = self._weights.matrix(part, tier, expert)
        assert matrix is not None  # a tier that has the first parts of an expert has the last one
        return hidden @ matrix.T + self._weights.bias(part, expert)
