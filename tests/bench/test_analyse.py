# SPDX-License-Identifier: MIT
"""bench.analyse on the tiny model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from conftest import TESTS

from bench import analyse
from bench.analyse import choose_thresholds
from pyhobbit.settings.config import CacheConfig

HELD_OUT = TESTS / "tiny_moe" / "heldout.txt"


@pytest.fixture(scope="module")
def analysed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("analyse") / "plots"
    words = [models.tiny_tiers("f16", "q4_0"), "--text", HELD_OUT, "--plots", folder, "--chunks", 1]
    words += ["--threads", 1, "--pools", "6M"]
    done = subprocess.run(
        [sys.executable, "-m", "bench.analyse", *map(str, words)],
        cwd=models.ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), folder


def test_analyses_of_the_tiny_model(analysed: tuple[dict[str, Any], Path]) -> None:
    found = analysed[0]
    assert (found["n_tokens"], found["blocks"], found["notes"]) == (512, list(range(6)), [])
    assert (found["t1"], found["t2"]) == (CacheConfig.paper_t1, CacheConfig.paper_t2)
    assert 10 < found["perplexity"] < 30
    assert 0.1 < found["confident"] < 0.4
    assert all(0.5 < alike < 1 for alike in found["carry_over"])
    gates, ahead = found["gates"], found["ahead"]
    assert 0.5 < found["importance"]["overall"] <= 1
    high, low, skipped = gates["mix"]
    assert high > 0.5  # the best of two
    assert high + low + skipped == pytest.approx(1)
    assert np.sum(gates["high_use"]["uses"]) == 512 * 6 * 2
    assert np.sum(gates["high_use"]["high"]) == pytest.approx(high * 512 * 6 * 2)
    top1 = [row[0] for row in ahead["prediction"]["top1"]]
    assert all(value > ahead["prediction"]["chance_top1"] for value in top1)


def test_the_engine_decides_as_the_scores_say(analysed: tuple[dict[str, Any], Path]) -> None:
    cost = analysed[0]["cost"]
    assert [point["share"] for point in cost] == [0.05, 0.1, 0.2, 0.3, 0.4, 0.5]
    for point in cost:
        # other precisions change what later layers choose, a little
        assert point["replaced"]["share_low"] == pytest.approx(point["share"], abs=0.02)
        assert point["skipped"]["share_skipped"] == pytest.approx(point["share"], abs=0.05)
        assert point["replaced"]["mean_kl"] < point["skipped"]["mean_kl"]
    assert cost[-1]["replaced"]["share_low"] == 0.5


def test_every_analysis_has_its_plot(analysed: tuple[dict[str, Any], Path]) -> None:
    assert len(list(analysed[1].iterdir())) == 8


@pytest.mark.parametrize(
    ("given", "stored", "expected"),
    [
        ((None, None), (1, 1), (0.6, 0.9)),
        ((None, None), (0.5, 0.8), (0.5, 0.8)),
        ((0.7, None), (0.5, 0.6), (0.7, 0.7)),
        ((0.3, None), (1, 1), (0.3, 0.9)),
        ((None, 0.4), (1, 1), (0.4, 0.4)),
        ((0.2, 0.3), (0.5, 0.8), (0.2, 0.3)),
    ],
)
def test_thresholds_that_are_shown(
    given: tuple[float | None, float | None], stored: tuple[float, float], expected: tuple[float, float]
) -> None:
    assert choose_thresholds(*given, *stored) == expected


def _error(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert analyse.main([*map(str, arguments)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_errors_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, short = models.tiny_tiers("f16", "q4_0"), tmp_path / "short.txt"
    short.write_text("def f():\n    return 1\n")
    assert "cannot be read" in _error(capsys, model, "--text", tmp_path / "none.txt")
    assert "fewer than 512 tokens" in _error(capsys, model, "--text", short)
    assert "--chunks is 0" in _error(capsys, model, "--text", short, "--chunks", 0)
    assert "must not be above" in _error(capsys, model, "--text", short, "--t1", 0.9, "--t2", 0.5)
    assert "choose another one" in _error(capsys, model, "--text", short, "--plots", short)


def test_plots_without_matplotlib_are_refused_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "bench.analysis.plots", raising=False)
    monkeypatch.delattr("bench.analysis.plots", raising=False)
    model = models.tiny_tiers("f16", "q4_0")
    error = _error(capsys, model, "--text", HELD_OUT, "--plots", tmp_path / "plots")
    assert "pip install matplotlib" in error
    assert not (tmp_path / "plots").exists()
