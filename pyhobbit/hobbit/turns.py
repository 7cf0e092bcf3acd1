# SPDX-License-Identifier: MIT
"""One thread at a time in a model: two in one context of llama.cpp end the process."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

from pyhobbit.hobbit.llama_errors import ComputeError


class Turns:
    """Who computes with a model. A thread may enter again; others get an error and do not wait."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._n_answers = 0

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Raises ComputeError where another thread is inside."""
        if not self._lock.acquire(blocking=False):
            raise ComputeError(
                "another thread computes with this model: "
                "use it from one thread at a time, or open a second Hobbit"
            )
        try:
            yield
        finally:
            self._lock.release()

    def begin_answer(self) -> int:
        """Its number; answers that have not ended are over."""
        self._n_answers += 1
        return self._n_answers

    def check(self, answer: int) -> None:
        """Raises ComputeError where another answer was begun since."""
        if answer != self._n_answers:
            raise ComputeError(
                "another answer was begun with this model before this one had ended: "
                "take one after the other, or open a second Hobbit"
            )
