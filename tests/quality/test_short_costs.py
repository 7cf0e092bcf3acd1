# SPDX-License-Identifier: MIT
"""Costs of the rule price from the output errors of one run."""

from __future__ import annotations

import math
from pathlib import Path

import models
import numpy as np
import pytest
from conftest import RunPyhobbit

from pyhobbit.errors import ConfigError
from pyhobbit.model.expert_weights import ExpertWeights
from pyhobbit.model.gguf_file import read_floats, read_gguf
from pyhobbit.model.model_file import read_model_file
from pyhobbit.model.tiers import HIGH, LOW, Part
from pyhobbit.quality.calibration import profile
from pyhobbit.quality.costs import CostRuns, output_errors, scaled
from pyhobbit.quality.evaluate import Evaluator
from pyhobbit.quality.output_error import OutputErrors
from pyhobbit.routing.observe import Observations
from pyhobbit.settings.config import CacheConfig, CalibrationConfig, EngineConfig, EvaluationConfig

HELDOUT = Path(__file__).resolve().parent.parent / "tiny_moe/heldout.txt"
PART = Part(3, "ffn_up_exps")


def test_a_matrix_of_either_tier_is_read() -> None:
    path = models.tiny_tiers("f16", "q4_0")
    weights, tensors = ExpertWeights(path), {tensor.name: tensor for tensor in read_gguf(path).tensors}
    for tier, name in ((HIGH, "blk.3.ffn_up_exps.weight"), (LOW, "blk.3.ffn_up_exps.low.0.weight")):
        np.testing.assert_array_equal(weights.matrix(PART, tier, 5), read_floats(tensors[name])[5])
    assert weights.bias(PART, 5) == 0


def test_between_measured_layers_errors_are_scaled_evenly() -> None:
    errors = np.array([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0], [1.0, math.inf]])
    found = scaled(errors, {0: (1.0, 10.0), 2: (1.0, 160.0)})
    np.testing.assert_allclose(found[:, 0], [1.0, 1.0, 1.0, 0.25])  # ratios 1, 1/2, 1/4, 1/4
    np.testing.assert_allclose(found[:, 1], [10.0, 40.0, 160.0, math.inf])
    nothing = scaled(errors, {0: (0.0, math.inf)})  # measured at the noise floor: no scale
    np.testing.assert_allclose(nothing[:, 0], [0.0, 2.0, 4.0, 1.0])
    np.testing.assert_allclose(nothing[:, 1], [math.inf, 20.0, 40.0, math.inf])


@pytest.mark.slow
def test_errors_follow_the_measured_costs_and_time_refines_them() -> None:
    path = models.tiny_tiers("f16", "q4_0")
    engine = EngineConfig(CacheConfig(pools=64_000_000), n_ctx=128, n_threads=1)
    with Evaluator(path, EvaluationConfig(engine, rule="price")) as evaluator:
        chunks = evaluator.chunks(HELDOUT.read_text(encoding="utf-8"), 4)
        reference, seen = profile(evaluator, chunks)
        outputs = OutputErrors(ExpertWeights(path), read_model_file(path).blocks, seen)
        sums = outputs.sums(evaluator.info.n_experts)
        errors = output_errors(sums, seen)
        runs = CostRuns(evaluator, chunks, reference, seen)
        whole = runs.by_layer()
        measured = [runs.refined(errors, iter([True] * n + [False]).__next__) for n in (0, 1, 9)]
    assert sums.shape == (6, 8, 2)
    assert np.all(sums[..., 1] > 0)
    assert np.all(errors[:, 1] > errors[:, 0])  # skipping costs more than low precision
    assert [n for _, n in measured] == [2, 3, 6]
    assert measured[2][0] == whole
    for costs, _ in measured[:2]:
        assert (costs.low[0], costs.skip[5]) == (whole.low[0], whole.skip[5])
        for found, wanted in ((costs.low, whole.low), (costs.skip, whole.skip)):
            assert np.median(np.abs(np.log(np.array(found) / wanted))) < math.log(4)  # few tokens


def test_experts_that_are_not_what_they_seem_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    path = models.tiny_tiers("f16", "q4_0")
    engine = EngineConfig(CacheConfig(pools=64_000_000), n_ctx=64, n_threads=1)
    with Evaluator(path, EvaluationConfig(engine, rule="price")) as evaluator:
        _, seen = profile(evaluator, evaluator.chunks(HELDOUT.read_text(encoding="utf-8"), 1))
    monkeypatch.setattr("pyhobbit.quality.output_error._ACTIVATIONS", (lambda gate, up: gate * up,))
    assert OutputErrors(ExpertWeights(path), read_model_file(path).blocks, seen).sums(8) is None
    without = Observations(**{**vars(seen), "inputs": None})
    assert OutputErrors(ExpertWeights(path), read_model_file(path).blocks, without).sums(8) is None
    assert seen.inputs is not None
    monkeypatch.undo()
    narrow = Observations(**{**vars(seen), "inputs": seen.inputs[:, :, :128]})  # beside a latent input
    assert OutputErrors(ExpertWeights(path), read_model_file(path).blocks, narrow).sums(8) is None


@pytest.mark.parametrize(
    ("arch", "is_known"),
    [("gpt-oss", True), ("deepseek2-fused", True), ("llama4", False), ("llama-scaled", False)],
)
def test_experts_of_other_forms(arch: str, is_known: bool, run_pyhobbit: RunPyhobbit, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    done = run_pyhobbit("convert", "--low", "q4_0", models.random_model(arch, "f16"), "-o", path)
    assert done.returncode == 0, done.stderr
    engine = EngineConfig(CacheConfig(pools=64_000_000), n_ctx=32, n_threads=1)
    with Evaluator(path, EvaluationConfig(engine, rule="price")) as evaluator:
        _, seen = profile(evaluator, [[(7 * i + 3) % 200 for i in range(32)]])
        n_experts = evaluator.info.n_experts
    sums = OutputErrors(ExpertWeights(path), read_model_file(path).blocks, seen).sums(n_experts)
    assert (sums is not None) == is_known
    assert not is_known or np.all(sums.sum(axis=1) > 0)


def test_a_short_calibration(run_pyhobbit: RunPyhobbit, tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.symlink_to(models.tiny_tiers("f16", "q4_0"))
    command = ("calibrate", model, "--text", HELDOUT, "--ctx", 64, "--threads", 1, "--max-kl", 0.02)
    for minutes, n_measured in ((0.001, 2), (60, 6)):
        done = run_pyhobbit(*command, "--minutes", minutes)
        assert done.returncode == 0, done.stderr
        assert f"the costs of {n_measured} of 6 layers are measured" in done.stderr
        assert "512 tokens in 8 parts" in done.stdout
        assert "checked on 4 parts that the fit has not seen" in done.stdout
        assert "rule price" in done.stdout
        assert "rule gate" not in done.stdout


def test_what_minutes_cannot_be() -> None:
    for settings, message in (
        ({"minutes": 0.0}, "--minutes is 0; it must be positive"),
        ({"minutes": math.nan}, "--minutes is nan; it must be positive"),
        ({"minutes": 5.0, "rule": "gate"}, "layer by layer: drop --rule gate"),
    ):
        with pytest.raises(ConfigError, match=message):
            CalibrationConfig(**settings)
