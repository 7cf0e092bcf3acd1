# SPDX-License-Identifier: MIT
"""The sequences of a context that a beam search keeps."""

from collections.abc import Callable

import numpy as np

from pyhobbit.engine.beams import Fork, assign
from pyhobbit.engine.cache import Cache
from pyhobbit.engine.llama import Context


class Branches:
    """Continuations of the context's tokens, side by side; their common beginning lies in memory once.

    on_step: asked after each step; False ends the search. A context manager: the end forgets everything.
    """

    def __init__(self, context: Context, cache: Cache, n: int, on_step: Callable[[], bool]) -> None:
        self._context = context
        self._n = n
        self._on_step = on_step
        self._sequences = [0]
        self._position = context.position
        for sequence in range(1, n):
            cache.begin_sequence(sequence)

    def __enter__(self) -> "Branches":
        return self

    def __exit__(self, *_: object) -> None:
        self._context.clear()

    def extend(self, fork: Fork) -> np.ndarray | None:
        """The logits after each, float32 [hypotheses, vocabulary]; None to stop. Raises HobbitError."""
        self._sequences, copies = assign([parent for parent, _ in fork], self._sequences, self._n)
        for source, target in copies:
            self._context.copy_sequence(source, target)
        logits = self._context.extend([token for _, token in fork], self._position, self._sequences)
        self._position += 1
        return logits if self._on_step() else None
