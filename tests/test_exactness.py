# SPDX-License-Identifier: MIT
"""Everything in high precision, the expert cache changes no bit of what llama.cpp computes.

Every model is decoded by the unpatched library and by ours, with pools for all of its experts, for half of
them, and of the smallest size that our library accepts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import logits
import models
import numpy as np
import pytest
import random_moe
from sentencepiece import SentencePieceProcessor

N_DECODE = 64
N_PREFILL = 300
N_GREEDY = 32
BATCH_SIZES = (2, 5, 8, 3, 7, 4, 6, 8, 2)
POOLS = ("all", "half", "smallest", "half, prefetch")


@dataclass(frozen=True)
class Case:
    """`plain` is what stock loads, `served` what we load: the same weights. Both repack, or none does."""

    plain: Callable[[], Path]
    served: Callable[[], Path]
    tokens: Callable[[], list[int]]
    n_used: int
    repack: bool = False


def _random_case(arch: str, experts: str = models.MIXED) -> Case:
    shape = random_moe.ARCHS[arch].shape
    path = functools.partial(models.random_model, arch, experts)
    tokens = np.random.default_rng(5).integers(3, shape.n_vocab, N_PREFILL).tolist()
    return Case(path, path, lambda: tokens, shape.n_used)


def _tiny_case(plain: Callable[[], Path], served: Callable[[], Path] | None = None) -> Case:
    return Case(plain, served or plain, _tiny_tokens, n_used=2)


def _tiny_tokens() -> list[int]:
    text = (models.TINY / "heldout.txt").read_text(encoding="utf-8")[: 8 * N_PREFILL]
    tokenizer = SentencePieceProcessor(model_file=str(models.TINY / "model/tokenizer.model"))
    return [tokenizer.bos_id(), *tokenizer.encode(text)][:N_PREFILL]


TINY_TYPES = ("f16", "q8_0", "q4_0", "q4_k")
CASES: dict[str, Case] = {
    **{f"tiny-{kind}": _tiny_case(functools.partial(models.tiny_experts, kind)) for kind in TINY_TYPES},
    "tiny-two-tiers": _tiny_case(models.tiny, functools.partial(models.tiny_tiers, "f16", "q4_0")),
    "tiny-sidecar": _tiny_case(
        functools.partial(models.tiny_experts, "q8_0"), functools.partial(models.tiny_sidecar, "q8_0", "q4_0")
    ),
    "tiny-split": _tiny_case(models.tiny, functools.partial(models.split, models.tiny)),
    **{arch: _random_case(arch) for arch in random_moe.ARCHS},
    "gpt-oss-mxfp4": _random_case("gpt-oss", "mxfp4"),
}
REPACKED = ("tiny-q4_0", "tiny-q4_k", "tiny-sidecar", "qwen3moe", "gpt-oss-mxfp4")
CASES |= {f"{name}-repacked": replace(CASES[name], repack=True) for name in REPACKED}
PLAIN = [name for name, case in CASES.items() if case.plain is case.served]


def _sequences(tokens: list[int]) -> logits.Plan:
    """Batches of one token each of several sequences that grow side by side."""
    lengths = [0] * max(BATCH_SIZES)
    batches: list[logits.Batch] = []
    for n in BATCH_SIZES:
        batches.append([(tokens[20 * s + lengths[s]], lengths[s], s) for s in range(n)])
        for s in range(n):
            lengths[s] += 1
    return logits.Plan(batches)


def _plans(name: str) -> dict[str, logits.Plan]:
    tokens = CASES[name].tokens()
    assert len(tokens) == N_PREFILL
    return {
        "decode": logits.one_at_a_time(tokens[:N_DECODE]),
        "sequences": _sequences(tokens),
        "prefill": logits.prefill(tokens, N_GREEDY),
    }


@functools.cache
def _stock(name: str) -> logits.Result:
    return logits.run(models.stock_dir(), CASES[name].plain(), _plans(name), repack=CASES[name].repack)


@functools.cache
def _ours(name: str, pools: str) -> logits.Result:
    settings: dict[str, logits.Override] = {"hobbit.enable": True, "hobbit.pools": _pool_bytes(name, pools)}
    settings["hobbit.prefetch"] = 2 if "prefetch" in pools else 0
    case = CASES[name]
    return logits.run(models.lib_dir(), case.served(), _plans(name), settings, repack=case.repack)


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


def _nmse(ours: np.ndarray, stock: np.ndarray) -> float:
    return float(np.sum((ours - stock) ** 2, dtype=np.float64) / np.sum(stock**2, dtype=np.float64))


def _assert_same_bits(ours: np.ndarray, stock: np.ndarray) -> None:
    assert np.isfinite(stock).all()
    differs = (ours.view(np.uint32) != stock.view(np.uint32)).any(axis=1)
    assert not differs.any(), (
        f"first at token {differs.argmax()} of {len(differs)}, NMSE {_nmse(ours, stock):.1e}"
    )


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
    _assert_same_bits(_ours(name, pools).logits["decode"], _stock(name).logits["decode"])


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_transferred_on_the_cpu(name: str) -> None:
    stats = _ours(name, POOLS[0]).stats
    assert stats["bytes_read"] > 0
    assert stats["bytes_transferred"] == stats["transfer_s"] == 0


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("name", CASES)
def test_sequences_decoded_together_are_bit_identical(name: str, pools: str) -> None:
    _assert_same_bits(_ours(name, pools).logits["sequences"], _stock(name).logits["sequences"])


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("name", CASES)
def test_prefill_and_the_text_after_it_are_bit_identical(name: str, pools: str) -> None:
    """More than normal floating-point accuracy: on the CPU an expert's rows go through stock's own kernel."""
    _assert_same_bits(_ours(name, pools).logits["prefill"], _stock(name).logits["prefill"])


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
    result = logits.run(models.lib_dir(), case.plain(), _plans(name), repack=case.repack)
    assert not result.info, "the cache was used though nobody asked for it"
    for plan, expected in _stock(name).logits.items():
        _assert_same_bits(result.logits[plan], expected)


@pytest.mark.parametrize("name", ["tiny-q4_0"])
def test_repacked_weights_take_other_kernels(name: str) -> None:
    """Otherwise the comparisons of repacked cases would prove nothing."""
    plain, repacked = (_stock(case).logits["decode"] for case in (name, f"{name}-repacked"))
    assert (plain != repacked).any()


def test_a_low_tier_of_the_same_type_computes_the_same() -> None:
    """The low tier's way through file, pool and executor: every expert but the top one takes it."""
    model = models.tiny_tiers("q4_0", "q4_0")
    half = models.routed_expert_bytes(models.tiny_experts("q4_0")) // 2
    settings = {"hobbit.t1": 0.0, "hobbit.t2": 1.0, "hobbit.pools": half, "hobbit.strict": True}
    ours = logits.run(models.lib_dir(), model, _plans("tiny-q4_0"), settings)
    assert ours.stats["selections_low"] == ours.stats["selections_high"]  # of two used, one is the best
    assert ours.stats["selections_skipped"] == 0
    for plan, expected in _stock("tiny-q4_0").logits.items():
        _assert_same_bits(ours.logits[plan], expected)
