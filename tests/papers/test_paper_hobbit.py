# SPDX-License-Identifier: MIT
"""HOBBIT's own configuration: Eq. 2 and Eq. 3."""

from pathlib import Path

import numpy as np
from paper_runs import ALONE, N_EXPERTS, N_LAYERS, N_USED, USES, PaperRun, calibrated

from pyhobbit.settings.papers import settings_of


def test_hobbit_runs_eq_2_at_its_thresholds_and_keeps_by_eq_3(tiny_gguf: Path, tmp_path: Path) -> None:
    run = PaperRun(tiny_gguf, tmp_path / "t.csv", "4M", **settings_of("hobbit", ALONE), **ALONE)
    assert run.is_only("hobbit", t1=0.6, t2=0.9)
    assert run.counted("selections_low") > 0
    assert run.counted("selections_skipped") > 0
    ahead = PaperRun(tiny_gguf, tmp_path / "ahead.csv", "4M", **settings_of("hobbit", {}))
    assert ahead.all.predicted > 0


def test_hobbit_keeps_by_the_weights_that_a_calibration_fitted(tiny_gguf: Path, tmp_path: Path) -> None:
    weights = (0.0, 0.5, 0.0, 0.5)
    model = calibrated(tiny_gguf, tmp_path, weights=weights)
    run = PaperRun(model, tmp_path / "t.csv", "4M", **settings_of("hobbit", ALONE), **ALONE)
    uses = np.reshape(USES, (N_LAYERS, N_EXPERTS))
    rates = N_USED * uses / uses.sum(axis=1, keepdims=True)
    own = {"t1": 0.6, "t2": 0.9, "prior": tuple(rates.ravel().tolist())}  # fills the pools at first
    assert run.is_only("hobbit", weights=weights, **own)
    assert not run.is_only("hobbit", **own)
