# SPDX-License-Identifier: MIT
"""Observations of Mixture-of-Experts models, computed from the routing of a run.

Pure: arrays in, arrays out. T tokens in the order of the run, L layers with routed experts, K experts used
per token as the router ranked them, E experts of a layer, D values of the router's input.
Figures without a name of a paper are HOBBIT's (arXiv 2411.01433).
"""

import numpy as np

from pyhobbit.model.router import Router
from pyhobbit.routing.observe import Observations, observed
from pyhobbit.routing.rules import FLOAT

MAX_AHEAD = 4
"""Layers that a prediction looks ahead at most."""


def importance(gate: np.ndarray, output: np.ndarray) -> tuple[np.ndarray, float]:
    """How well |G| stands for |G E(x)|: Pearson's r by layer, [L], and overall (Fig. 5a).

    NaN where a value does not vary.  gate, output: relative_importance(), as magnitudes grow with depth.
    """
    of_layers = [_pearson(*layer) for layer in zip(gate.swapaxes(0, 1), output.swapaxes(0, 1), strict=True)]
    return np.array(of_layers), _pearson(gate, output)


def relative_importance(weights: np.ndarray, output_norms: np.ndarray) -> np.ndarray:
    """|G| and |G E(x)|, each divided by its layer's mean: [2, T, L, K]."""
    gate = np.where(np.isnan(output_norms), np.nan, np.abs(weights.astype(FLOAT)))  # NaN: not used
    both = np.stack([gate, gate * output_norms])
    means = np.nanmean(both, axis=(1, 3), keepdims=True)
    return np.divide(both, means, out=np.zeros_like(both), where=means > 0)


def _pearson(a: np.ndarray, b: np.ndarray) -> float:
    known = ~np.isnan(b)
    with np.errstate(invalid="ignore"):
        return float(np.corrcoef(a[known], b[known])[0, 1])


def prediction(seen: Observations, routers: list[Router]) -> tuple[np.ndarray, np.ndarray]:
    """How well the router of layer l + d, given the input of layer l, predicts that layer's choice (Fig. 7b).

    Returns [1 + MAX_AHEAD, L], row d, NaN past the last layer: the share of tokens whose best expert is
    predicted as the best, and that of the chosen experts among as many predicted. In row 0 the latter is
    about 1, or the architecture routes in a way that Router does not know.  routers: one per layer that ran.
    """
    inputs, experts = observed(seen.inputs), seen.experts[seen.input_tokens]
    n_layers = experts.shape[1]
    top1, top_k = (np.full((1 + MAX_AHEAD, n_layers), np.nan) for _ in range(2))
    for ahead, layer in ((i, each) for i in range(1 + MAX_AHEAD) for each in range(n_layers - i)):
        chosen = seen.used(experts, layer + ahead)
        predicted = routers[layer + ahead].choose(inputs[:, layer], chosen.shape[1])
        top1[ahead, layer] = np.mean(predicted[:, 0] == chosen[:, 0])
        top_k[ahead, layer] = _overlap(chosen, predicted).mean()
    return top1, top_k


def _overlap(chosen: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """True for each of chosen [T, K] that is among predicted [T, K]: bool [T, K]."""
    return (chosen[:, :, None] == predicted[:, None, :]).any(axis=2)


def alike(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Cosines of two uses of the experts, counts [L, E], by layer: [L]. Eq. 1 of DAOP: prompt and answer."""
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return np.divide((first * second).sum(axis=1), norms, out=np.full(len(norms), np.nan), where=norms > 0)


def path_shares(experts: np.ndarray) -> np.ndarray:
    """Shares of tokens that the paths carry, the most frequent first (EdgeMoE, Fig. 4): [paths].

    experts: [T, L, K]. A path is a token's best experts of all layers.
    """
    _, counts = np.unique(experts[:, :, 0], axis=0, return_counts=True)
    return np.sort(counts)[::-1] / len(experts)


def placement_hits(uses: np.ndarray, share: float) -> tuple[float, float]:
    """Shares of the uses that the most used and the least used `share` of the experts take (Twiddler)."""
    ranked, n = np.sort(uses, axis=None), round(share * uses.size)
    return float(ranked[ranked.size - n :].sum() / ranked.sum()), float(ranked[:n].sum() / ranked.sum())


def threshold_for_share(scores: np.ndarray, share: float) -> float:
    """The threshold above which the least important `share` of selections lies, as near as ties allow.

    scores: of Eq. 2, any shape. The best expert of a token scores 0 and is never above.
    """
    ranked = np.sort(scores, axis=None)
    n_above = round(share * ranked.size)
    return float(ranked[-n_above - 1]) if n_above else 1.0
