# SPDX-License-Identifier: MIT
"""Beam search: the likeliest texts, several at a time, in sequences of one context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # tests search with other builds of libllama, so this loads none
    from pyhobbit.engine.cache import Cache
    from pyhobbit.engine.llama import Context


@dataclass(frozen=True)
class Hypothesis:
    """A continuation. score: sum of its tokens' log probabilities.  ended: the model ended its answer."""

    tokens: tuple[int, ...] = ()
    score: float = 0.0
    ended: bool = False


Fork = Sequence[tuple[int, int]]
"""The hypotheses of the next step: which of the last step's each continues, and with which token."""

Extend = Callable[[Fork], np.ndarray | None]
"""Computes the logits after each hypothesis, float32 [hypotheses, vocabulary]; None to stop."""


def search(
    logits: np.ndarray, extend: Extend, ends: Callable[[int], bool], n_beams: int, max_tokens: int
) -> list[Hypothesis]:
    """The n_beams likeliest continuations that were found, the likeliest first.

    logits: after the prompt, float32 [1, vocabulary].  ends: whether a token ends the answer; it is no part
    of it.  The search goes on until no unfinished hypothesis can be among them, or has max_tokens.
    """
    open_, ended = [Hypothesis()], list[Hypothesis]()
    for n_tokens in range(1, max_tokens + 1):
        fork: list[tuple[int, int]] = []
        new: list[Hypothesis] = []
        best = best_continuations([each.score for each in open_], logits, 2 * n_beams)
        for rank, (parent, token, score) in enumerate(best):
            tokens = open_[parent].tokens
            if ends(token):
                # One that an open text beats within this step would only win by being short.
                ended += [Hypothesis(tokens, score, ended=True)] * (rank < n_beams)
            elif len(new) < n_beams:
                fork.append((parent, token))
                new.append(Hypothesis((*tokens, token), score))
        open_, ended = new, _best(ended, n_beams)
        # a score never grows, so what has ended above all that is open stays above it
        is_decided = len(ended) >= n_beams and open_ and ended[-1].score >= open_[0].score
        if n_tokens == max_tokens or not open_ or is_decided:
            break
        extended = extend(fork)
        if extended is None:
            break
        logits = extended
    return _best([*ended, *open_], n_beams)


def best_continuations(scores: Sequence[float], logits: np.ndarray, n: int) -> list[tuple[int, int, float]]:
    """The n likeliest: text, token and score. scores: log probabilities.  logits: [texts, vocabulary]."""
    found = []
    for parent, (score, row) in enumerate(zip(scores, logits, strict=True)):
        wide = row.astype(np.float64)
        best = np.argpartition(-wide, min(n, len(wide)) - 1)[:n]
        totals = score + wide[best] - np.logaddexp.reduce(wide)
        found += [(parent, int(token), float(total)) for token, total in zip(best, totals, strict=True)]
    return sorted(found, key=lambda each: (-each[2], each[0], each[1]))[:n]


def _best(hypotheses: Sequence[Hypothesis], n: int) -> list[Hypothesis]:
    return sorted(hypotheses, key=lambda each: -each.score)[:n]


def assign(
    parents: Sequence[int], places: Sequence[int], n_places: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """The place of each hypothesis's state, and the copies from place to place that this needs.

    parents: of each hypothesis.  places: of the parents.  The first hypothesis of a parent takes its place,
    others take places of parents that have none.
    """
    free = iter(sorted(set(range(n_places)) - {places[parent] for parent in parents}))
    taken: list[int] = []
    copies: list[tuple[int, int]] = []
    for place in (places[parent] for parent in parents):
        if place in taken:
            copies.append((place, next(free)))
        taken.append(copies[-1][1] if place in taken else place)
    return taken, copies


class Branches:
    """Continuations of the context's tokens, side by side. on_step: False ends the search."""

    def __init__(self, context: Context, cache: Cache, n: int, on_step: Callable[[], bool]) -> None:
        self._context = context
        self._n = n
        self._on_step = on_step
        self._sequences = [0]
        self._position = len(context.tokens)
        for sequence in range(1, n):
            cache.begin_sequence(context.pointer, sequence)

    def close(self) -> None:
        """Forgets them; the context is empty then."""
        self._context.clear()

    def extend(self, fork: Fork) -> np.ndarray | None:
        """The logits after each, float32 [hypotheses, vocabulary]; None to stop. Raises HobbitError."""
        self._sequences, copies = assign([parent for parent, _ in fork], self._sequences, self._n)
        for source, target in copies:
            self._context.copy_sequence(source, target)
        logits = self._context.extend([token for _, token in fork], self._position, self._sequences)
        self._position += 1
        return logits if self._on_step() else None
