# SPDX-License-Identifier: MIT
"""Twiddler: experts placed by a profile, and Algorithm 1 between the devices."""

from pathlib import Path

import models
import numpy as np
import pytest
from paper_runs import (
    N_EXPERTS,
    N_LAYERS,
    N_USED,
    USES,
    PaperRun,
    Trace,
    calibrated,
    check_needs_gpu,
    counters_on_a_device,
)

from pyhobbit.settings.papers import settings_of

pytestmark = pytest.mark.model


def _missed_again(trace: Trace, placed: np.ndarray) -> int:
    """Uses of placed experts [layer, n] by decoded tokens that found them missing, but for each one's first.

    The prompt, which streams through the pool, may have evicted them.
    """
    rows = np.genfromtxt(trace.path, delimiter=",", names=True, skip_header=2 + N_LAYERS)
    missed = rows[(rows["phase"] == 1) & (rows["residency"] == 0)]
    layer, expert = (missed[name].astype(int) for name in ("layer", "expert"))
    of_placed = np.any(placed[layer] == expert[:, None], axis=1)
    return int(of_placed.sum() - np.unique((layer * N_EXPERTS + expert)[of_placed]).size)


def test_twiddler_leaves_the_experts_of_the_profile_where_they_are(tmp_path: Path) -> None:
    model = calibrated(models.tiny(), tmp_path)
    run = PaperRun(model, tmp_path / "t.csv", "6M", **settings_of("twiddler", {}))
    assert run.all.predicted == 0
    placed = np.argsort(np.reshape(USES, (N_LAYERS, N_EXPERTS)), axis=1)[:, -N_USED:]  # a layer's even share
    lru = PaperRun(model, tmp_path / "lru.csv", "6M", **settings_of("twiddler", {}) | {"policy": "lru"})
    # some, until the places that the prompt took are free again: a layer's even share is not taken from it
    assert 4 * _missed_again(run.trace, placed) < _missed_again(lru.trace, placed)
    assert run.counted("misses_high") > 0


def test_without_a_gpu_it_says_what_it_needs(tmp_path: Path) -> None:
    check_needs_gpu("twiddler", tmp_path)


def test_on_a_device_the_cpu_computes_what_is_missing(tmp_path: Path, rpc: str) -> None:
    stats = counters_on_a_device("twiddler", tmp_path, rpc)
    assert stats["selections_cpu"] > 0
    assert stats["predicted"] == 0
