# SPDX-License-Identifier: MIT
"""Pools on several devices with memory of their own, each with some of the layers (on_rpc.py)."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import logits
import models
import on_rpc
import pytest
import rpc_server
import servers
from conftest import RunPyhobbit
from exactness import SHORT_PLANS
from logits import Override, Result, RunError


@pytest.fixture(scope="module")
def two_rpc(rpc: str) -> Iterator[str]:
    """Addresses of two devices, RPC0 and RPC1."""
    with rpc_server.running(models.lib_dir()) as (endpoint, _):
        yield f"{rpc},{endpoint}"


def _run(model: Path, two_rpc: str, overrides: dict[str, Override], gpu_layers: int = 0) -> Result:
    return on_rpc.run(model, two_rpc, {"hobbit.device": "RPC0,RPC1"} | overrides, gpu_layers)


@pytest.mark.parametrize(
    ("share", "mode", "gpu_layers"),
    [(1.0, "gpu", 0), (0.0, "gpu", 99), (0.0, "gpu", 3), (0.0, "auto", 0), (1.0, "auto", 99)],
)
def test_two_devices_compute_what_the_cpu_does(
    tiny_gguf: Path, two_rpc: str, on_cpu: Result, share: float, mode: str, gpu_layers: int
) -> None:
    info = on_cpu.info
    smallest = 2 * info["n_experts_used"] * info["pool_bytes_high"] / info["pool_slots_high"]
    overrides: dict[str, Override] = {"hobbit.mode": mode}
    overrides["hobbit.pools"] = int(max(share * info["tier_bytes_high"], smallest) * 1.05)
    result = _run(tiny_gguf, two_rpc, overrides, gpu_layers)
    on_rpc.assert_same(result, on_cpu)
    assert (result.info["pool_slots_high"] == info["n_layers"] * info["n_experts"]) == (share == 1)
    assert [device["name"] for device in result.devices] == ["RPC0", "RPC1"]
    assert sum(device["n_layers"] for device in result.devices) == info["n_layers"]
    for what, total in (
        ("bytes_transferred", result.stats["bytes_transferred"]),
        ("pool_bytes_high", result.info["pool_bytes_high"]),
    ):
        assert all(device[what] > 0 for device in result.devices)
        assert sum(device[what] for device in result.devices) == total
    assert (result.stats["selections_cpu"] > 0) == (mode == "auto")


def test_two_devices_are_prefetched_to(tiny_gguf: Path, two_rpc: str, on_cpu: Result) -> None:
    pools = on_cpu.info["tier_bytes_high"] // 2
    result = _run(tiny_gguf, two_rpc, {"hobbit.pools": pools, "hobbit.prefetch": 2})
    on_rpc.assert_same(result, on_cpu)
    assert result.stats["prefetched_used"] > 0


@pytest.mark.parametrize("gpu_layers", [0, 99])
def test_two_devices_compute_in_low_precision_too(tiny_gguf: Path, two_rpc: str, gpu_layers: int) -> None:
    overrides: dict[str, Override] = {"hobbit.t1": 0.5, "hobbit.t2": 0.9, "hobbit.strict": True}
    overrides["hobbit.pools"] = 8 << 20
    result = _run(tiny_gguf, two_rpc, overrides, gpu_layers)
    assert result.stats["selections_low"] > 0
    assert result.stats["selections_skipped"] > 0
    assert all(device["pool_slots_low"] > 0 for device in result.devices)
    on_rpc.assert_same(result, logits.run(models.lib_dir(), tiny_gguf, SHORT_PLANS, overrides))


@pytest.mark.parametrize("gpu_layers", [0, 99])
def test_two_devices_add_the_biases_of_their_experts(two_rpc: str, gpu_layers: int) -> None:
    model = models.random_model("gpt-oss")
    overrides: dict[str, Override] = {"hobbit.pools": 4 << 20}
    cpu = logits.run(models.lib_dir(), model, SHORT_PLANS, overrides)
    on_rpc.assert_same(_run(model, two_rpc, overrides | {"hobbit.mode": "gpu"}, gpu_layers), cpu)


def test_the_memory_of_two_devices_has_one_bound(tiny_gguf: Path, two_rpc: str, on_cpu: Result) -> None:
    with pytest.raises(RunError, match=r"device memory of 1\.0 KiB is too small") as refused:
        _run(tiny_gguf, two_rpc, {"hobbit.device_memory": 1024})
    least = int(str(refused.value).split("the smallest that works is ")[1].split(" MiB")[0]) << 20
    result = _run(tiny_gguf, two_rpc, {"hobbit.device_memory": least})
    assert result.info["pool_slots_high"] < on_cpu.info["pool_slots_high"]
    on_rpc.assert_same(result, on_cpu)


def test_chat_and_the_server_take_two_devices(
    tiny_gguf: Path, two_rpc: str, run_pyhobbit: RunPyhobbit, tmp_path: Path
) -> None:
    devices = ("--rpc", two_rpc, "--device", "RPC0,RPC1", "--device-memory", "64M")
    done = run_pyhobbit("chat", tiny_gguf, *on_rpc.CHAT, *devices, "--stats-json", tmp_path / "s.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout == run_pyhobbit("chat", tiny_gguf, *on_rpc.CHAT, "--pools", "8M").stdout
    assert json.loads((tmp_path / "s.json").read_text())["bytes_transferred"] > 0
    with servers.serving(tiny_gguf, tmp_path / "devices.log", *devices) as on_devices:
        text = on_devices.complete()
    with servers.serving(tiny_gguf, tmp_path / "cpu.log", "--pools", "8M") as on_cpu:
        assert text == on_cpu.complete()


def test_inspect_says_what_each_device_has(tiny_gguf: Path, two_rpc: str, run_pyhobbit: RunPyhobbit) -> None:
    options = ("--rpc", two_rpc, "--device", "RPC0,RPC1", "--pools", "8M", "--ctx", 256, "--no-speed")
    text = run_pyhobbit("inspect", tiny_gguf, *options).stdout
    memory = json.loads(run_pyhobbit("inspect", tiny_gguf, *options, "--json").stdout)["memory"]
    assert [device["name"] for device in memory["devices"]] == ["RPC0", "RPC1"]
    for device in memory["devices"]:
        n_layers, slots = device["n_layers"], device["pool_slots_high"]
        assert slots > 0
        what = f"{n_layers} of 6 layers with experts, {slots} of their {8 * n_layers} experts in "
        assert re.search(f"^{device['name']} +{what}", text, re.MULTILINE)
    assert sum(device["pool_bytes_high"] for device in memory["devices"]) == memory["info"]["pool_bytes_high"]
