# SPDX-License-Identifier: MIT
"""A replayed routing that is predicted with a stated accuracy."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_jobs
import numpy as np
import pytest
import traces

from bench import compare
from bench.harness import generate, job, routing
from bench.harness.shapes import SHAPES

N_AHEAD = 4


def _routing() -> routing.Routing:
    rng = np.random.default_rng(0)
    experts = np.array([[rng.permutation(64)[:8] for _ in range(6)] for _ in range(100)], np.int32)
    return routing.Routing(experts, np.full(experts.shape, 1 / 8, np.float32))


def test_each_use_is_named_with_the_stated_chance_and_four_points_less_per_further_layer() -> None:
    told, chosen = routing.predicted(_routing(), 0.886, N_AHEAD), _routing().experts
    assert told.experts.shape == (N_AHEAD, *chosen.shape)
    for ahead in range(N_AHEAD):
        right = (told.experts[ahead] == chosen).mean()
        assert right == pytest.approx(0.886 - 0.04 * ahead, abs=0.015)  # 4800 uses
        wrong = told.experts[ahead] != chosen
        pairs = np.argwhere(wrong)[:200]
        assert all(told.experts[(ahead, *at)] not in chosen[at[0], at[1]] for at in pairs)
    assert all(len(set(row)) == 8 for row in told.experts.reshape(-1, 8).tolist())
    assert (told.experts == routing.predicted(_routing(), 0.886, N_AHEAD).experts).all()
    assert (routing.predicted(_routing(), 1.0, 1).experts[0] == chosen).all()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"n_layer": 3, "n_embd": 256, "n_ff": 256, "n_head": 2, "n_head_kv": 1, "n_expert": 16}
    return generate.write_model(
        tmp_path_factory.mktemp("small"), "small", replace(SHAPES["tiny"], **sizes), "q8_0"
    )


def _measured(model: Path, folder: Path, accuracy: float | None, **settings: Any) -> job.Measured:
    shape = routing.moe_shape(model)
    trace = traces.write_random_trace(folder / "t.csv", 24, 3, 16, 4)
    routes = bench_jobs.routes(folder, shape, trace, accuracy)
    pools = model.stat().st_size // 2
    return bench_jobs.measure(model, routes, **bench_jobs.ours(pools, predictor="given", **settings))


def test_the_engine_prefetches_what_is_told_and_computes_the_same(model: Path, tmp_path: Path) -> None:
    right, half, none = (_measured(model, tmp_path, accuracy) for accuracy in (1.0, 0.5, None))
    assert right.counters["predicted"] > 0
    assert right.counters["predicted_right"] == right.counters["predicted"]
    assert 0.2 < half.counters["predicted_right"] / half.counters["predicted"] < 0.8
    assert none.counters["predicted"] == 0
    assert right.logits_crc == half.logits_crc == none.logits_crc
    off = _measured(model, tmp_path, 1.0, prefetch=0)
    assert off.counters["misses_high"] > right.counters["misses_high"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--predict", "0.9"], "--predict takes a routing to predict: give --trace too"),
        (["--predict", "1.5"], "--predict takes a share, 0 to 1"),
    ],
)
def test_a_wrong_value_is_one_sentence(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ["--folder", str(tmp_path / "m"), "-o", str(tmp_path / "out")]
    assert compare.main(["--shape", "tiny", "--arms", "ours", *folder, *options]) != 0
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
