# SPDX-License-Identifier: MIT
"""EdgeMoE: static widths, and experts predicted by paths."""

from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from paper_runs import ALONE, N_EXPERTS, N_LAYERS, N_USED, USES, PaperRun, calibrated

from pyhobbit.quality.evaluate import Costs
from pyhobbit.routing.paths import chosen_of, path_table
from pyhobbit.settings.papers import settings_of

pytestmark = pytest.mark.model

IS_LOW = np.tile([True, False, True, True, False, False, True, False], N_LAYERS)  # [layer x expert]


def test_edgemoe_gives_each_expert_one_width_and_learns_paths(tmp_path: Path) -> None:
    low = tuple(np.where(IS_LOW, 1e-9, 1.0).tolist())
    costs = Costs(low, (float("inf"),) * len(low))
    found: dict[str, Any] = {"rule": "edgemoe", "numbers": {"price": 1e-3}, "costs": costs}
    model = calibrated(models.tiny_tiers("f16", "q4_0"), tmp_path, **found)
    run = PaperRun(model, tmp_path / "t.csv", "4M", **settings_of("edgemoe", ALONE), **ALONE, strict=True)
    routes = run.trace.routes[run.trace.routes["counted"] != 0]
    n_low = int(IS_LOW[routes["layer"] * N_EXPERTS + routes["expert"]].sum())
    assert (run.counted("selections_low"), run.counted("selections_high")) == (n_low, routes.size - n_low)
    high = PaperRun(model, tmp_path / "h.csv", "4M", **settings_of("edgemoe", ALONE), **ALONE, price=0.0)
    uses = np.reshape(USES, (N_LAYERS, N_EXPERTS))
    rates = N_USED * uses / uses.sum(axis=1, keepdims=True)
    assert high.is_only("edgemoe", prior=tuple(rates.ravel().tolist()))
    ahead = PaperRun(model, tmp_path / "ahead.csv", "4M", **settings_of("edgemoe", {}))
    assert 0 < ahead.all.predicted_right < ahead.all.predicted
    assert ahead.prompt.predicted == 0  # nothing is learnt yet
    (tmp_path / "learnt").mkdir()
    paths = path_table(chosen_of(ahead.trace.routes), N_EXPERTS)
    learnt = calibrated(models.tiny_tiers("f16", "q4_0"), tmp_path / "learnt", paths=paths, **found)
    again = PaperRun(learnt, tmp_path / "again.csv", "4M", **settings_of("edgemoe", {}))
    assert again.prompt.predicted_right > 0.5 * again.prompt.predicted > 0
