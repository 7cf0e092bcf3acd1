# SPDX-License-Identifier: MIT
"""Forecasts of the speed with other memory, a low tier and a smaller KV cache."""

import json
from dataclasses import replace

import models
import pytest
from conftest import RunPyhobbit
from test_speed import DISK, PLAN, SAMPLE

from pyhobbit.inspect import forecast
from pyhobbit.inspect.speed import Speed
from pyhobbit.settings.config import EngineConfig

ONE_TIER = replace(
    PLAN, info=replace(PLAN.info, n_tiers=1, pool_slots_low=0, pool_bytes_low=0, t1=1.0, t2=1.0)
)
SPEED = Speed(0.05, 0.02, 20 << 20, (0.64, 1.0), "sample", DISK, replace(SAMPLE, mix=(1.0, 0.0, 0.0)))


def test_the_own_memory_has_the_speed_that_was_measured_and_all_has_no_waits() -> None:
    fitted = forecast._fitted(ONE_TIER, SPEED)
    # 64 % hits of 40 % of the experts: (1 - 0.4) ** 2 are missed
    assert fitted.rate(0.4) == pytest.approx(1 / (0.05 + 0.36 * (40 << 20) * 0.02 / (20 << 20)))
    assert fitted.rate(0.7) == pytest.approx(1 / (0.05 + 0.09 * 2 * 0.02))
    assert fitted.rate(1.0) == pytest.approx(20)
    even = replace(SPEED, hits=(0.4, 1.0), source="even")
    assert forecast._fitted(ONE_TIER, even).rate(0.7) == pytest.approx(1 / (0.05 + 0.3 * 2 * 0.02))


def test_inspect_forecasts_by_memory(run_pyhobbit: RunPyhobbit) -> None:
    tiny_plain = models.tiny()
    options = ("--pools", "6M", "--ctx", 256)
    done = run_pyhobbit("inspect", tiny_plain, *options, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    points = document["forecast"]["by_memory"]
    speeds = [point["speed"] for point in points]
    assert len(points) == 10
    assert speeds == sorted(speeds)
    assert points[-1]["share"] == 1
    assert speeds[-1] == pytest.approx(1 / document["speed"]["compute_s"])
    assert document["forecast"]["own"] in points
    assert "a low tier in q4_0" in document["forecast"]["low_tier"]
    assert "--cache-type-k q8_0" in document["forecast"]["small_context"]
    done = run_pyhobbit("inspect", tiny_plain, *options)
    assert "memory          token/s   experts in memory" in done.stdout
    assert len([line for line in done.stdout.splitlines() if line.endswith("█")]) == 10
    assert "\na token takes " in done.stdout
    assert "\na KV cache in q8_0: " in done.stdout


def test_where_every_expert_is_in_memory_a_smaller_context_brings_nothing() -> None:
    whole = replace(ONE_TIER, info=replace(ONE_TIER.info, pool_slots_high=1000))
    assert forecast._small_context(models.tiny(), EngineConfig(), whole, forecast._fitted(whole, SPEED)) == ""
