# SPDX-License-Identifier: MIT
"""Missing experts that resident ones replace (hobbit.degrade)."""

from pathlib import Path

import logits
import modelled
import models
import numpy as np
import pytest
from built import MECHANISMS
from exactness import nmse
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


def _on_device(model: Path, **settings: Override) -> Result:
    device = {"hobbit.device": "CUDA0", "hobbit.pools": 6 << 20}
    kind = f"{modelled.DEVICE} {modelled.KINDS['CUDA']}"
    everything = device | {f"hobbit.{name}": value for name, value in settings.items()}
    preloaded = {"LD_PRELOAD": str(modelled.DEVICE)}
    return logits.run(
        models.lib_dir(), model, PLANS, everything, gpu_layers=99, modelled=kind, environment=preloaded
    )


EARLY = [{"mode": "cooperative", "early": True}] if "early" in MECHANISMS else []


@pytest.mark.parametrize("gentle", [{"mode": "gpu"}, *EARLY])
def test_a_device_replaces_as_the_cpu_does(tiny_gguf: Path, gentle: dict[str, Override]) -> None:
    exact, on_cpu = (_run(tiny_gguf, 6 << 20, degrade) for degrade in (False, True))
    degraded = _on_device(tiny_gguf, degrade=True, prefetch=1, **gentle)
    assert degraded.stats["selections_replaced"] > on_cpu.stats["selections_replaced"] / 3
    assert (degraded.stats.get("selections_early", 0) > 0) == ("early" in gentle)
    assert degraded.report["errors"] == []
    error, usual = (nmse(result.logits["decode"], exact.logits["decode"]) for result in (degraded, on_cpu))
    assert 0 < error < (6 if "early" in gentle else 3) * usual  # early rows have an error of their own
    np.testing.assert_array_equal(degraded.logits["prompt"], exact.logits["prompt"])


def test_without_prefetch_nothing_is_ranked(tiny_gguf: Path) -> None:
    declined = _on_device(tiny_gguf, degrade=True, prefetch=0)
    assert declined.stats["selections_replaced"] == 0
    assert "no missing expert is replaced (hobbit.degrade)" in declined.log


def test_experts_with_biases_of_their_own_are_not_replaced() -> None:
    model = models.random_model("gpt-oss")
    exact, degraded = (_run(model, 4 << 20, degrade) for degrade in (False, True))
    assert degraded.stats["selections_replaced"] == 0
    for name in PLANS:
        np.testing.assert_array_equal(degraded.logits[name], exact.logits[name])
