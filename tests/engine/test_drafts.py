# SPDX-License-Identifier: MIT
"""Drafts from the text: they change no token, and their number follows what they cost."""

import pickle
import re
import resource
from collections.abc import Callable
from pathlib import Path

import architecture_file
import gguf
import models
import numpy as np
import pytest
from architecture_models import N_EMBD

from pyhobbit import (
    CacheConfig,
    ConfigError,
    Engine,
    EngineConfig,
    HeadDrafts,
    Hobbit,
    HobbitError,
    SamplingConfig,
)
from pyhobbit.engine.drafts import Governor, Lookup
from pyhobbit.native.machine import resident_memory

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
    with pytest.raises(ConfigError, match="give --drafts N"):
        EngineConfig(draft_head=True)
    with pytest.raises(HobbitError, match="state cannot go back"):
        Engine(
            architecture_file.write("kimi-linear", tmp_path / "m.gguf"), EngineConfig(n_ctx=64, n_drafts=3)
        ).open()


_ZERO = r"(attn_output|ssm_out|ffn_down_exps|ffn_down_shexp)\.weight$"


def _crafted(folder: Path, column: int) -> Path:
    """Random weights of qwen35moe, whose layers add nothing.

    column: of what the draft head reads: 0 the token, and the width the state before it.
    """
    own_words = r"nextn\.(embed_tokens|shared_head_head)"
    source = gguf.GGUFReader(architecture_file.with_head("qwen35moe", folder / "random.gguf", own_words))
    writer = gguf.GGUFWriter(folder / "m.gguf", "qwen35moe")
    for field in source.fields.values():
        kind, *of = field.types
        if not field.name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(field.name, field.contents(), kind, of[0] if of else None)
    for each in source.tensors:
        data = np.zeros_like(each.data) if re.search(_ZERO, each.name) else each.data
        if re.search(r"(output_norm|enorm|hnorm|shared_head_norm)\.weight$", each.name):
            data = np.ones_like(data)
        if each.name.endswith("eh_proj.weight"):
            data = np.eye(*data.shape, column, dtype=data.dtype)
        writer.add_tensor(each.name, data, raw_dtype=each.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "m.gguf"


@pytest.mark.parametrize("budget", [{"pools": 3 << 20}, {"memory": 300 << 20}])
def test_a_draft_head_foretells_a_text_and_changes_no_token(tmp_path: Path, budget: dict[str, int]) -> None:
    found, path = [], _crafted(tmp_path, 0)
    if "memory" in budget:  # beside what the process of the tests holds
        budget = {"memory": budget["memory"] + resident_memory()}
    earlier_peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for own in ({}, {"n_drafts": 3, "draft_head": True}):
        config = EngineConfig(CacheConfig(**budget), n_ctx=256, n_batch=16, **own)
        with Engine(path, config) as engine:
            for prompt in (REPEATED, "def f(x):\n"):
                pieces = engine.generate(prompt, N_TOKENS, SamplingConfig(temp=0))
                found.append([piece.token for piece in pieces])
            stats = engine.stats()
    assert found[:2] == found[2:]
    assert stats.accepted_tokens == stats.drafted_tokens > 40
    assert stats.peak_rss_bytes < max(budget.get("memory", 1 << 40), earlier_peak + (1 << 20))


def test_a_hobbit_takes_drafts_from_a_head(tmp_path: Path) -> None:
    path, drafts, texts = _crafted(tmp_path, 0), HeadDrafts(3), []
    with pytest.raises(HobbitError, match="has no draft head"):
        Hobbit(models.tiny(), draft_model=HeadDrafts(3), verbose=False)
    for own in ({"pools": 3 << 20}, {"memory": (300 << 20) + resident_memory(), "draft_model": drafts}):
        with Hobbit(path, n_ctx=256, verbose=False, **own) as model:
            for prompt in (REPEATED, REPEATED[:-20], "def f(x):\n"):
                answer = model(prompt, max_tokens=N_TOKENS, temperature=0)
                texts.append(answer["choices"][0]["text"])
            pickle.dumps(model)
    assert texts[:3] == texts[3:]
    assert drafts.n_accepted == drafts.n_drafted > 40
    assert drafts.head is None


def test_a_draft_head_reads_the_state_before_a_token(tmp_path: Path) -> None:
    config = EngineConfig(CacheConfig(pools=3 << 20), n_ctx=256, n_batch=16, n_drafts=3, draft_head=True)
    with Engine(_crafted(tmp_path, N_EMBD), config) as engine:
        for prompt in (REPEATED, REPEATED[:-20], "def f(x):\n"):
            *_, last = engine.generate(prompt, 9, SamplingConfig(temp=0))
            context = engine._session.context
            assert context.head.draft(3, last.token, context.position)[0] == last.token
            assert context.head.draft(3, last.token, context.position)[0] == last.token
