# SPDX-License-Identifier: MIT
"""Whether a generated text repeats itself, which coarse weights can cause and perplexity does not show."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_MIN_COPIES, _MIN_TOKENS = 3, 24  # of a loop; less is a row of dashes, or a short list


@dataclass(frozen=True)
class Loop:
    """A stretch of `length` tokens from `start` on, in which each token equals the one `period` before it."""

    period: int
    start: int
    length: int


def repeated_share(tokens: Sequence[int], n: int = 8) -> float:
    """The share of a text's runs of n tokens that have occurred in it before, 0 for a short text."""
    runs = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return (len(runs) - len(set(runs))) / len(runs) if runs else 0.0


def longest_loop(tokens: Sequence[int], max_period: int = 100) -> Loop | None:
    """The longest loop, of those alike the one of the shortest period; None for a text without one."""
    text = np.asarray(tokens)
    best = None
    for period in range(1, min(max_period, len(text) // _MIN_COPIES) + 1):
        edges = np.flatnonzero(np.diff(text[period:] == text[:-period], prepend=False, append=False))
        for start, end in edges.reshape(-1, 2).tolist():
            length = end - start + period
            enough = max(_MIN_COPIES * period, _MIN_TOKENS, best.length + 1 if best else 0)
            if length >= enough:
                best = Loop(period, start, length)
    return best
