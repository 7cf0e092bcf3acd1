# SPDX-License-Identifier: MIT
"""DAOP: placed by the prompt, computed a layer early, missing experts replaced."""

from pathlib import Path
from typing import Any

import logits
import models
import pytest
from exactness import SHORT_PLANS
from paper_runs import ALONE, PaperRun, calibrated

from pyhobbit import CacheConfig, Engine, EngineConfig
from pyhobbit.errors import HobbitError
from pyhobbit.settings.papers import settings_of

pytestmark = pytest.mark.model

ON_CPU: dict[str, Any] = {**ALONE, "mode": "auto", "early": False, "degrade": False}


def test_daop_places_by_the_prompt(tmp_path: Path) -> None:
    run = PaperRun(models.tiny(), tmp_path / "t.csv", "8M", **settings_of("daop", ON_CPU), **ON_CPU)
    assert run.is_only("prompt")
    near = PaperRun(models.tiny(), tmp_path / "near.csv", "8M", **settings_of("daop", {"early": False}))
    assert near.counted("selections_replaced") > 0


def test_without_a_gpu_it_says_what_it_needs(tmp_path: Path) -> None:
    model = calibrated(models.tiny(), tmp_path)
    cache = CacheConfig(pools=6 << 20, **settings_of("daop", {}))
    with pytest.raises(HobbitError, match="name a GPU with"):
        Engine(model, EngineConfig(cache, n_ctx=256)).open()


def test_on_a_device_the_cpu_computes_what_is_missing(tmp_path: Path, rpc: str) -> None:
    model = calibrated(models.tiny(), tmp_path)
    cache = CacheConfig(device="RPC0", pools=6 << 20, **settings_of("daop", {}))
    stats = logits.run(models.lib_dir(), model, SHORT_PLANS, cache.settings(), rpc=rpc).stats
    assert stats["selections_cpu"] > 0
    assert stats["selections_early"] > 0
