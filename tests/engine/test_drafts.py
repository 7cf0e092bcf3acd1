# SPDX-License-Identifier: MIT
"""Drafts from the text: they change no token, and their number follows what they cost."""

from collections.abc import Callable
from pathlib import Path

import architecture_file
import models
import pytest

from pyhobbit import (
    CacheConfig,
    ConfigError,
    Engine,
    EngineConfig,
    HobbitError,
    SamplingConfig,
)
from pyhobbit.engine.drafts import Governor, Lookup

pytestmark = pytest.mark.model

REPEATED = "for i in range(10):\n    print(i)\n" * 4
N_TOKENS = 96


def test_a_draft_is_what_followed_the_last_three_tokens_the_last_time() -> None:
    lookup = Lookup([1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 1, 2])
    assert lookup.draft(4) == []
    lookup.extend([3])
    assert lookup.draft(4) == [6, 7, 1, 2]
    assert lookup.draft(1) == [6]
    assert lookup.draft(0) == []
    lookup.extend([4])
    assert lookup.draft(2) == [5, 1]
    assert Lookup([1, 2, 1]).draft(3) == Lookup().draft(3) == []


def _passes(governor: Governor, n_tokens: int, right: float, cost: Callable[[int], float]) -> float:
    """Seconds for so many tokens, where the text always has a draft and this share of each is right.

    cost: of a pass with so many drafts.
    """
    seconds, n_done = 0.0, 0
    while n_done < n_tokens:
        width = governor.width
        n_accepted = int(right * width)
        governor.note(width, n_accepted, cost(width))
        seconds += cost(width)
        n_done += n_accepted + 1
    return seconds


def _linear(row_s: float) -> Callable[[int], float]:
    return lambda width: 1.0 + row_s * width


def test_right_drafts_become_more() -> None:
    governor = Governor(7)
    assert _passes(governor, 400, 1.0, _linear(0.5)) < 0.65 * 400
    assert governor.width == 7


@pytest.mark.parametrize("seven_s", [5.6, 20.0])  # less than seven earn alone, and more than they earn
def test_as_many_are_drafted_as_take_least_time_per_token(seven_s: float) -> None:
    cost = {0: 1.0, 1: 1.5, 3: 2.5, 7: seven_s}
    governor = Governor(7)
    assert _passes(governor, 400, 1.0, cost.__getitem__) < 0.72 * 400
    assert governor.width == 3


@pytest.mark.parametrize("row_s", [0.1, 0.6, 1.5])
def test_wrong_drafts_cost_little(row_s: float) -> None:
    assert _passes(Governor(7), 1024, 0.0, _linear(row_s)) < 1.03 * 1024


def test_right_drafts_that_cost_more_than_they_bring_stop() -> None:
    assert _passes(Governor(7), 1024, 1.0, _linear(1.4)) < 1.03 * 1024


def test_a_pause_ends() -> None:
    governor = Governor(3)
    _passes(governor, 40, 0.0, _linear(2.0))
    assert _passes(governor, 400, 1.0, _linear(0.1)) < 300


def _texts(model: Path, n_drafts: int, n_ctx: int) -> tuple[list[list[int | None]], int, int]:
    """Greedy and sampled answers to two prompts each, with the tokens drafted and accepted."""
    config = EngineConfig(CacheConfig(pools=6 << 20, prefetch=0), n_ctx=n_ctx, n_drafts=n_drafts)
    found = []
    with Engine(model, config) as engine:
        for sampling in (SamplingConfig(temp=0), SamplingConfig(seed=3)):
            for prompt in (REPEATED, "def read_file(path):\n"):
                pieces = list(engine.generate(prompt, N_TOKENS, sampling))
                found.append([piece.token for piece in pieces])
                assert engine.n_context_tokens <= n_ctx
        stats = engine.stats()
    assert stats.generated_tokens == sum(token is not None for tokens in found for token in tokens)
    return found, stats.drafted_tokens, stats.accepted_tokens


@pytest.mark.parametrize("n_ctx", [256, 96])  # the smaller one ends answers
def test_drafts_change_no_token(n_ctx: int) -> None:
    expected, n_drafted, _ = _texts(models.tiny(), 0, n_ctx)
    assert n_drafted == 0
    found, n_drafted, n_accepted = _texts(models.tiny(), 7, n_ctx)
    assert found == expected
    assert 0 < n_accepted <= n_drafted


def _left_early(n_drafts: int) -> list[str]:
    """Answers to a text that ends within another answer, which was left there."""
    cache = CacheConfig(pools=6 << 20, prefetch=0)
    config = EngineConfig(cache, n_ctx=256, n_batch=8, n_drafts=n_drafts)
    greedy, found = SamplingConfig(temp=0), []
    with Engine(models.tiny(), config) as engine:
        for n in range(8, 23, 2):
            answer = engine.generate(REPEATED, 32, greedy)
            begin = "".join(next(answer).text for _ in range(n))
            answer.close()
            found.append("".join(piece.text for piece in engine.generate(REPEATED + begin, 16, greedy)))
    return found


def test_an_answer_that_is_left_early_leaves_a_context_to_go_on_with() -> None:
    assert _left_early(15) == _left_early(0)


def test_what_cannot_go_back_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="n_drafts is 16; it must lie between 0 and 15"):
        EngineConfig(n_drafts=16)
    with pytest.raises(HobbitError, match="state cannot go back"):
        Engine(
            architecture_file.write("kimi-linear", tmp_path / "m.gguf"), EngineConfig(n_ctx=64, n_drafts=3)
        ).open()
