# SPDX-License-Identifier: MIT
"""HOBBIT's own configuration: Eq. 2 and Eq. 3."""

from pathlib import Path

from paper_runs import ALONE, PaperRun

from pyhobbit.settings.papers import settings_of


def test_hobbit_runs_eq_2_at_its_thresholds_and_keeps_by_eq_3(tiny_gguf: Path, tmp_path: Path) -> None:
    run = PaperRun(tiny_gguf, tmp_path / "t.csv", "4M", **settings_of("hobbit", ALONE), **ALONE)
    assert run.is_only("hobbit", t1=0.6, t2=0.9)
    assert run.counted("selections_low") > 0
    assert run.counted("selections_skipped") > 0
    ahead = PaperRun(tiny_gguf, tmp_path / "ahead.csv", "4M", **settings_of("hobbit", {}))
    assert ahead.all.predicted > 0
