# SPDX-License-Identifier: MIT
"""MoBiLE's second pass: tokens of which the draft is unsure are computed again, all high, in their place."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import logits
import models
import numpy as np
import pytest
import random_moe
from exactness import CASES, assert_same_bits, plans_of
from traces import turn_lengths

from pyhobbit import CacheConfig, Engine, EngineConfig, HobbitError
from pyhobbit.engine.llama import Model
from pyhobbit.engine.session import Session
from pyhobbit.native.ffi import llama
from pyhobbit.routing.trace import read_trace

pytestmark = pytest.mark.model

LITTLE: dict[str, logits.Override] = {"hobbit.rule": "rank", "hobbit.strict": True}
NAMES = ("tiny-q4_0-repacked", "qwen3moe", "deepseek2", "gpt-oss")  # the last one has sliding windows
N_TOKENS = 600  # more than four sliding windows


def _run(name: str, plans: dict[str, logits.Plan], **settings: logits.Override) -> logits.Result:
    case = CASES[name]
    pools = models.routed_expert_bytes(case.plain()) // 2
    keys = {f"hobbit.{key}": value for key, value in settings.items()}
    overrides = {**LITTLE, "hobbit.pools": pools, **keys}
    return logits.run(models.lib_dir(), case.served(), plans, overrides, repack=case.repack)


@pytest.mark.parametrize("name", NAMES)
def test_with_confidence_1_every_bit_is_that_of_all_high(name: str) -> None:
    case, plans = CASES[name], plans_of(name)
    stock = logits.run(models.stock_dir(), case.plain(), plans, repack=case.repack)
    ours = _run(name, plans, confidence=1.0)
    for plan, expected in stock.logits.items():
        assert_same_bits(ours.logits[plan], expected)
    n_drafts = sum(
        len(batch)
        for plan in plans.values()
        for batch in plan.batches
        if len(batch) == len({s for *_, s in batch})
    )
    assert ours.stats["tokens_repeated"] == n_drafts + plans["prefill"].greedy


@pytest.mark.parametrize(
    "settings", [{"t1": 0.0, "t2": 0.0, "rule": "gate"}, {"t1": 0.5, "t2": 0.5, "rule": "random"}]
)
def test_with_confidence_1_the_rule_does_not_matter(settings: dict[str, logits.Override]) -> None:
    plans = {"decode": plans_of("qwen3moe")["decode"]}
    high = _run("qwen3moe", plans, rule="gate", t1=1.0)
    assert_same_bits(
        _run("qwen3moe", plans, confidence=1.0, **settings).logits["decode"], high.logits["decode"]
    )


def test_a_draft_that_is_never_doubted_is_kept() -> None:
    plans = {"decode": plans_of("qwen3moe")["decode"]}
    draft = _run("qwen3moe", plans, prefetch=0)  # a prefetched expert serves where it would be skipped
    kept = _run("qwen3moe", plans, confidence=1e-9, prefetch=0)
    assert_same_bits(kept.logits["decode"], draft.logits["decode"])
    names = ("selections_high", "selections_skipped", "hits_high", "misses_high", "tokens_repeated")
    assert {n: kept.stats[n] for n in names} == {n: draft.stats[n] for n in names}
    assert kept.stats["tokens_repeated"] == 0


def test_each_token_is_counted_and_recorded_once(tmp_path: Path) -> None:
    plans = {"decode": plans_of("qwen3moe")["decode"]}
    trace = tmp_path / "trace.csv"
    n_tokens, shape = len(plans["decode"].batches), random_moe.ARCHS["qwen3moe"].shape
    draft = _run("qwen3moe", plans, prefetch=0)
    ours = _run("qwen3moe", plans, confidence=1.0, trace=str(trace), prefetch=0)
    assert ours.stats["tokens_repeated"] == n_tokens
    assert (
        ours.stats["selections_high"] == n_tokens * shape.n_layer * shape.n_used
    )  # counts of the passes that were kept
    assert ours.stats["selections_skipped"] == 0
    assert ours.stats["layers_computed"] == 2 * n_tokens * shape.n_layer
    assert turn_lengths(read_trace(trace)) == [n_tokens]
    # Each expert that a token used in either pass counts once: all of the second pass, and in later
    # layers some that the draft alone chose.
    n_used = ours.stats["hits_high"] + ours.stats["misses_high"]
    n_drafted = draft.stats["hits_high"] + draft.stats["misses_high"]
    assert n_drafted == n_tokens * shape.n_layer * shape.n_used // 2
    assert ours.stats["selections_high"] <= n_used < ours.stats["selections_high"] + n_drafted // 4


def test_the_second_pass_is_prefetched_from_the_first() -> None:
    decode = plans_of("qwen3moe")["decode"]
    plans = {"decode": replace(decode, batches=decode.batches[:4])}  # before a trial may pause it
    # the first layer's router sees the same twice, and later ones nearly the same
    ours = _run("qwen3moe", plans, confidence=1.0, predictor="repeat")
    alone = _run("qwen3moe", plans, predictor="repeat")
    n_predicted = ours.stats["predicted"] - alone.stats["predicted"]
    n_right = ours.stats["predicted_right"] - alone.stats["predicted_right"]
    assert n_predicted > 0
    assert n_right > 0.75 * n_predicted
    assert ours.stats["prefetched_used"] > alone.stats["prefetched_used"]


#
# through a session: what the second pass does to the memory of the context
#


@contextmanager
def _session(
    path: Path, *, swa_full: bool = True, aborted: Callable[[], bool] = lambda: False, **settings: Any
) -> Iterator[Session]:
    def set_context(params: Any, _model: Model) -> None:
        params.n_ctx = params.n_batch = params.n_ubatch = N_TOKENS + 48
        params.n_threads = params.n_threads_batch = 1
        params.swa_full = swa_full

    pools = models.routed_expert_bytes(path)
    keys = {f"hobbit.{key}": value for key, value in settings.items()}
    with Session(path, {**LITTLE, "hobbit.pools": pools, **keys}, set_context, aborted=aborted) as session:
        yield session


@functools.cache
def _tokens(n_vocab: int) -> list[int]:
    return np.random.default_rng(7).integers(3, n_vocab, N_TOKENS).tolist()


def _positions(session: Session) -> tuple[int, int]:
    memory = llama.llama_get_memory(session.context.pointer)
    return llama.llama_memory_seq_pos_min(memory, 0), llama.llama_memory_seq_pos_max(memory, 0)


@pytest.mark.parametrize(("arch", "swa_full"), [("qwen3moe", True), ("gpt-oss", True), ("gpt-oss", False)])
def test_600_tokens_keep_every_position(arch: str, swa_full: bool) -> None:
    path = models.random_model(arch)
    tokens = _tokens(random_moe.ARCHS[arch].shape.n_vocab)

    def last_logits(**settings: Any) -> tuple[list[np.ndarray], tuple[int, int]]:
        found = []
        with _session(path, swa_full=swa_full, **settings) as session:
            for i, token in enumerate(tokens):
                session.context.evaluate([token])
                if i % 100 == 99:
                    found.append(session.context.last_logits().copy())
            return found, _positions(session)

    ours, positions = last_logits(confidence=1.0)
    high, expected = last_logits(rule="gate", t1=1.0)
    assert positions == expected
    assert positions[1] == N_TOKENS - 1
    if swa_full:
        assert positions[0] == 0
    for mine, theirs in zip(ours, high, strict=True):
        assert_same_bits(mine, theirs)


def test_the_second_pass_equals_a_token_that_is_removed_and_computed_again() -> None:
    """The same by hand: a draft whose best probability is not above the confidence leaves the context."""
    path, confidence = models.tiny(), 0.3
    tokens = CASES["tiny-f16"].tokens()[:200]

    def best_probability(values: np.ndarray) -> float:
        exponents = np.exp(values - values.max(), dtype=np.float64)
        return float(exponents.max() / exponents.sum())

    with _session(path, confidence=confidence) as session:
        ours = []
        for token in tokens:
            session.context.evaluate([token])
            ours.append(session.context.last_logits()[0].copy())
        n_repeated = session.cache.stats().tokens_repeated
    by_hand, n_unsure = [], 0
    with _session(path) as session:
        for token in tokens:
            session.cache.set(t1=0.5, t2=0.5)
            session.context.evaluate([token])
            if best_probability(session.context.last_logits()[0]) <= confidence:
                session.context.truncate(len(session.context.tokens) - 1)
                session.cache.set(t1=1.0, t2=1.0)
                session.context.evaluate([token])
                n_unsure += 1
            by_hand.append(session.context.last_logits()[0].copy())
    assert 20 < n_unsure < len(tokens) - 20
    assert n_repeated == n_unsure
    assert_same_bits(np.array(ours), np.array(by_hand))


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 0.95])
def test_a_token_that_is_aborted_in_either_pass_leaves_no_trace(share: float) -> None:
    """Both passes take half of the calls each."""
    path = models.random_model("qwen3moe")
    tokens = _tokens(512)[:8]
    n_calls, limit = 0, 1 << 30

    def aborted() -> bool:
        nonlocal n_calls
        n_calls += 1
        time.sleep(0.001)  # the next operation asks again
        return n_calls > limit

    with _session(path, aborted=aborted, confidence=1.0) as session:
        context = session.context
        context.evaluate(tokens[:6])
        context.evaluate([tokens[6]])
        for _ in range(2):  # the second time nothing is missed, as in those to come
            n_calls = 0
            assert context._decode([tokens[7]], may_abort=True)
            expected, n_all = context.last_logits().copy(), n_calls
            context.truncate(7)
        n_calls, limit = 0, int(share * n_all)
        assert not context._decode([tokens[7]], may_abort=True)
        assert _positions(session) == (0, 6)
        n_repeated = session.cache.stats().tokens_repeated
        limit = 1 << 30
        assert context._decode([tokens[7]], may_abort=True)
        assert_same_bits(context.last_logits(), expected)
        assert session.cache.stats().tokens_repeated == n_repeated + 1


#
# models that cannot
#


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid") / "hybrid.gguf"
    random_moe.write_model(random_moe.hybrid(), path, models.stock_dir())
    return path


REFUSAL = "confidence computes tokens a second time, and layers of .* keep a state"


def test_a_model_with_a_recurrent_state_declines(hybrid: Path) -> None:
    little = CacheConfig(pools=1 << 20, rule="rank")
    with Engine(hybrid, EngineConfig(cache=little, n_ctx=64)) as engine:
        assert len(list(engine.generate("import os", 4))) > 0  # all else works
        with pytest.raises(HobbitError, match=REFUSAL):
            engine.set(confidence=0.7)
        assert engine.live()["confidence"] == 0
        engine.set(confidence=0)
    with pytest.raises(HobbitError, match=REFUSAL):
        Engine(hybrid, EngineConfig(cache=CacheConfig(pools=1 << 20, rule="rank", confidence=0.7))).open()


def test_a_confidence_without_a_lossy_rule_is_refused(tiny_gguf: Path) -> None:
    says = "confidence computes unsure tokens again, all high, and here every token is all high at first"
    with pytest.raises(HobbitError, match=says):
        Engine(tiny_gguf, EngineConfig(cache=CacheConfig(pools=8 << 20, confidence=0.7), n_ctx=64)).open()
    with Engine(tiny_gguf, EngineConfig(cache=CacheConfig(pools=8 << 20, t1=0.5), n_ctx=64)) as engine:
        engine.set(confidence=0.7)
        engine.set(t1=1.0)  # the tokens are all high at once
        with pytest.raises(HobbitError, match=says):
            engine.set(confidence=0.8)


def test_the_confidence_changes_between_two_answers(tiny_gguf: Path) -> None:
    with Engine(tiny_gguf, EngineConfig(cache=CacheConfig(pools=8 << 20, rule="rank"), n_ctx=128)) as engine:
        list(engine.generate("import os", 4))
        assert engine.stats().cache.tokens_repeated == 0
        engine.set(confidence=1.0)
        list(engine.generate("def f(x):\n", 8))
        assert engine.stats().cache.tokens_repeated == 7
        assert (engine.info().t1, engine.live()["confidence"]) == (0.5, 1.0)
        engine.set(t1=0.25, t2=0.5)
        assert (engine.info().t1, engine.live()["confidence"]) == (0.25, 1.0)
