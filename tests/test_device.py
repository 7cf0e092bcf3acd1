# SPDX-License-Identifier: MIT
"""Pools on a device with memory of its own.

The CPU behind ggml's RPC server computes as the CPU does, bit for bit. Vulkan's software device computes
within an error, and a few tokens only: Mesa's is not stable for long (docs/devices.md).
"""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import logits
import models
import numpy as np
import pytest
from conftest import TESTS, RunPyhobbit
from logits import ROOT, Override, Plan, Result, RunError

VULKAN_DIR = ROOT / "build/vulkan/bin"
TOKENS = [1 + 37 * i % 500 for i in range(40)]
PLANS = {"prompt": logits.prefill(TOKENS), "tokens": logits.one_at_a_time(TOKENS[:6])}

MAX_NMSE = 5e-4
"""The normalised mean square error that llama.cpp's test-backend-ops accepts of MUL_MAT_ID."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Of a device, at this endpoint."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with subprocess.Popen([sys.executable, TESTS / "rpc_server.py", models.lib_dir(), str(port)]) as process:
        try:
            _wait_for(port)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


def _wait_for(port: int) -> None:
    for _ in range(600):
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.1)
    raise AssertionError("the RPC server does not listen")


@pytest.fixture(scope="module")
def on_cpu(tiny_gguf: Path) -> Result:
    return logits.run(models.lib_dir(), tiny_gguf, PLANS, {"hobbit.pools": 64 << 20})


def _on_rpc(model: Path, server: str, overrides: dict[str, Override], gpu_layers: int = 0) -> Result:
    overrides = {"hobbit.device": "RPC0"} | overrides
    return logits.run(models.lib_dir(), model, PLANS, overrides, gpu_layers=gpu_layers, rpc=server)


def _assert_same(result: Result, reference: Result) -> None:
    for name, wanted in reference.logits.items():
        np.testing.assert_array_equal(result.logits[name], wanted, name)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_the_logits_are_the_cpus_with_pools_of_any_size(
    tiny_gguf: Path, server: str, on_cpu: Result, share: float
) -> None:
    info = on_cpu.info
    smallest = info["n_experts_used"] * info["pool_bytes_high"] / info["pool_slots_high"]
    pools = int(max(share * info["tier_bytes_high"], smallest) * 1.05)
    result = _on_rpc(tiny_gguf, server, {"hobbit.pools": pools})
    assert (result.info["pool_slots_high"] == info["n_layers"] * info["n_experts"]) == (share == 1)
    assert result.stats["bytes_read"] > 0
    _assert_same(result, on_cpu)


def test_the_other_layers_may_be_on_the_device_too(tiny_gguf: Path, server: str, on_cpu: Result) -> None:
    _assert_same(_on_rpc(tiny_gguf, server, {"hobbit.pools": 4 << 20}, gpu_layers=99), on_cpu)


def test_low_precision_and_skipping(tiny_gguf: Path, server: str) -> None:
    overrides: dict[str, Override] = {"hobbit.t1": 0.5, "hobbit.t2": 0.9, "hobbit.strict": True}
    overrides["hobbit.pools"] = 8 << 20
    result = _on_rpc(tiny_gguf, server, overrides)
    assert result.stats["selections_low"] > 0
    assert result.stats["selections_skipped"] > 0
    _assert_same(result, logits.run(models.lib_dir(), tiny_gguf, PLANS, overrides))


def test_too_little_device_memory_is_an_error_that_names_the_least(tiny_gguf: Path, server: str) -> None:
    with pytest.raises(
        RunError, match=r"device memory of 1\.0 KiB is too small: the smallest that works is \d+ MiB"
    ):
        _on_rpc(tiny_gguf, server, {"hobbit.device_memory": 1024})


@pytest.mark.skipif(not VULKAN_DIR.exists(), reason="there is no build with Vulkan: run make vulkan")
def test_vulkan_is_within_the_error_that_llama_cpp_accepts(tiny_gguf: Path, on_cpu: Result) -> None:
    plans: dict[str, Plan] = {"tokens": PLANS["tokens"]}
    overrides: dict[str, Override] = {"hobbit.device": "Vulkan0", "hobbit.pools": 4 << 20}
    result = logits.run(VULKAN_DIR, tiny_gguf, plans, overrides, vulkan=True)
    wanted = on_cpu.logits["tokens"]
    assert np.square(result.logits["tokens"] - wanted).sum() / np.square(wanted).sum() < MAX_NMSE


def test_a_device_that_is_not_there_is_an_error_that_names_those_there_are(
    tiny_gguf: Path, run_pyhobbit: RunPyhobbit
) -> None:
    done = run_pyhobbit("chat", tiny_gguf, "-p", "x", "-n", 1, "--device", "CUDA7")
    assert done.returncode == 1
    assert "there is no device 'CUDA7': choose one of CPU" in done.stderr


def test_device_memory_wants_a_device_that_has_any(tiny_gguf: Path, run_pyhobbit: RunPyhobbit) -> None:
    done = run_pyhobbit("chat", tiny_gguf, "-p", "x", "-n", 1, "--device-memory", "64M")
    assert done.returncode == 1
    assert "hobbit.device_memory bounds a device that has memory of its own" in done.stderr
