# SPDX-License-Identifier: MIT
"""Prefetch predicts what numpy computes from the model's routers, applied a layer early."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import random_moe
from architecture_models import write_model
from architectures import ARCHITECTURES

from pyhobbit.model.gguf_file import read_floats
from pyhobbit.model.model_file import read_model_file
from pyhobbit.model.router import Gating, Router
from pyhobbit.native.ffi import llama
from pyhobbit.quality.evaluate import Evaluator
from pyhobbit.routing.observe import LayerEvent, Recorder
from pyhobbit.settings.config import CacheConfig, EngineConfig

pytestmark = pytest.mark.model

N_TOKENS = 24
N_TEXTS = 10  # each with an empty cache: prefetch rests once nothing misses
MIN_PREDICTED = 60  # tokens
SAME = 0.99  # share of the tokens: products in half precision decide a few
OTHER = 0.95  # a wrong formula stays below this


@dataclass(frozen=True)
class Run:
    """T tokens of all texts, one by one. predicted, right: [T], by the engine's counters.

    inputs: float32 [T, L, D], of the routers.  experts: [T, L, K].  gains: [L, D], of the norms before.
    """

    routers: list[Router]
    gains: np.ndarray
    predicted: np.ndarray
    right: np.ndarray
    inputs: np.ndarray
    experts: np.ndarray


def _joined(path: Path, gain: str) -> Run:
    runs = [_computed(path, number, gain) for number in range(N_TEXTS)]
    columns = zip(*((run.predicted, run.right, run.inputs, run.experts) for run in runs), strict=True)
    return Run(runs[0].routers, runs[0].gains, *(np.concatenate(column) for column in columns))


def _computed(path: Path, number: int, gain: str) -> Run:
    cache = CacheConfig(pools=64 << 20, prefetch=1)
    config = EngineConfig(cache=cache, n_ctx=N_TOKENS, n_batch=1, n_threads=1)
    counts: list[tuple[int, int]] = []
    with Evaluator(path, config) as evaluator:
        recorder = Recorder(1, N_TOKENS, evaluator.info.n_layers, 1 << 30)

        def observe(event: LayerEvent) -> None:
            if event.layer == 0:
                counts.append((evaluator.stats.predicted, evaluator.stats.predicted_right))
            recorder(event)

        text = (models.TINY / "heldout.txt").read_text(encoding="utf-8")
        with evaluator.observing(observe):
            evaluator.reference(evaluator.chunks(text[:4000])[number : number + 1])
        counts.append((evaluator.stats.predicted, evaluator.stats.predicted_right))
    seen = recorder.observations()
    assert seen.inputs is not None
    model = read_model_file(path)
    blocks = [model.blocks[layer] for layer in seen.layers]
    routers = model.routers(blocks)
    assert routers is not None
    gains = np.ones((len(routers), seen.inputs.shape[2]), np.float32)
    if gain:
        gains[:] = [read_floats(model.tensors[f"blk.{block}.{gain}"]) for block in blocks]
    predicted, right = np.diff(counts, axis=0).T
    return Run(routers, gains, predicted, right, seen.inputs, seen.experts)


def _agreement(run: Run, gains: np.ndarray | None = None, **changes: Any) -> float:
    """Share of the tokens with predictions for which numpy finds as many right ones as the engine."""
    right = np.zeros(len(run.right), int)
    gains = run.gains if gains is None else gains
    for layer, router in enumerate(run.routers[1:], 1):
        half = (router.weight * gains[layer]).astype(np.float16).astype(np.float32)
        early = replace(router, weight=half, n_groups=1, **changes)
        guess = early.choose(run.inputs[:, layer - 1] / gains[layer - 1], run.experts.shape[2])
        right += (guess[:, :, None] == run.experts[:, layer, None, :]).any(axis=2).sum(axis=1)
    told = run.predicted > 0
    return float((right == run.right)[told].mean())


def _random_model(arch: str, folder: Path) -> Path:
    path = folder / f"{arch}.gguf"
    shape = replace(random_moe.ARCHS[arch].shape, n_layer=6, n_expert=8, n_used=4)
    random_moe.write_model(random_moe.declare(arch, shape, "q8_0"), path, models.lib_dir())
    return path


def _listed_model(arch: str, folder: Path) -> Path:
    path = folder / f"{arch}.gguf"
    write_model(llama.llama_cpp, models.lib_dir(), arch, ARCHITECTURES[arch], path)
    return path


# The gain that each router's input carries, and with what else numpy must not agree.
_BIASED: list[dict[str, Any]] = [{"gating": Gating.SOFTMAX}, {"selection_bias": None}]
_PLAIN: list[dict[str, Any]] = [{"gains": np.ones((64, 1), np.float32)}]
WRONG: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "qwen3moe": ("ffn_norm.weight", _PLAIN),
    "gpt-oss": ("post_attention_norm.weight", [{"bias": None}]),
    "glm4moe": ("post_attention_norm.weight", _BIASED),
    "deepseek2": ("ffn_norm.weight", _BIASED),
    "deepseek4": ("ffn_norm.weight", _BIASED),
    "gemma4": ("ffn_gate_inp.scale", _PLAIN),
    "grovemoe": ("ffn_norm.weight", _PLAIN),
    "kimi-k3": ("ffn_norm.weight", _BIASED),
    "mimo2": ("ffn_norm.weight", _BIASED),
    "nemotron_h_moe": ("attn_norm.weight", _BIASED),
    "smallthinker": ("", []),
}


@pytest.mark.parametrize("arch", WRONG)
def test_predictions_are_those_of_the_routers(arch: str, tmp_path: Path) -> None:
    path = (_random_model if arch in random_moe.ARCHS else _listed_model)(arch, tmp_path)
    gain, wrong = WRONG[arch]
    run = _joined(path, gain)
    own = run.routers[-1].choose(run.inputs[:, -1], run.experts.shape[2])
    assert (np.sort(own) == np.sort(run.experts[:, -1])).all(
        axis=1
    ).mean() >= SAME  # it is the router's input
    told = run.predicted > 0
    assert told.sum() >= MIN_PREDICTED
    assert set(run.predicted[told].tolist()) == {(len(run.routers) - 1) * run.experts.shape[2]}
    assert _agreement(run) >= SAME
    for changes in wrong:
        assert _agreement(run, **changes) < OTHER, changes
