# SPDX-License-Identifier: MIT
"""Maps that predict experts: their fit on made-up layers, their file, and what the engine does with them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import models
import numpy as np
import pytest
from conftest import RunPyhobbit
from gguf import GGUFReader

from pyhobbit import CacheConfig, Engine, EngineConfig, SamplingConfig
from pyhobbit.engine.plan import lookahead_bytes
from pyhobbit.model.router import Router
from pyhobbit.quality import calibration
from pyhobbit.quality.lookahead import LookaheadFit, sum_bytes
from pyhobbit.routing.observe import LayerEvent
from pyhobbit.settings.config import CalibrationConfig

TEXT = Path(__file__).resolve().parents[1] / "tiny_moe/heldout.txt"
GREEDY = SamplingConfig(temp=0)
N_LAYERS, N_EXPERTS, WIDTH, N_USED = 4, 16, 32, 2


def _run(fit: LookaheadFit, routers: list[Router], turns: list[np.ndarray], n_tokens: int) -> None:
    """Batches of 64 tokens; each layer turns its router input into the next one's."""
    random = np.random.default_rng(1)
    fit.begin(n_tokens)
    for _ in range(n_tokens // 64):
        inputs = random.normal(size=(64, WIDTH)).astype(np.float32)
        for layer, router in enumerate(routers):
            seen = inputs if router.gain is None else inputs * router.gain
            experts = router.choose(seen, N_USED)
            fit(LayerEvent(layer, np.arange(64), experts, None, np.zeros(0), seen, None))
            inputs = inputs @ turns[layer]


def _model(turn: float) -> tuple[list[Router], list[np.ndarray]]:
    random = np.random.default_rng(0)
    routers = [
        Router(random.normal(size=(N_EXPERTS, WIDTH)).astype(np.float32), bias=random.normal(size=N_EXPERTS))
        for _ in range(N_LAYERS)
    ]
    turns = [
        np.linalg.qr(np.eye(WIDTH) + turn * random.normal(size=(WIDTH, WIDTH)))[0].astype(np.float32)
        for _ in range(N_LAYERS)
    ]
    return routers, turns


def test_a_linear_change_between_layers_is_found() -> None:
    routers, turns = _model(turn=0.1)
    fit = LookaheadFit(routers, 2)
    _run(fit, routers, turns, 2048)
    found = fit.result()
    assert found is not None
    assert found.maps.shape == (N_LAYERS, 2, N_EXPERTS, WIDTH)
    assert found.maps.dtype == np.float16
    for ahead in (0, 1):
        assert found.recall[ahead] > 0.85
        assert found.recall[ahead] > found.router_recall[ahead] + 0.2
    wanted = routers[1].weight @ turns[0].T
    assert np.abs(found.maps[0, 0] - wanted).mean() < 0.2 * np.abs(wanted).mean()
    assert not found.maps[N_LAYERS - 1].any()
    assert not found.maps[N_LAYERS - 2, 1].any()


def test_routers_that_need_no_map_get_none() -> None:
    routers, _ = _model(turn=0)
    fit = LookaheadFit(routers, 2)
    _run(fit, routers, [np.eye(WIDTH, dtype=np.float32)] * N_LAYERS, 1024)
    assert fit.result() is None


def test_gains_that_differ_between_layers_need_no_map() -> None:
    routers, _ = _model(turn=0)
    random = np.random.default_rng(2)
    gains = np.exp(random.normal(size=(N_LAYERS, WIDTH))).astype(np.float32)
    gains[0, 3] = 0  # it hides its input for good
    gained = [replace(router, gain=gain) for router, gain in zip(routers, gains, strict=True)]
    fit = LookaheadFit(gained, 1)
    _run(fit, gained, [np.eye(WIDTH, dtype=np.float32)] * N_LAYERS, 1024)
    assert fit.result() is None
    assert not gained[1].early(gained[0]).weight[:, 3].any()


def test_routers_that_do_not_explain_the_choice_get_none() -> None:
    routers, turns = _model(turn=0.1)
    fit = LookaheadFit(routers[::-1], 1)
    _run(fit, routers, turns, 1024)
    assert fit.result() is None


def test_too_large_a_model_is_left_with_its_routers(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sum_bytes(48, 2048) == 48 * 2048 * 2048 * 4
    monkeypatch.setattr(calibration, "MAX_BYTES", 1 << 20)
    assert calibration._lookahead_fit(tiny_gguf, CalibrationConfig()) is None
    assert "maps for prediction are not fitted: that takes 1.5 MiB of memory" in capsys.readouterr().err
    no_prefetch = CalibrationConfig(engine=EngineConfig(cache=CacheConfig(prefetch=0)))
    assert calibration._lookahead_fit(tiny_gguf, no_prefetch) is None


def test_calibrate_stores_maps_that_the_engine_predicts_with(
    tmp_path: Path, run_pyhobbit: RunPyhobbit
) -> None:
    model = Path(shutil.copy(models.tiny_experts("f16"), tmp_path / "tiny.gguf"))

    def predicted() -> tuple[list[int | None], float]:
        with Engine(model, EngineConfig(cache=CacheConfig(pools=10 << 20), n_threads=1)) as engine:
            tokens = [piece.token for piece in engine.generate("def f(x):\n", 96, GREEDY)]
            cache = engine.stats().cache
            return tokens, cache.predicted_right / cache.predicted

    plain, routers = predicted()
    done = run_pyhobbit("calibrate", model, "--text", TEXT, "--chunks", 8, "--threads", 1, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["lookahead"]
    assert found["recall"][0] > found["router_recall"][0] + 0.02
    assert lookahead_bytes(model) == 256 * 2 * 8 * 6 * 2
    (tensor,) = GGUFReader(tmp_path / "tiny.calibration.gguf").tensors
    assert (tensor.name, tensor.shape.tolist()) == ("hobbit.ahead", [256, 2 * 8, 6])

    mapped, maps = predicted()
    assert mapped == plain  # whatever is predicted
    assert maps > routers
