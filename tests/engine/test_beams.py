# SPDX-License-Identifier: MIT
"""Beam search: the likeliest texts, the same as stock llama.cpp gives under the same search."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import logits
import models
import numpy as np
import pytest

from pyhobbit import CacheConfig, ConfigError, Engine, EngineConfig, SamplingConfig
from pyhobbit.engine.beams import Fork, Hypothesis, assign, search

pytestmark = pytest.mark.model

PROMPT = "def read_file(path):\n"
_N_TOKENS = 24
_END = 0


class Model:
    """A model of four tokens, the first of which ends the text. The next token depends on the whole text."""

    def __init__(self) -> None:
        self.texts: list[tuple[int, ...]] = [()]

    def logits(self, text: Sequence[int]) -> np.ndarray:
        return np.random.default_rng([36, *text]).normal(scale=2, size=4).astype(np.float32)

    def extend(self, fork: Fork) -> np.ndarray:
        self.texts = [(*self.texts[parent], token) for parent, token in fork]
        return np.stack([self.logits(text) for text in self.texts])

    def score(self, text: Sequence[int]) -> float:
        rows = [self.logits(text[:i]).astype(np.float64) for i in range(len(text))]
        return sum(
            float(row[token] - np.logaddexp.reduce(row)) for row, token in zip(rows, text, strict=True)
        )


def _search(n_beams: int, max_tokens: int) -> list[Hypothesis]:
    model = Model()
    return search(model.logits(())[None], model.extend, lambda token: token == _END, n_beams, max_tokens)


def test_a_wide_search_finds_the_likeliest_of_all_texts() -> None:
    scores = {}
    for text in product(range(4), repeat=4):
        ended = text[: text.index(_END) + 1] if _END in text else text
        scores[ended] = Model().score(ended)
    best = sorted(scores, key=lambda text: -scores[text])[:5]
    found = _search(200, 4)
    assert [(*each.tokens, _END) if each.ended else each.tokens for each in found[:5]] == best
    assert [each.score for each in found[:5]] == pytest.approx([scores[text] for text in best])


def test_the_search_loads_no_library() -> None:
    """The comparisons run it in processes that load other builds of libllama."""
    code = "import sys, pyhobbit.engine.beams; sys.exit('pyhobbit.engine.llama' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_one_beam_is_greedy_and_more_find_no_worse() -> None:
    model, text = Model(), ()
    while len(text) < 6 and (token := int(model.logits(text).argmax())) != _END:
        text = (*text, token)
    assert _search(1, 6)[0].tokens == text
    scores = [_search(n, 6)[0].score for n in (1, 2, 4, 8)]
    assert scores[-1] == max(scores) > scores[0]
    for found in _search(4, 6):
        assert found.score == pytest.approx(
            Model().score((*found.tokens, _END) if found.ended else found.tokens)
        )


def test_a_search_stops_when_nothing_open_can_be_better_or_it_is_told() -> None:
    model = Model()
    steps = []

    def extend(fork: Fork) -> np.ndarray | None:
        steps.append(len(fork))
        return model.extend(fork) if len(steps) < 3 else None

    search(model.logits(())[None], extend, lambda token: token == _END, 2, 50)
    assert len(steps) == 3
    assert len(_search(2, 1000)[0].tokens) < 50


def test_a_parents_first_child_keeps_its_place() -> None:
    assert assign([0, 0, 0], [0], 3) == ([0, 1, 2], [(0, 1), (0, 2)])
    assert assign([2, 0, 2], [0, 1, 2], 3) == ([2, 0, 1], [(2, 1)])
    assert assign([0, 1, 2], [2, 0, 1], 3) == ([2, 0, 1], [])
    assert assign([1, 1], [0, 3], 4) == ([3, 0], [(3, 0)])


@pytest.fixture(scope="module")
def engine(tiny_gguf: Path) -> Iterator[Engine]:
    config = EngineConfig(cache=CacheConfig(pools=8 << 20), n_threads=2, n_beams=8)
    with Engine(tiny_gguf, config) as opened:
        yield opened


@pytest.mark.parametrize("n_beams", [1, 4, 8])
def test_the_texts_are_those_of_stock_under_the_same_search(n_beams: int) -> None:
    config = EngineConfig(cache=CacheConfig(pools=2 << 20), n_threads=logits.N_THREADS, n_beams=8)
    with Engine(models.tiny(), config) as engine:
        tokens = engine._opened().model.tokenize(PROMPT)
        found = engine.beam_search(PROMPT, n_beams, _N_TOKENS)
        assert engine.stats().cache.evictions > 0
    plan = logits.Plan([[(token, i, 0) for i, token in enumerate(tokens)]], _N_TOKENS - 1, n_beams, ends=True)
    stock = logits.run(models.stock_dir(), models.tiny(), {"beams": plan})
    assert [list(each.tokens) for each in found] == stock.texts["beams"]
    assert len(found) == n_beams
    assert [each.score for each in found] == sorted((each.score for each in found), reverse=True)


def test_a_search_leaves_an_engine_that_generates_as_before(engine: Engine) -> None:
    def greedy() -> str:
        return "".join(piece.text for piece in engine.generate(PROMPT, 12, SamplingConfig(temp=0)))

    before = greedy()
    first = engine.beam_search(PROMPT, 3, 12)
    assert engine.n_context_tokens == 0
    assert greedy() == before
    assert [each.text for each in engine.beam_search(PROMPT, 3, 12)] == [each.text for each in first]
    assert engine.beam_search(PROMPT, 1, 12)[0].text == before
    assert {each.finish for each in first} <= {"length", "stop"}
    assert first[0].score >= engine.beam_search(PROMPT, 1, 12)[0].score


def test_the_context_bounds_what_all_beams_take(tiny_gguf: Path) -> None:
    config = EngineConfig(cache=CacheConfig(pools=8 << 20), n_ctx=256, n_threads=1, n_beams=8)
    with Engine(tiny_gguf, config) as engine:
        found = engine.beam_search("x = 1\n" * 20, 8)
        n_prompt = engine.stats().prompt_tokens
    assert found
    longest = (256 - n_prompt) // 8 + 1
    assert max(len(each.tokens) for each in found) <= longest
    assert all(each.finish == ("context" if len(each.tokens) == longest else "stop") for each in found)


def test_an_interrupt_ends_the_search_with_what_there_is(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = engine._opened().context
    extend = context.extend

    def interrupted(tokens: list[int], position: int, sequences: list[int]) -> np.ndarray:
        engine.interrupt()
        return extend(tokens, position, sequences)

    monkeypatch.setattr(context, "extend", interrupted)
    found = engine.beam_search(PROMPT, 4, 12)
    assert {(len(each.tokens), each.finish) for each in found} <= {(1, "interrupted"), (0, "stop")}
    assert not engine.take_interrupt()


@pytest.mark.parametrize("n_beams", [0, 9])
def test_beams_that_were_not_asked_for_are_refused(engine: Engine, n_beams: int) -> None:
    with pytest.raises(ConfigError, match=r"opened for 1 to 8 beams, not for \d; open it with EngineConfig"):
        engine.beam_search(PROMPT, n_beams)
    with pytest.raises(ConfigError, match="n_beams is 65; a search keeps at most 64"):
        EngineConfig(n_beams=65)
