# SPDX-License-Identifier: MIT
"""DAOP: placed by the prompt, computed a layer early, missing experts replaced."""

from pathlib import Path
from typing import Any

import models
import pytest
from paper_runs import ALONE, PaperRun, check_needs_gpu, counters_on_a_device

from pyhobbit.settings.papers import settings_of

pytestmark = pytest.mark.model

ON_CPU: dict[str, Any] = {**ALONE, "mode": "auto", "early": False, "degrade": False}


def test_daop_places_by_the_prompt(tmp_path: Path) -> None:
    run = PaperRun(models.tiny(), tmp_path / "t.csv", "8M", **settings_of("daop", ON_CPU), **ON_CPU)
    assert run.is_only("prompt")
    near = PaperRun(models.tiny(), tmp_path / "near.csv", "8M", **settings_of("daop", {"early": False}))
    assert near.counted("selections_replaced") > 0


def test_without_a_gpu_it_says_what_it_needs(tmp_path: Path) -> None:
    check_needs_gpu("daop", tmp_path)


def test_on_a_device_the_cpu_computes_what_is_missing(tmp_path: Path, rpc: str) -> None:
    stats = counters_on_a_device("daop", tmp_path, rpc)
    assert stats["selections_cpu"] > 0
    assert stats["selections_early"] > 0
