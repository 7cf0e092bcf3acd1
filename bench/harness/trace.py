# SPDX-License-Identifier: MIT
"""Tokens and routing that every arm computes alike."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

PROFILED = 256  # tokens of a profile
_SEED = 1
_FIRST_PLAIN_TOKEN = 300  # after control tokens and bytes


@dataclass(frozen=True)
class MoeShape:
    """n_layers: of the whole model, those without routed experts included."""

    n_layers: int
    n_experts: int
    n_used: int


def random_tokens(n_vocab: int) -> Iterator[int]:
    """Without end, each of the plain tokens equally likely; the same in every run."""
    draw = random.Random(_SEED)
    while True:
        yield draw.randrange(min(_FIRST_PLAIN_TOKEN, n_vocab // 2), n_vocab)


def moe_shape(model: Path) -> MoeShape:
    """Reads the shape off a model's files. Raises HobbitError for a model without routed experts."""
    from pyhobbit.model.model_file import read_model_file  # takes a while, which a measuring process saves

    file = read_model_file(model)
    return MoeShape(file.key("block_count"), file.n_experts, max(file.n_used.values()))


def weights_of(experts: NDArray[np.int32], spread: float = 0.0) -> NDArray[np.float32]:
    """Weights of choices, the largest first, which sum to 1; alike by a spread of 0.

    HOBBIT's thresholds make 66 % of two experts high and 31 % low by a spread of 0.6.
    """
    drawn = np.exp(spread * np.random.default_rng(_SEED).gumbel(size=experts.shape)).astype(np.float32)
    return -np.sort(-drawn) / drawn.sum(axis=2, keepdims=True)


def sweep(shape: MoeShape) -> NDArray[np.int32]:
    """Choices of as few tokens as choose every expert of every layer: [tokens, layers, used]."""
    n_tokens = -(-shape.n_experts // shape.n_used)
    experts = np.arange(n_tokens * shape.n_used, dtype=np.int32).reshape(n_tokens, 1, -1) % shape.n_experts
    return np.repeat(experts, shape.n_layers, axis=1)


def seeded_routing(shape: MoeShape, n_tokens: int, n_further: int = 0) -> NDArray[np.int32]:
    """[tokens, layers, used]: preferred experts, of which those of the last tokens return more often.

    With 128 experts it has the reuse and the hits of LRU of a recorded trace (docs/modelled.md).
    n_further: tokens behind the others, which stay as they are without them.
    """
    rng = np.random.default_rng(_SEED)
    n = shape.n_experts
    spread = 0.7 if n <= 16 else 0.13 if n <= 128 else 0.25  # share of the experts that most choices fall on
    chosen = np.empty((n_tokens + n_further, shape.n_layers, shape.n_used), np.int32)
    liked, recent = np.empty((shape.n_layers, n)), np.zeros((shape.n_layers, n))
    for tokens in (range(n_tokens), range(n_tokens, len(chosen))):
        for layer in range(shape.n_layers):
            if tokens.start == 0:
                liked[layer] = rng.permutation(-np.arange(n) / (spread * n))
            for token in tokens:
                order = np.argsort(-(liked[layer] + 0.6 * recent[layer] + rng.gumbel(size=n)))
                chosen[token, layer] = order[: shape.n_used]
                recent[layer] *= 0.7
                recent[layer, order[: shape.n_used]] += 1
    return chosen
