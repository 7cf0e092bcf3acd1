# SPDX-License-Identifier: MIT
"""How a layer's router chooses its experts."""

from dataclasses import dataclass
from enum import Enum

import numpy as np


class Gating(Enum):
    """How a router's outputs become the probabilities by which experts are chosen."""

    SOFTMAX = 1
    SIGMOID = 2
    NONE = 3  # the outputs themselves are the weights
    SQRT_SOFTPLUS = 4


@dataclass(frozen=True)
class Router:
    """One layer's router.

    weight: float32 [E, D].  bias: [E], added to the outputs.  selection_bias: [E], added to the
    probabilities.  n_groups, n_groups_used: experts are chosen from the best n_groups_used of n_groups equal
    groups.
    """

    weight: np.ndarray
    bias: np.ndarray | None = None
    selection_bias: np.ndarray | None = None
    gating: Gating = Gating.SOFTMAX
    n_groups: int = 1
    n_groups_used: int = 1

    def choose(self, inputs: np.ndarray, n_used: int) -> np.ndarray:
        """The experts chosen for inputs [T, D], best first: int [T, n_used]."""
        outputs = inputs @ self.weight.T
        if self.bias is not None:
            outputs = outputs + self.bias
        worth = _probabilities(outputs, self.gating)
        if self.selection_bias is not None:
            worth = worth + self.selection_bias
        if self.n_groups > 1:
            worth = self._keep_best_groups(worth)
        return np.argsort(-worth, axis=1, kind="stable")[:, :n_used]

    def _keep_best_groups(self, worth: np.ndarray) -> np.ndarray:
        # A group is worth the sum of its two best experts (DeepSeek-V3).
        grouped = worth.reshape(len(worth), self.n_groups, -1)
        group_worth = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
        dropped = np.argsort(-group_worth, axis=1, kind="stable")[:, self.n_groups_used :]
        kept = grouped.copy()
        np.put_along_axis(kept, dropped[:, :, None], -np.inf, axis=1)
        return kept.reshape(worth.shape)


def _probabilities(outputs: np.ndarray, gating: Gating) -> np.ndarray:
    if gating is Gating.SOFTMAX:
        powers = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)
    if gating is Gating.SIGMOID:
        return (1 + np.tanh(outputs / 2)) / 2
    if gating is Gating.SQRT_SOFTPLUS:
        return np.sqrt(np.logaddexp(0, outputs))
    return outputs
