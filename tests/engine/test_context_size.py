# SPDX-License-Identifier: MIT
"""How many tokens the context has where nobody says so."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import random_moe
from models import stock_dir

from pyhobbit.engine import plan as planning
from pyhobbit.engine.engine import Engine
from pyhobbit.engine.plan import lay_out
from pyhobbit.settings.config import CacheConfig, EngineConfig

_TRAINED = 20000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained for more tokens than one takes by default."""
    path = tmp_path_factory.mktemp("long") / "long.gguf"
    shape = replace(random_moe.ARCHS["qwen3moe"].shape, n_ctx=_TRAINED, n_expert=64)
    random_moe.write_model(random_moe.declare("qwen3moe", shape), path, stock_dir())
    return path


def _config(pools: int | None = None, memory: int | None = None, n_ctx: int | None = None) -> EngineConfig:
    return EngineConfig(CacheConfig(pools=pools, memory=memory), n_ctx=n_ctx, n_threads=1)


def test_it_is_the_largest_that_leaves_the_experts_nine_tenths(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = EngineConfig.contexts
    plans = {n: lay_out(model, _config(pools=8 << 20, n_ctx=n)) for n in (*sizes[:3], _TRAINED)}
    costs = {n: each.context + each.compute for n, each in plans.items()}
    assert costs == dict(sorted(costs.items(), key=lambda each: each[1]))
    assert not any(each.chose_context for each in plans.values())

    def chosen(n_free: int) -> int:
        """Plans with a share of the pools little above what n_free tokens take beyond the least."""
        share = (costs[n_free] - costs[sizes[0]]) / (8 << 20)
        monkeypatch.setattr(planning, "_MOST_OF_POOLS", 1.1 * share)
        plan = lay_out(model, _config(pools=8 << 20))
        assert plan.chose_context
        assert plan.context == plans[plan.info.n_ctx].context
        return plan.info.n_ctx

    assert [chosen(n) for n in costs] == [*sizes[:3], _TRAINED]


def test_experts_that_fit_stay_where_the_limit_is_on_the_process(model: Path) -> None:
    least = lay_out(model, _config(memory=4 << 30, n_ctx=EngineConfig.contexts[0]))
    assert least.share_high >= 1
    plan = lay_out(model, _config(memory=4 << 30))
    assert (plan.info.n_ctx, plan.share_high >= 1) == (_TRAINED, True)
    used = least.process + least.beside_pools + least.host_pools
    chosen = []
    for spare in (60 << 20, 80 << 20, 120 << 20):
        tight = lay_out(model, _config(memory=used + spare))
        assert tight.share_high >= 1
        chosen.append(tight.info.n_ctx)
    assert chosen == sorted(chosen)
    assert chosen[0] < chosen[-1] == _TRAINED


def test_without_a_cache_half_of_the_free_memory_stays_free(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = lay_out(model, _config())
    assert (large.info.cached, large.info.n_ctx) == (False, _TRAINED)
    free = large.weights + large.context + large.compute
    monkeypatch.setattr(planning, "available_memory", lambda: free)
    assert lay_out(model, _config()).info.n_ctx < _TRAINED


# In a process of its own, whose memory other tests do not change.
_BUDGETS = """
import sys
from pathlib import Path
from pyhobbit.engine.plan import lay_out
from pyhobbit.errors import HobbitError
from pyhobbit.settings.config import CacheConfig, EngineConfig

def plan(memory, n_ctx):
    return lay_out(Path(sys.argv[1]), EngineConfig(CacheConfig(memory=memory), n_ctx=n_ctx, n_threads=1))

def refusal(memory):
    try:
        return plan(memory, 20000)
    except HobbitError as e:
        return str(e)

small = [plan(4 << 30, 2048) for _ in range(2)][-1]  # the first one leaves something in memory
memory = small.most - small.host_pools + (16 << 20)
print(refusal(memory))
n_ctx = int(refusal(memory).split("--ctx ")[1].split()[0])
print(n_ctx, plan(memory, n_ctx).info.n_ctx)
print(refusal(1 << 20))
"""


def test_a_budget_that_is_too_small_names_the_context_that_would_do(model: Path) -> None:
    command = [sys.executable, "-c", _BUDGETS, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    refused, sizes, hopeless = done.stdout.splitlines()
    assert re.search(r"is too small: .*; --ctx \d+ would do$", refused)
    advised, planned = map(int, sizes.split())
    assert advised == planned
    assert advised in [_TRAINED >> n for n in range(1, 7)]
    assert hopeless.endswith("the smallest pools)")


def test_the_engine_opens_what_was_planned(model: Path) -> None:
    config = _config(memory=4 << 30)
    with Engine(model, config) as engine:
        assert engine.info().n_ctx == lay_out(model, config).info.n_ctx > EngineConfig.contexts[0]
    with Engine(model, replace(config, n_ctx=100)) as engine:
        assert engine.info().n_ctx == 100
