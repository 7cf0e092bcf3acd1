# SPDX-License-Identifier: MIT
"""Generated models route like Qwen3-30B-A3B; bench/routing.py measures it."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import models
import pytest
import traces

from bench.harness import generate
from bench.harness.shapes import SHAPES

SMALL = replace(
    SHAPES["qwen3-30b-a3b"], n_layer=12, n_embd=512, n_ff=64, n_head=8, n_head_kv=2, n_vocab=4096
)  # 128 experts, 8 used, as in the real model

REUSED, LRU = 0.380, (0.654, 0.827, 0.939)  # values of the real model's trace; docs/measurements.md


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate.write_model(tmp_path_factory.mktemp("routing"), "small", SMALL, "q4_0")


def _run(*args: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "bench.routing", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=models.ROOT)


def _figures(*args: object) -> list[float]:
    done = _run(*args)
    assert done.returncode == 0, done.stderr[-2000:]
    return [
        float("nan") if cell == " - " else float(cell) for cell in done.stdout.split("\n")[2].split("|")[2:-1]
    ]


def test_a_generated_model_routes_like_the_real_one(small: Path) -> None:
    reused, *lru, one, two, three, four = _figures(small, "--used", 6, "--sequences", 2)
    # a narrow model of few layers differs more than one of the real shape; chance is 0.05, 0.15, 0.25, 0.4
    assert reused == pytest.approx(REUSED, abs=0.08)
    assert lru == pytest.approx(LRU, abs=0.08)
    assert one == pytest.approx(0.886, abs=0.04)  # published for the real model
    for nearer, farther in ((one, two), (two, three), (three, four)):
        assert 0.01 < nearer - farther < 0.06


def test_the_figures_of_a_trace(tmp_path: Path) -> None:
    """Two layers of four experts; the second token chooses as the first, the third as none before."""
    rows = [(0, 1, t, layer, 0, e, 1.0) for t, e in enumerate((0, 0, 1)) for layer in range(2)]
    trace = traces.write_trace(tmp_path / "t.csv", rows, 2, 4, 1)
    figures = _figures(trace)
    assert figures[0] == 0.5
    assert figures[1:4] == pytest.approx([0, 1 / 3, 1 / 3], abs=0.001)  # one, two and three slots


def test_what_cannot_be_measured_is_a_sentence(small: Path) -> None:
    for options, message in (
        ([small, "--used", 9], "--used is 9; small-12x-q4_0.gguf uses 8 experts for each token"),
        ([small, "--sequences", 0], "--sequences is 0"),
        (["/none.csv"], "the trace /none.csv cannot be read"),
    ):
        done = _run(*options)
        assert done.returncode == 1
        assert message in done.stderr.splitlines()[-1]
