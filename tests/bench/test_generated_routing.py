# SPDX-License-Identifier: MIT
"""Generated models route like Qwen3-30B-A3B, whose recorded figures docs/results/method.md lists."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from bench.analysis.figures import prediction
from bench.harness.files import SHAPES, write_model
from bench.harness.trace import random_tokens
from pyhobbit.model.model_file import read_model_file
from pyhobbit.quality.calibration import routes
from pyhobbit.quality.evaluate import Evaluator
from pyhobbit.routing.observe import Recorder
from pyhobbit.routing.trace import Simulation, simulate
from pyhobbit.settings.config import CacheConfig, EngineConfig

SMALL = replace(
    SHAPES["qwen3-30b-a3b"], n_layer=12, n_embd=512, n_ff=64, n_head=8, n_head_kv=2, n_vocab=4096
)  # 128 experts, 8 used, as in the real model
N_FIRST, N_TOKENS, N_USED = 28, 156, 6  # tokens that fill the pool, all tokens, experts of the trace's tokens
REUSED, LRU = 0.380, {0.15: 0.654, 0.25: 0.827, 0.4: 0.939}  # values of the real model's trace


def test_a_generated_model_routes_like_the_real_one(tmp_path: Path) -> None:
    model, draw = write_model(tmp_path, "small", SMALL, "q4_0"), random_tokens(SMALL.n_vocab)
    chunks = [list(islice(draw, N_TOKENS)) for _ in range(2)]
    with Evaluator(model, EngineConfig(CacheConfig(), n_ctx=N_TOKENS)) as evaluator:
        recorder = Recorder(len(chunks), N_TOKENS, SMALL.n_layer, 1 << 30)
        with evaluator.observing(recorder):
            evaluator.reference(chunks)
    seen = recorder.observations()

    # a narrow model of few layers differs more than one of the real shape; chance is 0.05, 0.15, 0.25, 0.4
    reused, hits = [], []
    for start in (0, N_TOKENS):
        chosen = routes(seen, slice(start, start + N_TOKENS))
        chosen["counted"] = chosen["token"] >= start + N_FIRST
        best = chosen.reshape(-1, SMALL.n_used)[:, :N_USED]
        counted = best[best["counted"][:, 0] != 0]["expert"].reshape(-1, SMALL.n_layer, N_USED)
        reused.append((counted[:-1, :, :, None] == counted[1:, :, None, :]).any(axis=3).mean())
        base = Simulation(SMALL.n_layer, SMALL.n_expert, N_USED, policy="lru")
        hits.append([simulate(best.ravel(), base.with_slots(capacity)).hit_rate for capacity in LRU])
    assert np.mean(reused) == pytest.approx(REUSED, abs=0.08)
    assert np.mean(hits, axis=0) == pytest.approx(list(LRU.values()), abs=0.08)

    file = read_model_file(model)
    routers = file.routers([file.blocks[layer] for layer in seen.layers])
    assert routers is not None
    named = np.nanmean(prediction(seen, routers)[1][1:], axis=1)
    assert named[0] == pytest.approx(0.886, abs=0.04)  # published for the real model
    assert all(0.01 < step < 0.06 for step in -np.diff(named))
