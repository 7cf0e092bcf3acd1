# SPDX-License-Identifier: MIT
"""MoBiLE: drafts with half of the experts, and a second pass over unsure tokens."""

from pathlib import Path

import models
import pytest
from paper_runs import N_LAYERS, N_USED, PaperRun

from pyhobbit.settings.papers import settings_of

pytestmark = pytest.mark.model


def test_mobile_drafts_with_half_of_the_experts_and_repeats_what_is_unsure(tmp_path: Path) -> None:
    run = PaperRun(models.tiny(), tmp_path / "t.csv", "64M", **settings_of("mobile", {}), strict=True)
    n_repeated = run.counted("tokens_repeated")
    assert 0 < n_repeated < run.n_decoded
    assert run.prompt.selections_skipped == 0
    assert (
        run.counted("predicted") > 0 == run.prompt.predicted
    )  # by discarded passes, not by the next layers' routers
    n_kept = run.n_decoded - n_repeated
    assert run.counted("selections_skipped") == n_kept * N_LAYERS * N_USED // 2
    assert run.counted("selections_high") == (n_repeated + n_kept / 2) * N_LAYERS * N_USED
