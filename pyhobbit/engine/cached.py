# SPDX-License-Identifier: MIT
"""The common parts of Engine and Hobbit: closing, counters of tokens, settings that change while a model is
open."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from pyhobbit.engine.llama import LoadedModel
from pyhobbit.engine.stats import ModelInfo, Stats, peak_rss_bytes
from pyhobbit.errors import HobbitError


class Closing(AbstractContextManager[Any]):
    """A context manager that is closed at its end. If two errors meet, the first one is raised."""

    close: Callable[[], None]

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except HobbitError:
            if value is None:
                raise


class Tally:
    """Tokens and seconds of the answers so far, by the fields of Stats."""

    def __init__(self) -> None:
        self.counts: Any = Counter()  # whole numbers and seconds

    def add_prompt(self, n_tokens: int, n_evaluated: int) -> None:
        """Counts a prompt. n_evaluated: its tokens that the KV cache did not hold."""
        self.counts.update(prompt_tokens=n_tokens, prompt_tokens_evaluated=n_evaluated)

    def add_token(self, seconds: float, is_first: bool) -> None:
        """Counts a token. seconds: since the prompt for an answer's first one, else since the last one."""
        if is_first:
            self.counts.update(generated_tokens=1, answers=1, first_tokens_s=seconds)
        else:
            self.counts.update(generated_tokens=1, decoded_tokens=1, decode_s=seconds)


class CachedModel(Closing):
    """An open model with its expert cache."""

    _tally: Tally
    _load_s: float

    def __init_subclass__(cls) -> None:
        for name in ("stats", "live", "set"):
            setattr(cls, name, getattr(cls, name))  # the reference shows a class's own methods

    @property
    @abstractmethod
    def _loaded(self) -> LoadedModel:
        """Raises HobbitError where the model is closed."""

    @abstractmethod
    def info(self) -> ModelInfo:
        """Figures of the opened model."""

    def stats(self) -> Stats:
        """Counters and times since opening; Stats.since() gives those between two moments."""
        cache = self._loaded.cache.stats()
        return Stats(self.info(), cache, self._load_s, peak_rss_bytes(), **self._tally.counts)

    def live(self) -> dict[str, float]:
        """The settings that set() takes, by name; none without a cache."""
        return self._loaded.cache.live()

    def set(self, **settings: float) -> None:
        """Replaces settings of CacheConfig that may change while the model is open, from the next token on.

        Others keep their values. Raises ConfigError for values that cannot be, HobbitError
        where the model has no cache, or cannot apply them.
        """
        self._loaded.cache.set(**settings)
