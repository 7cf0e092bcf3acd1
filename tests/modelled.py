# SPDX-License-Identifier: MIT
"""Runs of a model with modelled devices (modelled_device/modelled-device.h)."""

from __future__ import annotations

from pathlib import Path

import logits
import models
from exactness import SHORT_PLANS, assert_same_bits
from logits import ROOT, Override, Result

BUILD = ROOT / "build/release/bin"
DEVICE = BUILD / "libmodelled-order.so"

KINDS = {
    "CUDA": "name=CUDA",
    "Vulkan": "name=Vulkan",
    "RPC": "name=RPC events=0 one_queue=1",
    "no events": "name=CUDA events=0",
}
"""Settings of devices that are like those, as modelled_configure takes them."""


def run(
    model: Path,
    settings: str,
    overrides: dict[str, Override],
    *,
    gpu_layers: int = 0,
    lib_dir: Path | None = None,
    fault: str = "",
) -> Result:
    """SHORT_PLANS beside devices with these settings. Raises RunError, whose text has what they found."""
    environment = {"LD_PRELOAD": str(DEVICE), "MODELLED_FAULT": fault}
    return logits.run(
        lib_dir or models.lib_dir(),
        model,
        SHORT_PLANS,
        overrides,
        gpu_layers=gpu_layers,
        modelled=f"{DEVICE} {settings}",
        environment=environment,
    )


QUANTIZED = 0.53
"""Size of quantized()'s experts beside those of the other tiny model."""


def quantized() -> Path:
    """The tiny model with experts of which kernels for a token read no more than they use."""
    return models.tiny_experts("q8_0")


def on(n_devices: int, settings: str, size: float = 1) -> dict[str, Override]:
    """Experts of this size on the first devices with these settings, a fifth of them for one device."""
    name = settings.split("name=")[1].split()[0]
    return {
        "hobbit.device": ",".join(f"{name}{i}" for i in range(n_devices)),
        "hobbit.pools": int(n_devices * size * (4 << 20)),
    }


def assert_clean(result: Result, reference: Result) -> None:
    """The reference's values, and no access out of order."""
    assert result.report["errors"] == []
    assert min(result.report[what] for what in ("accesses", "waits")) > 0
    for name, wanted in reference.logits.items():
        assert_same_bits(result.logits[name], wanted)
