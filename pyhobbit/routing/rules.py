# SPDX-License-Identifier: MIT
"""The precision that rules choose for each use of an expert, computed from gate weights as the engine does.

Pure: arrays in, arrays out. K: experts used per token, in any order.
"""

import numpy as np

FLOAT = np.float64


def unimportance(weights: np.ndarray) -> np.ndarray:
    """Eq. 2: the sum of the normalised weights of the experts ranked before each one; the shape of weights.

    All 0, as of the first expert, where the weights do not rank: their sum is not positive or not finite.
    """
    order = np.argsort(-weights, axis=-1, kind="stable")
    ranked = np.take_along_axis(weights, order, axis=-1).astype(FLOAT)
    total = ranked.sum(axis=-1, keepdims=True)
    ranks = np.isfinite(total) & (total > 0)
    before = np.zeros_like(ranked)
    normalised = np.divide(ranked, total, out=before.copy(), where=ranks)
    np.cumsum(normalised[..., :-1], axis=-1, out=before[..., 1:])
    scores = np.empty_like(before)
    np.put_along_axis(scores, order, before, axis=-1)
    return scores


def squared_weights(weights: np.ndarray) -> np.ndarray:
    """Squares of the normalised weights [..., K]; NaN where weights do not rank experts."""
    total = weights.sum(axis=-1, keepdims=True, dtype=FLOAT)
    usable = np.isfinite(total) & (total > 0)
    return np.divide(weights, total, out=np.full(weights.shape, np.nan), where=usable) ** 2


def losses(weights: np.ndarray, rule: str) -> np.ndarray:
    """Factors of the costs in the rules price and edgemoe: [..., K], NaN as of squared_weights()."""
    squared = squared_weights(weights)
    return squared if rule == "price" else np.where(np.isnan(squared), np.nan, 1.0)
