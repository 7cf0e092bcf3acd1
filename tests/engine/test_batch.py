# SPDX-License-Identifier: MIT
"""How many tokens of a prompt one pass computes."""

from typing import Any

import pytest
from models import random_model

from pyhobbit.engine import plan
from pyhobbit.engine.engine import Engine
from pyhobbit.engine.plan import lay_out
from pyhobbit.hobbit.hobbit import Hobbit
from pyhobbit.settings.config import CacheConfig, EngineConfig, SamplingConfig

_MIB = 1 << 20


def test_it_is_the_largest_that_leaves_the_experts_nine_tenths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers count even where the pools' size is given."""
    path, sizes = random_model("qwen3moe", "f16"), EngineConfig.batches[:3]
    costs = [each.compute for each in (lay_out(path, _config(n_ctx=2048, n_batch=n)) for n in sizes)]
    chosen = []
    for cost in costs:
        share = (cost - costs[0]) / (2 * _MIB)
        monkeypatch.setattr(plan, "_MOST_OF_POOLS", 0.02 + 1.2 * share)
        chosen.append(lay_out(path, _config(n_ctx=2048)).n_batch)
    assert chosen == [*sizes]


@pytest.fixture
def any_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers of a small model are large beside its experts."""
    monkeypatch.setattr(plan, "_MOST_OF_POOLS", 1000)


def _config(**settings: Any) -> EngineConfig:
    return EngineConfig(cache=CacheConfig(pools=2 * _MIB), n_threads=1, **settings)


@pytest.mark.usefixtures("any_share")
@pytest.mark.parametrize(("n_ctx", "expected"), [(2048, 2048), (1500, 1500), (512, 512), (100, 100)])
def test_a_plan_chooses_no_more_than_the_context(n_ctx: int, expected: int) -> None:
    assert lay_out(random_model("qwen3moe", "f16"), _config(n_ctx=n_ctx)).n_batch == expected


@pytest.mark.usefixtures("any_share")
def test_what_is_given_is_taken_and_planned_with() -> None:
    path = random_model("qwen3moe", "f16")
    large, small = (lay_out(path, _config(n_ctx=2048, n_batch=n)) for n in (2048, 64))
    chosen = lay_out(path, _config(n_ctx=2048))
    assert (large.n_batch, small.n_batch) == (2048, 64)
    assert large.compute > small.compute
    assert (chosen.n_batch, chosen.compute) == (large.n_batch, large.compute)


def test_buffers_of_a_small_model_are_not_worth_it() -> None:
    assert lay_out(random_model("qwen3moe", "f16"), _config(n_ctx=2048)).n_batch == 512


def test_what_fits_needs_no_larger_passes() -> None:
    pools = EngineConfig(cache=CacheConfig(pools=1 << 30), n_ctx=2048, n_threads=1)
    assert lay_out(random_model("qwen3moe", "f16"), pools).n_batch == 512
    no_cache = EngineConfig(n_ctx=2048)
    assert lay_out(random_model("qwen3moe", "f16"), no_cache).n_batch == 512


@pytest.mark.usefixtures("any_share")
def test_a_prompt_is_read_in_one_pass() -> None:
    """Each pass computes every layer once, and reads the experts that its tokens need."""
    path = random_model("qwen3moe", "f16")
    layers, read = {}, {}
    for n_batch in (None, 512):
        with Engine(path, _config(n_ctx=2048, n_batch=n_batch)) as engine:
            pieces = list(engine.generate("ab" * 1400, 1, SamplingConfig(temp=0)))
            stats = engine.stats()
        assert len(pieces) == 1
        assert 1024 < stats.prompt_tokens <= 2048
        layers[n_batch] = stats.cache.layers_computed / stats.info.n_layers
        read[n_batch] = stats.cache.bytes_read
    assert layers == {None: 1, 512: -(-stats.prompt_tokens // 512)}
    assert read[None] < 0.7 * read[512]


@pytest.mark.usefixtures("any_share")
def test_hobbit_chooses_unless_it_is_told() -> None:
    path = str(random_model("qwen3moe", "f16"))
    given = {"n_ctx": 2048, "pools": 2 * _MIB, "verbose": False}
    for keywords, expected in (
        ({}, (2048, 2048)),
        ({"n_batch": 256}, (256, 256)),
        ({"n_batch": 1024}, (1024, 512)),
        ({"n_batch": 1024, "n_ubatch": 1024}, (1024, 1024)),
        ({"logits_all": True}, (512, 512)),
        ({"embedding": True}, (512, 512)),
    ):
        with Hobbit(path, **given, **keywords) as model:
            assert (model.context_params.n_batch, model.context_params.n_ubatch) == expected


def test_a_pass_that_does_not_fit_is_said_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "available_memory", lambda: 12 * _MIB)
    with pytest.raises(plan.HobbitError, match="does not fit into memory"):
        lay_out(random_model("qwen3moe", "f16"), _config(n_ctx=2048, n_batch=2048))
