# SPDX-License-Identifier: MIT
"""Drafts from the text for Hobbit's draft_model, as many as pay by measured time."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pyhobbit.engine.drafts import Governor, Lookup
from pyhobbit.errors import ConfigError
from pyhobbit.settings.config import EngineConfig

SetBatch = Callable[..., None]
"""llama-cpp-python's LlamaBatch.set_batch."""


class TextDrafts:
    """A draft_model: what followed the last three tokens when they came before in the text.

    Measured time decides how many tokens are drafted, as for EngineConfig.n_drafts. One object serves one
    model.
    """

    def __init__(self, num_pred_tokens: int = 7) -> None:
        """Drafts at most num_pred_tokens at once. Raises ConfigError for a number that cannot be."""
        if not (isinstance(num_pred_tokens, int) and 1 <= num_pred_tokens <= EngineConfig.max_drafts):
            raise ConfigError(
                f"num_pred_tokens is {num_pred_tokens}; it must lie between 1 and {EngineConfig.max_drafts}"
            )
        self.num_pred_tokens = num_pred_tokens
        self.n_drafted = self.n_accepted = 0  # since the beginning
        self._governor = Governor(num_pred_tokens)
        self._text = np.array([], np.intc)
        self._lookup = Lookup()
        self._n_last = 0  # drafts of the last call
        self._pass: tuple[int, float] | None = None  # tokens and seconds of the pass since then

    def with_logits(self, set_batch: SetBatch) -> SetBatch:
        """Asks for the logits of every token of a pass with drafts; else for those that Llama wants."""

        def fill(batch: Sequence[int], n_past: int, logits_all: bool) -> None:
            set_batch(batch, n_past, logits_all or len(batch) <= 1 + self.num_pred_tokens)

        return fill

    def note_pass(self, n_tokens: int, seconds: float) -> None:
        """Tokens that the model computed last."""
        self._pass = (n_tokens, seconds)

    def __call__(self, input_ids: Sequence[int] | np.ndarray, /, **_kwargs: Any) -> np.ndarray:
        """Drafts [n] after a text [n_tokens], of which the last token is not computed yet."""
        text = np.array(input_ids, np.intc)
        n_known = len(self._text)
        if 0 < n_known < len(text) and np.array_equal(text[:n_known], self._text):
            self._judge(len(text) - n_known - 1)
            self._lookup.extend(text[n_known:].tolist())
        else:
            self._lookup = Lookup(text.tolist())
        self._text, self._pass = text, None
        drafted = self._lookup.draft(self._governor.width)
        self._n_last = len(drafted)
        return np.array(drafted, np.intc)

    def _judge(self, n_accepted: int) -> None:
        if self._pass is None or self._pass[0] != 1 + self._n_last or n_accepted > self._n_last:
            return  # the text went on by other tokens than the model's
        self._governor.note(self._n_last, n_accepted, self._pass[1])
        self.n_drafted, self.n_accepted = self.n_drafted + self._n_last, self.n_accepted + n_accepted
