# SPDX-License-Identifier: MIT
"""Perplexity of the tiny model on its held-out text, by llama-perplexity, by precision of its experts."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import logits
import models
import pytest

pytestmark = pytest.mark.slow

N_CTX = 256
N_CHUNKS = 4
TIMEOUT_S = 900
N_ATTEMPTS = 20
LOW_TYPES = ("q4_0", "tq2_0")

# One token at a time, as in generation: in a larger batch, an expert gets the best precision that any of its
# tokens asks for. Strict: else what is resident in high precision replaces low, which depends on prefetch.
POOL_SHARE = 0.25
PRECISIONS = {
    "high only": (1.0, 1.0),
    "mixed": (0.6, 1.0),
    "mixed, some skipped": (0.6, 0.9),
    "low but the top expert": (0.0, 1.0),
}  # t1, t2

# Perplexity over that of all high, as measured.
RATIOS = {
    "q4_0": {"mixed": 1.0005, "mixed, some skipped": 1.0005, "low but the top expert": 0.9991},
    "tq2_0": {"mixed": 1.0089, "mixed, some skipped": 1.0088, "low but the top expert": 1.0238},
}
RATIO_ERROR = 0.002  # instructions of another CPU sum in another order


@functools.cache
def _perplexity(folder: Path, model: Path, overrides: str = "") -> float:
    command = [folder / "llama-perplexity", "-m", model, "-f", models.TINY / "heldout.txt"]
    command += ["-c", str(N_CTX), "-b", str(N_CTX), "-ub", "1", "--chunks", str(N_CHUNKS)]
    command += ["-t", "1", "--no-repack"] + ["--override-kv", overrides] * bool(overrides)
    options = {"capture_output": True, "text": True, "timeout": TIMEOUT_S}
    for _ in range(N_ATTEMPTS):
        done = subprocess.run(command, check=False, **options)
        output = done.stdout + done.stderr
        assert done.returncode == 0, f"exit {done.returncode}: {output[-4000:]}"
        if found := re.search(r"Final estimate: PPL = ([0-9.]+)", output):
            return float(found[1])
        # On a busy machine the program, stock's too, may end before its log thread wrote the last line.
    pytest.fail(f"no perplexity in: {output[-4000:]}")


@functools.cache
def _table(low: str) -> dict[str, float]:
    """Perplexity by precision."""
    two_tiers = models.tiny_tiers("f16", low)
    pools = int(models.routed_expert_bytes(models.tiny()) * POOL_SHARE)
    table = {"high only, stock": _perplexity(models.stock_dir(), models.tiny())}
    for name, (t1, t2) in PRECISIONS.items():
        settings = f"hobbit.t1=float:{t1},hobbit.t2=float:{t2},hobbit.pools=int:{pools}"
        settings += ",hobbit.strict=bool:true"
        table[name] = _perplexity(models.bin_dir(), two_tiers, settings)
    settings = f"hobbit.enable=bool:true,hobbit.pools=int:{pools}"
    table["low only, stock"] = _perplexity(models.stock_dir(), models.tiny_experts(low))
    table["low only"] = _perplexity(models.bin_dir(), models.tiny_experts(low), settings)
    print(f"\nperplexity, high f16, low {low}, {N_CHUNKS} x {N_CTX} tokens")
    for name, value in table.items():
        print(f"{name:24s} {value:9.4f}")
    return table


@pytest.mark.parametrize("low", LOW_TYPES)
def test_mixed_precisions_cost_what_they_did(low: str) -> None:
    table = _table(low)
    ratios = {name: table[name] / table["high only"] for name in RATIOS[low]}
    assert ratios == pytest.approx(RATIOS[low], abs=RATIO_ERROR)


@pytest.mark.parametrize("low", LOW_TYPES)
@pytest.mark.parametrize("alone", ["high only", "low only"])
def test_one_precision_is_as_in_stock(low: str, alone: str) -> None:
    table = _table(low)
    assert table[alone] == table[f"{alone}, stock"]


def test_mixed_precision_is_between_high_and_a_coarse_low_tier() -> None:
    """Ternary experts cost far more than the noise of the text, and the top expert carries most weight."""
    table = _table("tq2_0")
    high, low = table["high only"], table["low only"]
    assert low > 1.2 * high
    for name in ("mixed", "mixed, some skipped", "low but the top expert"):
        assert table[name] != high, f"{name}: the low tier changed nothing"
        assert table[name] < (high + low) / 2, name
    assert high < table["low but the top expert"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_thresholds_choose_the_tiers(precision: str) -> None:
    t1, t2 = PRECISIONS[precision]
    pools = int(models.routed_expert_bytes(models.tiny()) * POOL_SHARE)
    settings = {"hobbit.t1": t1, "hobbit.t2": t2, "hobbit.pools": pools}
    tokens = list(range(3, 259))
    model = models.tiny_tiers("f16", "q4_0")
    run = logits.run(models.lib_dir(), model, {"text": logits.one_at_a_time(tokens)}, settings)
    n_choices = len(tokens) * run.info["n_layers"]  # two experts each
    high, low, skipped = (run.stats[f"selections_{tier}"] for tier in ("high", "low", "skipped"))
    assert high + low + skipped == 2 * n_choices
    assert high >= n_choices, "the top expert is always high"
    assert (low > 0) == (t1 < 1)
    assert (skipped > 0) == (t2 < 1)
