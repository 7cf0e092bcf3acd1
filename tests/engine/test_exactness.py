# SPDX-License-Identifier: MIT
"""Everything in high precision, the expert cache changes no bit of what llama.cpp computes.

Every model is decoded by the unpatched library and by ours, with pools for all of its experts, for half of
them, and of the smallest size that our library accepts.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import logits
import models
import numpy as np
import pytest
import random_moe
from exactness import CASES, N_DECODE, PLAIN, assert_same_bits, plans_of

pytestmark = pytest.mark.model

POOLS = ("all", "half", "smallest", "half, prefetch")


@functools.cache
def _stock(name: str) -> logits.Result:
    return logits.run(models.stock_dir(), CASES[name].plain(), plans_of(name), repack=CASES[name].repack)


@functools.cache
def _ours(name: str, pools: str) -> logits.Result:
    settings: dict[str, logits.Override] = {"hobbit.enable": True, "hobbit.pools": _pool_bytes(name, pools)}
    settings["hobbit.prefetch"] = 2 if "prefetch" in pools else 0
    case = CASES[name]
    return logits.run(models.lib_dir(), case.served(), plans_of(name), settings, repack=case.repack)


def _pool_bytes(name: str, pools: str) -> int:
    everything = models.routed_expert_bytes(CASES[name].plain())
    if pools == "smallest":
        return _smallest(name)
    return everything if pools == "all" else everything // 2


@functools.cache
def _smallest(name: str) -> int:
    """The smallest pools that our library accepts, from its own message."""
    with pytest.raises(logits.RunError) as error:
        _refused_with(name, 1)
    found = re.search(r"smallest that works? (?:is|are) (\d+) bytes", str(error.value))
    assert found, f"no smallest size in: {error.value}"
    return int(found[1])


def _refused_with(name: str, pool_bytes: int) -> None:
    settings = {"hobbit.enable": True, "hobbit.pools": pool_bytes}
    logits.run(models.lib_dir(), CASES[name].served(), {"one": logits.one_at_a_time([1])}, settings)


@pytest.mark.parametrize("name", CASES)
def test_models_give_different_logits_for_different_tokens(name: str) -> None:
    """Otherwise the comparisons below would prove nothing."""
    decoded = _stock(name).logits["decode"]
    assert len(np.unique(decoded, axis=0)) == N_DECODE
    assert decoded.std() > 0.5


@pytest.mark.parametrize("arch", random_moe.ARCHS)
def test_random_routers_choose_varied_experts(arch: str) -> None:
    plans = {"decode": logits.one_at_a_time(CASES[arch].tokens()[:N_DECODE])}
    routing = logits.run(models.stock_dir(), models.random_model(arch), plans, routing=True).routing["decode"]
    shape = random_moe.ARCHS[arch].shape
    assert routing.shape[1:] == (N_DECODE, shape.n_used)
    for layer in routing:
        counts = np.bincount(layer.ravel(), minlength=shape.n_expert)
        assert np.count_nonzero(counts) >= 0.75 * shape.n_expert, f"too few experts are ever chosen: {counts}"
        assert counts.max() < 0.9 * N_DECODE, f"an expert is chosen nearly always: {counts}"


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("name", CASES)
def test_decode_is_bit_identical(name: str, pools: str) -> None:
    assert_same_bits(_ours(name, pools).logits["decode"], _stock(name).logits["decode"])


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_transferred_on_the_cpu(name: str) -> None:
    stats = _ours(name, POOLS[0]).stats
    assert stats["bytes_read"] > 0
    assert stats["bytes_transferred"] == stats["transfer_s"] == 0


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("name", CASES)
def test_sequences_decoded_together_are_bit_identical(name: str, pools: str) -> None:
    assert_same_bits(_ours(name, pools).logits["sequences"], _stock(name).logits["sequences"])


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("name", CASES)
def test_prefill_and_the_text_after_it_are_bit_identical(name: str, pools: str) -> None:
    """More than normal floating-point accuracy: on the CPU an expert's rows go through stock's own kernel."""
    assert_same_bits(_ours(name, pools).logits["prefill"], _stock(name).logits["prefill"])


@pytest.mark.parametrize("n_threads", [4, 16])
@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("name", ["q4_k_m", "qwen3moe-repacked", "gpt-oss-mxfp4-repacked", "deepseek2"])
def test_more_threads_than_cores_and_flash_attention_are_bit_identical(
    name: str, flash: bool, n_threads: int
) -> None:
    case, plans = CASES[name], plans_of(name)
    how: dict[str, Any] = {"repack": case.repack, "flash": flash, "n_threads": n_threads}
    settings = {"hobbit.enable": True, "hobbit.pools": _pool_bytes(name, "half")}
    ours = logits.run(models.lib_dir(), case.served(), plans, settings, **how)
    stock = logits.run(models.stock_dir(), case.plain(), plans, **how)
    for plan, expected in stock.logits.items():
        assert_same_bits(ours.logits[plan], expected)


@pytest.mark.parametrize("n_tokens", [513, 1000])
@pytest.mark.parametrize("name", ["qwen3moe", "tiny-q4_0-repacked"])
def test_a_long_prompt_in_one_pass_is_bit_identical(name: str, n_tokens: int) -> None:
    """Both compute it in one pass: other passes take other kernels in stock, too."""
    case = CASES[name]
    plans = {"long": logits.prefill((case.tokens() * 20)[:n_tokens])}
    settings = {"hobbit.enable": True, "hobbit.pools": _pool_bytes(name, "half")}
    ours = logits.run(models.lib_dir(), case.served(), plans, settings, repack=case.repack)
    stock = logits.run(models.stock_dir(), case.plain(), plans, repack=case.repack)
    assert len(ours.logits["long"]) == n_tokens
    assert ours.stats["layers_computed"] == ours.info["n_layers"]
    assert_same_bits(ours.logits["long"], stock.logits["long"])


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("name", CASES)
def test_pools_stay_within_their_budget_and_were_used(name: str, pools: str) -> None:
    result = _ours(name, pools)
    info, stats = result.info, result.stats
    assert 0 < info["pool_bytes_high"] + info["pool_bytes_low"] <= _pool_bytes(name, pools)
    assert info["tier_bytes_high"] == models.routed_expert_bytes(CASES[name].plain())
    n_tokens = sum(len(rows) for rows in result.logits.values())
    assert stats["selections_high"] == n_tokens * info["n_layers"] * CASES[name].n_used
    assert stats["selections_low"] == stats["selections_skipped"] == 0
    assert stats["misses_high"] > 0
    if pools != "all":
        assert stats["evictions"] > 0
    if pools == "smallest":
        assert stats["waves"] > stats["layers_computed"]
    if "prefetch" in pools:
        assert stats["prefetched"] >= stats["prefetched_used"] > 0
        assert stats["predicted"] >= stats["predicted_right"] > 0
        assert stats["bytes_prefetched"] <= stats["bytes_read"]
    else:
        assert stats["predicted"] == stats["prefetched"] == stats["bytes_prefetched"] == 0


@pytest.mark.parametrize("name", CASES)
def test_one_byte_less_than_the_smallest_is_refused(name: str) -> None:
    with pytest.raises(logits.RunError, match="smallest"):
        _refused_with(name, _smallest(name) - 1)


@pytest.mark.parametrize("name", PLAIN)
def test_without_settings_a_plain_model_runs_as_in_stock(name: str) -> None:
    case = CASES[name]
    result = logits.run(models.lib_dir(), case.plain(), plans_of(name), repack=case.repack)
    assert not result.info, "the cache was used though nobody asked for it"
    for plan, expected in _stock(name).logits.items():
        assert_same_bits(result.logits[plan], expected)


@pytest.mark.parametrize("name", ["tiny-q4_0"])
def test_repacked_weights_take_other_kernels(name: str) -> None:
    """Otherwise the comparisons of repacked cases would prove nothing."""
    plain, repacked = (_stock(case) for case in (name, f"{name}-repacked"))
    if "CPU_REPACK model buffer" not in repacked.log:
        pytest.skip("this processor has no layouts of its own")
    assert (plain.logits["decode"] != repacked.logits["decode"]).any()


def test_a_low_tier_of_the_same_type_computes_the_same() -> None:
    """The low tier's way through file, pool and executor: every expert but the top one takes it."""
    model = models.tiny_tiers("q4_0", "q4_0")
    half = models.routed_expert_bytes(models.tiny_experts("q4_0")) // 2
    settings = {"hobbit.t1": 0.0, "hobbit.t2": 1.0, "hobbit.pools": half, "hobbit.strict": True}
    ours = logits.run(models.lib_dir(), model, plans_of("tiny-q4_0"), settings)
    # one of two used experts is the best
    assert ours.stats["selections_low"] == ours.stats["selections_high"]
    assert ours.stats["selections_skipped"] == 0
    for plan, expected in _stock("tiny-q4_0").logits.items():
        assert_same_bits(ours.logits[plan], expected)


def test_slots_of_two_sizes_in_both_tiers_change_no_bit() -> None:
    """Tokens one by one as in stock; prompts, of which each version has some rows, as with pools for all."""
    settings = {"hobbit.t1": 0.0, "hobbit.t2": 1.0, "hobbit.strict": True}
    everything = models.routed_expert_bytes(CASES["q4_k_m"].plain())
    half, whole = (
        logits.run(
            models.lib_dir(),
            CASES["q4_k_m-two-tiers"].served(),
            plans_of("q4_k_m"),
            settings | {"hobbit.pools": pools},
        )
        for pools in (everything // 2, 3 * everything)
    )
    assert half.stats["selections_low"] == 3 * half.stats["selections_high"] > 0
    assert half.stats["evictions"] > whole.stats["evictions"] == 0
    for plan, expected in whole.logits.items():
        assert_same_bits(half.logits[plan], expected)
    for plan in ("decode", "sequences"):
        assert_same_bits(half.logits[plan], _stock("q4_k_m").logits[plan])
