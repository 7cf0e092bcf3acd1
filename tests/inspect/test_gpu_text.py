# SPDX-License-Identifier: MIT
"""The line that says which GPU is in use."""

import pytest

from pyhobbit.inspect import advice
from pyhobbit.native.devices import Gpu

TWO = (Gpu("CUDA0", "NVIDIA A"), Gpu("CUDA1", "NVIDIA B"))


@pytest.mark.parametrize(
    ("found", "backends", "devices", "text"),
    [
        ((), (), ["CPU"], "none: this build is for the CPU; make install GPU=vulkan or the wheel finds one"),
        ((), ("CUDA",), None, "none that CUDA can use; check the driver"),
        ((), ("CUDA", "Vulkan"), None, "none that CUDA and Vulkan can use; check the driver"),
        (TWO, ("CUDA",), ["CUDA1"], "CUDA1 (NVIDIA B), with the experts"),
        (TWO, ("CUDA",), ["CUDA0", "CUDA1"], "CUDA0 (NVIDIA A), CUDA1 (NVIDIA B), with the experts"),
        (TWO[:1], ("CUDA",), [], "CUDA0 (NVIDIA A); the CPU computes the experts"),
        (TWO[:1], ("CUDA",), ["CPU"], "CUDA0 (NVIDIA A); the CPU computes the experts"),
        (TWO[:1], ("CUDA",), None, "CUDA0 (NVIDIA A)"),
    ],
)
def test_the_gpu_in_use_is_named(
    monkeypatch: pytest.MonkeyPatch,
    found: tuple[Gpu, ...],
    backends: tuple[str, ...],
    devices: list[str] | None,
    text: str,
) -> None:
    monkeypatch.setattr(advice, "gpus", lambda: found)
    monkeypatch.setattr(advice, "gpu_backends", lambda: backends)
    assert advice.gpu_text(devices) == text
