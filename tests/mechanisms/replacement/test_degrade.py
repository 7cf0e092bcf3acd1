# SPDX-License-Identifier: MIT
"""Missing experts that resident ones replace (hobbit.degrade)."""

from pathlib import Path

import logits
import models
import numpy as np
import pytest
from logits import Override, Result

pytestmark = pytest.mark.model

TOKENS = [1, 38, 75, 112, 9, 200, 41, 7] * 4
PLANS = {"decode": logits.one_at_a_time(TOKENS), "prompt": logits.prefill(TOKENS)}


def _run(model: Path, pools: int, degrade: bool) -> Result:
    settings: dict[str, Override] = {"hobbit.pools": pools, "hobbit.degrade": degrade}
    return logits.run(models.lib_dir(), model, PLANS, settings)


def test_single_tokens_load_less_and_differ_and_prompts_are_exact(tiny_gguf: Path) -> None:
    exact, degraded = (_run(tiny_gguf, 6 << 20, degrade) for degrade in (False, True))
    assert exact.stats["selections_replaced"] == 0
    assert 0 < degraded.stats["selections_replaced"] < degraded.stats["selections_high"] / 2
    assert degraded.stats["misses_high"] < exact.stats["misses_high"]
    np.testing.assert_array_equal(degraded.logits["prompt"], exact.logits["prompt"])
    assert np.abs(degraded.logits["decode"] - exact.logits["decode"]).max() > 0
    assert np.isfinite(degraded.logits["decode"]).all()


def test_experts_with_biases_of_their_own_are_not_replaced() -> None:
    model = models.random_model("gpt-oss")
    exact, degraded = (_run(model, 4 << 20, degrade) for degrade in (False, True))
    assert degraded.stats["selections_replaced"] == 0
    for name in PLANS:
        np.testing.assert_array_equal(degraded.logits[name], exact.logits[name])
