# SPDX-License-Identifier: MIT
"""The order of accesses to modelled devices, and the values that they compute."""

from pathlib import Path

import logits
import modelled
import models
import pytest
from exactness import SHORT_PLANS
from logits import Override, Result


@pytest.mark.parametrize("mode", ["gpu", "cooperative", "auto", "twiddler"])
@pytest.mark.parametrize("n_devices", [1, 2])
@pytest.mark.parametrize("kind", modelled.KINDS)
def test_nothing_is_out_of_order(
    tiny_gguf: Path, on_cpu: Result, quantized_on_cpu: Result, kind: str, n_devices: int, mode: str
) -> None:
    """Where uploads take longer than the CPU's share, so that what does not wait for them is early.

    A device with CUDA's events computes quantized experts before the host knows which ones.
    """
    is_early = kind == "CUDA"
    settings = f"{modelled.KINDS[kind]} devices={n_devices} delay_us=100"
    pools = modelled.on(n_devices, settings, modelled.QUANTIZED if is_early else 1)
    pools |= {"hobbit.mode": mode, "hobbit.prefetch": 2}
    model = modelled.quantized() if is_early else tiny_gguf
    result = modelled.run(model, settings, pools, gpu_layers=99)
    modelled.assert_clean(result, quantized_on_cpu if is_early else on_cpu)
    assert result.report["events"] > 0 or not is_early
    stats = result.stats
    assert min(stats[what] for what in ("misses_high", "evictions", "prefetched_used")) > 0
    assert (stats["selections_cpu"] > 0) == (mode != "gpu")
    assert all(device["bytes_transferred"] > 0 for device in result.devices)
    assert len(result.devices) == n_devices


@pytest.mark.parametrize("gpu_layers", [0, 3])
@pytest.mark.parametrize("mode", ["gpu", "auto"])
def test_nor_where_the_cpu_has_other_layers(
    tiny_gguf: Path, on_cpu: Result, mode: str, gpu_layers: int
) -> None:
    settings = modelled.KINDS["CUDA"] + " devices=2"
    pools = modelled.on(2, settings) | {"hobbit.mode": mode}
    modelled.assert_clean(modelled.run(tiny_gguf, settings, pools, gpu_layers=gpu_layers), on_cpu)


@pytest.mark.parametrize("high", ["f16", "q8_0"])  # the latter run ahead of the choice
def test_nor_in_low_precision_and_with_skipped_experts(high: str) -> None:
    model = models.tiny_tiers(high, "q4_0")
    rules: dict[str, Override] = {"hobbit.t1": 0.5, "hobbit.t2": 0.9, "hobbit.strict": True}
    on_cpu = logits.run(models.lib_dir(), model, SHORT_PLANS, rules | {"hobbit.pools": 8 << 20})
    for mode in ("gpu", "cooperative"):
        pools = rules | modelled.on(1, modelled.KINDS["CUDA"]) | {"hobbit.mode": mode}
        result = modelled.run(model, modelled.KINDS["CUDA"], pools, gpu_layers=99)
        modelled.assert_clean(result, on_cpu)
        assert min(result.stats["selections_low"], result.stats["selections_skipped"]) > 0


@pytest.mark.parametrize("n_devices", [1, 2])
def test_stock_llama_cpp_computes_on_it_too(n_devices: int) -> None:
    """With two devices it works on four batches at once, and orders them by events."""
    plain = logits.run(models.stock_dir(), models.tiny(), SHORT_PLANS)
    settings = modelled.KINDS["CUDA"] + f" devices={n_devices}"
    result = modelled.run(models.tiny(), settings, {}, gpu_layers=99, lib_dir=models.stock_dir())
    modelled.assert_clean(result, plain)
    assert ("sched copies = 4" in result.log) == (n_devices == 2)
    assert result.report["events"] > 0
