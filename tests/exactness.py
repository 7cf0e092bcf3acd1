# SPDX-License-Identifier: MIT
"""The models and batches on which the cache is compared with llama.cpp, and how."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import logits
import models
import numpy as np
import random_moe
from sentencepiece import SentencePieceProcessor

N_DECODE = 64
N_PREFILL = 300
N_GREEDY = 32
BATCH_SIZES = (2, 5, 8, 3, 7, 4, 6, 8, 2)


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


TINY_TYPES = ("f16", "q8_0", "q4_0", "q4_k", "q2_k")
CASES: dict[str, Case] = {
    **{f"tiny-{kind}": _tiny_case(functools.partial(models.tiny_experts, kind)) for kind in TINY_TYPES},
    "tiny-two-tiers": _tiny_case(models.tiny, functools.partial(models.tiny_tiers, "f16", "q4_0")),
    "tiny-sidecar": _tiny_case(
        functools.partial(models.tiny_experts, "q8_0"), functools.partial(models.tiny_sidecar, "q8_0", "q4_0")
    ),
    "tiny-split": _tiny_case(models.tiny, functools.partial(models.split, models.tiny)),
    **{arch: _random_case(arch) for arch in random_moe.ARCHS},
    "gpt-oss-mxfp4": _random_case("gpt-oss", "mxfp4"),
    "q4_k_m": _random_case("qwen3moe", models.Q4_K_M),
    "q4_k_m-two-tiers": replace(
        _random_case("qwen3moe", models.Q4_K_M),
        served=functools.partial(models.random_two_tiers, "qwen3moe", models.Q4_K_M),
    ),
}
REPACKED = ("tiny-q4_0", "tiny-q4_k", "tiny-q2_k", "tiny-sidecar", "qwen3moe", "gpt-oss-mxfp4")
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


def plans_of(name: str) -> dict[str, logits.Plan]:
    tokens = CASES[name].tokens()
    assert len(tokens) == N_PREFILL
    return {
        "decode": logits.one_at_a_time(tokens[:N_DECODE]),
        "sequences": _sequences(tokens),
        "prefill": logits.prefill(tokens, N_GREEDY),
    }


def _short_plans() -> dict[str, logits.Plan]:
    tokens = [1 + 37 * i % 500 for i in range(40)]
    side_by_side = [[(20 + token, token, s) for token in range(3)] for s in range(4)]
    side_by_side += [[(40 + n + s, 3 + n, s) for s in range(4)] for n in range(4)]
    return {
        "prompt": logits.prefill(tokens),
        "tokens": logits.one_at_a_time(tokens[:6]),
        "text": logits.prefill(tokens[:5], greedy=12),
        "sequences": logits.Plan(side_by_side),
    }


SHORT_PLANS = _short_plans()
"""For any model, where many settings are tried."""


def nmse(ours: np.ndarray, stock: np.ndarray) -> float:
    return float(np.sum((ours - stock) ** 2, dtype=np.float64) / np.sum(stock**2, dtype=np.float64))


def assert_same_bits(ours: np.ndarray, stock: np.ndarray) -> None:
    assert np.isfinite(stock).all()
    differs = (ours.view(np.uint32) != stock.view(np.uint32)).any(axis=1)
    assert not differs.any(), (
        f"first at token {differs.argmax()} of {len(differs)}, NMSE {nmse(ours, stock):.1e}"
    )
