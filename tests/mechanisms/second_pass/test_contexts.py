# SPDX-License-Identifier: MIT
"""Two contexts of one model, in two threads."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from exactness import CASES, assert_same_bits
from traces import turn_lengths

from pyhobbit.engine.llama import Context
from pyhobbit.engine.session import Session
from pyhobbit.routing.trace import read_trace

pytestmark = pytest.mark.model

N_TOKENS = 40


def _set_context(params: Any, _model: Any) -> None:
    params.n_ctx = params.n_batch = params.n_ubatch = 128
    params.n_threads = params.n_threads_batch = 1


def _last_logits(context: Context, tokens: list[int]) -> np.ndarray:
    """After a prompt of half of the tokens, and after each of the others."""
    found = []
    context.evaluate(tokens[: N_TOKENS // 2])
    for token in tokens[N_TOKENS // 2 :]:
        context.evaluate([token])
        found.append(context.last_logits()[0].copy())
    return np.array(found)


def test_two_threads_compute_the_bits_that_each_context_computes_alone(tmp_path: Path) -> None:
    """With a second pass, in which the logits of one context must not be taken for the other's."""
    trace_file = tmp_path / "t.csv"
    settings = {
        "hobbit.pools": 4 << 20,
        "hobbit.strict": True,
        "hobbit.rule": "rank",
        "hobbit.confidence": 0.3,
    }
    every = CASES["tiny-f16"].tokens()
    texts = [every[:N_TOKENS], every[N_TOKENS : 2 * N_TOKENS]]
    alone = []
    for text in texts:
        with Session(models.tiny(), settings, _set_context) as session:
            alone.append(_last_logits(session.context, text))
            assert session.cache.stats().tokens_repeated > 0

    with Session(models.tiny(), {**settings, "hobbit.trace": str(trace_file)}, _set_context) as session:
        second = Context(session.model, _set_context, lambda: False)
        try:
            with ThreadPoolExecutor(2) as pool:
                together = list(pool.map(_last_logits, (session.context, second), texts))
        finally:
            second.close()
    for ours, expected in zip(together, alone, strict=True):
        assert_same_bits(ours, expected)
    assert len(turn_lengths(read_trace(trace_file))) == 2
