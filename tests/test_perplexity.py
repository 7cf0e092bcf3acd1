# SPDX-License-Identifier: MIT
"""Perplexity of the tiny model on its held-out text, by llama-perplexity, by precision of its experts."""

from __future__ import annotations

import functools
import math
import re
import subprocess
from itertools import pairwise
from pathlib import Path

import logits
import models
import pytest

N_CTX = 256
N_CHUNKS = 16
TIMEOUT_S = 300
LOW_TYPES = ("q4_0", "tq2_0")

# Thresholds of the mixed runs, in llama.cpp's --override-kv syntax.
PRECISIONS = {
    "high only": "hobbit.t1=float:1,hobbit.t2=float:1",
    "mixed": "hobbit.t1=float:0.6,hobbit.t2=float:1",
    "mixed, some skipped": "hobbit.t1=float:0.6,hobbit.t2=float:0.9",
    "all low but the top expert": "hobbit.t1=float:0,hobbit.t2=float:1",
}


def _perplexity(folder: Path, model: Path, overrides: str = "") -> float:
    command = [folder / "llama-perplexity", "-m", model, "-f", models.TINY / "heldout.txt"]
    command += ["-c", str(N_CTX), "--chunks", str(N_CHUNKS), "-t", "2", "--no-repack"]
    command += ["--override-kv", overrides] if overrides else []
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=logits.quiet_environment(),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.search(r"Final estimate: PPL = ([0-9.]+)", done.stdout + done.stderr)
    assert found, f"no perplexity in: {done.stderr[-4000:]}"
    return float(found[1])


@functools.cache
def _table(low: str) -> dict[str, float]:
    """Perplexity by precision; the low tier alone and the reference run in stock."""
    two_tiers = models.tiny_tiers("f16", low)
    table = {"high only, stock": _perplexity(models.stock_dir(), models.tiny())}
    for name, thresholds in PRECISIONS.items():
        table[name] = _perplexity(models.bin_dir(), two_tiers, thresholds)
    table["low only, stock"] = _perplexity(models.stock_dir(), models.tiny_experts(low))
    print(f"\nperplexity, high f16, low {low}, {N_CHUNKS} x {N_CTX} tokens")
    for name, value in table.items():
        print(f"{name:28s} {value:9.4f}")
    return table


@pytest.mark.parametrize("low", LOW_TYPES)
def test_every_precision_gives_a_finite_perplexity(low: str) -> None:
    for name, value in _table(low).items():
        assert math.isfinite(value), name
        assert 1 < value < 100, name


@pytest.mark.parametrize("low", LOW_TYPES)
def test_high_only_is_as_in_stock(low: str) -> None:
    table = _table(low)
    assert table["high only"] == table["high only, stock"]


def test_perplexity_grows_with_the_share_of_a_coarse_low_tier() -> None:
    """With ternary experts the differences are far above the noise of the text, unlike with q4_0."""
    table = _table("tq2_0")
    ascending = [
        table[name] for name in ("high only", "mixed", "all low but the top expert", "low only, stock")
    ]
    assert all(a < b for a, b in pairwise(ascending)), ascending
