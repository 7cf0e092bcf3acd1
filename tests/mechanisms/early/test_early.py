# SPDX-License-Identifier: MIT
"""Experts that the CPU computes a layer early (hobbit.early), beside an RPC server."""

from pathlib import Path

import logits
import models
import numpy as np
from conftest import RunPyhobbit
from logits import Override, Result


def test_early_rows_are_approximate_and_nothing_else_is(tiny_gguf: Path, rpc: str, on_cpu: Result) -> None:
    slot = on_cpu.info["pool_bytes_high"] // on_cpu.info["pool_slots_high"]
    settings: dict[str, Override] = {"hobbit.mode": "cooperative", "hobbit.pools": 8 * slot}
    tokens = [1, 38, 75, 112, 9, 200, 41, 7] * 4
    plans = {"decode": logits.one_at_a_time(tokens), "prompt": logits.prefill(tokens)}
    exact, early, later, never = (
        logits.run(models.lib_dir(), tiny_gguf, plans, {"hobbit.device": "RPC0", **settings, **more}, rpc=rpc)
        for more in ({}, *({"hobbit.early": True, "hobbit.early_from": n} for n in (0, 4, 6)))
    )
    assert exact.stats["selections_early"] == never.stats["selections_early"] == 0
    np.testing.assert_array_equal(never.logits["decode"], exact.logits["decode"])
    assert later.stats["selections_early"] > 0
    assert 0 < early.stats["selections_early"] < early.stats["selections_cpu"]
    np.testing.assert_array_equal(early.logits["prompt"], exact.logits["prompt"])
    np.testing.assert_array_equal(
        early.logits["decode"][0], exact.logits["decode"][0]
    )  # layers are not known yet
    difference = np.abs(early.logits["decode"] - exact.logits["decode"]).max(axis=1)
    assert difference.max() > 0
    assert (
        difference.mean() < 0.25 * np.abs(exact.logits["decode"]).max()
    )  # times decide which rows are early


def test_computing_early_wants_a_device_and_predictions(
    tiny_gguf: Path, rpc: str, run_pyhobbit: RunPyhobbit
) -> None:
    on_device = ("--rpc", rpc, "--device", "RPC0", "--pools", "8M")
    for options in (), (*on_device, "--set", "mode=gpu"), (*on_device, "--prefetch", 0):
        done = run_pyhobbit("chat", tiny_gguf, "-p", "x", "-n", 1, "--set", "early=true", *options)
        assert done.returncode == 1
        assert "early lets the CPU compute experts that are predicted: name a GPU" in done.stderr
        assert "weights other than experts" not in done.stderr
