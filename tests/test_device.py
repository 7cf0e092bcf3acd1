# SPDX-License-Identifier: MIT
"""Pools on a device with memory of its own, and on several.

The CPU behind ggml's RPC server computes as the CPU does, bit for bit.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hobbits
import logits
import lost_server
import models
import numpy as np
import pytest
import rpc_server
import servers
from conftest import RunPyhobbit
from exactness import SHORT_PLANS
from logits import Override, Result, RunError


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Of a device, at this endpoint."""
    with rpc_server.running(models.lib_dir()) as (endpoint, _):
        yield endpoint


@pytest.fixture(scope="module")
def servers_of_two(server: str) -> Iterator[str]:
    """Of two devices, RPC0 and RPC1."""
    with rpc_server.running(models.lib_dir()) as (endpoint, _):
        yield f"{server},{endpoint}"


@pytest.fixture(scope="module")
def on_cpu(tiny_gguf: Path) -> Result:
    return logits.run(models.lib_dir(), tiny_gguf, SHORT_PLANS, {"hobbit.pools": 64 << 20})


def _on_rpc(model: Path, server: str, overrides: dict[str, Override], gpu_layers: int = 0) -> Result:
    overrides = {"hobbit.device": "RPC0"} | overrides
    return logits.run(models.lib_dir(), model, SHORT_PLANS, overrides, gpu_layers=gpu_layers, rpc=server)


def _on_both(model: Path, servers_of_two: str, overrides: dict[str, Override], gpu_layers: int = 0) -> Result:
    return _on_rpc(model, servers_of_two, {"hobbit.device": "RPC0,RPC1"} | overrides, gpu_layers)


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


@pytest.mark.parametrize("room", [None, 8 << 20])
def test_host_memory_stands_between_the_device_and_the_disk(
    tiny_gguf: Path, server: str, on_cpu: Result, room: int | None
) -> None:
    slot = on_cpu.info["pool_bytes_high"] // on_cpu.info["pool_slots_high"]
    n_all = on_cpu.info["n_layers"] * on_cpu.info["n_experts"]
    overrides: dict[str, Override] = {"hobbit.mode": "gpu", "hobbit.prefetch": 0}
    overrides["hobbit.pools"] = (on_cpu.info["n_experts_used"] + 1) * slot
    if room is not None:
        overrides["hobbit.memory"] = _least_budget(tiny_gguf, server) + room
    result = _on_rpc(tiny_gguf, server, overrides)
    _assert_same(result, on_cpu)
    stats = result.stats
    n_read = stats["misses_high"] - stats["host_hits_high"]
    if room is None:
        assert result.info["host_slots_high"] == n_all
        assert stats["bytes_read"] <= n_read * slot
        assert n_read <= n_all
    else:
        assert 0 < result.info["host_slots_high"] < n_all
    assert 0 < stats["host_hits_high"] < stats["misses_high"]
    assert stats["bytes_transferred"] > stats["bytes_read"] > 0


def _least_budget(model: Path, server: str) -> int:
    with pytest.raises(RunError, match=r"memory budget of 1\.0 MiB is too small") as refused:
        _on_rpc(model, server, {"hobbit.memory": 1 << 20})
    return int(str(refused.value).split("the smallest that works is ")[1].split(" MiB")[0]) << 20


@pytest.mark.parametrize("mode", ["gpu", "cooperative", "auto"])
def test_the_logits_are_the_same_whoever_computes_what_is_missing(
    tiny_gguf: Path, server: str, on_cpu: Result, mode: str
) -> None:
    slot = on_cpu.info["pool_bytes_high"] // on_cpu.info["pool_slots_high"]
    pools = (on_cpu.info["n_experts_used"] + 1) * slot
    result = _on_rpc(tiny_gguf, server, {"hobbit.pools": pools, "hobbit.mode": mode})
    _assert_same(result, on_cpu)
    stats = result.stats
    assert stats["misses_high"] > stats["hits_high"]
    assert (stats["selections_cpu"] > 0) == (stats["cpu_s"] > 0) == (mode != "gpu")
    if mode == "cooperative":
        assert stats["selections_cpu"] > stats["selections_high"] / 2
    assert 0 < stats["layers_predicted"] <= stats["layers_computed"]
    assert stats["predicted_s"] > 0
    assert stats["measured_s"] > 0
    assert stats["transfer_s"] > 0


@pytest.mark.parametrize("mode", ["gpu", "cooperative", "auto"])
def test_beam_search_finds_the_same(tiny_gguf: Path, server: str, mode: str) -> None:
    beams = {"beams": replace(logits.one_at_a_time([1, 38, 75, 112]), greedy=16, beams=4)}
    settings: dict[str, Override] = {"hobbit.device": "RPC0", "hobbit.mode": mode, "hobbit.pools": 4 << 20}
    result = logits.run(models.lib_dir(), tiny_gguf, beams, settings, rpc=server)
    _assert_same(result, logits.run(models.stock_dir(), models.tiny(), beams))
    rows = result.logits["beams"]
    assert len(rows) == 4 + 16 * 4
    _, _, scores = logits.best_continuations(np.zeros(1), rows[3:4], 4)
    forks = 0
    for step in range(15):
        last = rows[4 + 4 * step :][:4]
        parents, _, scores = logits.best_continuations(scores, last, 4)
        forks += parents.tolist() != [0, 1, 2, 3]
    assert forks > 0
    stats = result.stats
    assert stats["selections_high"] > stats["hits_high"] + stats["misses_high"]  # tokens share experts
    assert (stats["selections_cpu"] > 0) == (mode != "gpu")


@pytest.mark.parametrize("mode", ["cooperative", "auto"])
def test_the_cpu_has_a_share_beside_prefetch(tiny_gguf: Path, server: str, on_cpu: Result, mode: str) -> None:
    pools = on_cpu.info["tier_bytes_high"] // 2
    result = _on_rpc(tiny_gguf, server, {"hobbit.pools": pools, "hobbit.mode": mode, "hobbit.prefetch": 2})
    _assert_same(result, on_cpu)
    assert result.stats["prefetched_used"] > 0
    assert result.stats["selections_cpu"] > 0


def test_the_cpu_computes_in_low_precision_too(tiny_gguf: Path, server: str) -> None:
    overrides: dict[str, Override] = {"hobbit.t1": 0.5, "hobbit.t2": 0.9, "hobbit.strict": True}
    overrides["hobbit.pools"] = 8 << 20
    result = _on_rpc(tiny_gguf, server, overrides | {"hobbit.mode": "cooperative"})
    assert result.stats["selections_cpu"] > 0
    assert result.stats["selections_low"] > 0
    assert result.stats["selections_skipped"] > 0
    _assert_same(result, logits.run(models.lib_dir(), tiny_gguf, SHORT_PLANS, overrides))


@pytest.mark.parametrize("gpu_layers", [0, 99])
def test_experts_with_biases_are_shared_too(server: str, gpu_layers: int) -> None:
    model = models.random_model("gpt-oss")
    overrides: dict[str, Override] = {"hobbit.pools": 4 << 20}
    cpu = logits.run(models.lib_dir(), model, SHORT_PLANS, overrides)
    result = _on_rpc(model, server, overrides | {"hobbit.mode": "cooperative"}, gpu_layers=gpu_layers)
    assert result.stats["selections_cpu"] > 0
    _assert_same(result, cpu)


@pytest.mark.parametrize("mode", ["gpu", "cooperative"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_skipped_experts_add_no_bias(server: str, mode: str, renormalize: bool) -> None:
    model = models.random_model("gpt-oss")
    overrides: dict[str, Override] = {"hobbit.pools": 4 << 20, "hobbit.strict": True}
    overrides |= {"hobbit.t1": 0.5, "hobbit.t2": 0.5, "hobbit.renormalize": renormalize}
    cpu = logits.run(models.lib_dir(), model, SHORT_PLANS, overrides)
    result = _on_rpc(model, server, overrides | {"hobbit.mode": mode})
    assert result.stats["selections_skipped"] > 0
    _assert_same(result, cpu)


def test_the_other_layers_may_be_on_the_device_too(tiny_gguf: Path, server: str, on_cpu: Result) -> None:
    _assert_same(_on_rpc(tiny_gguf, server, {"hobbit.pools": 4 << 20}, gpu_layers=99), on_cpu)


@pytest.mark.parametrize("gpu_layers", [0, 3, 99])
def test_the_experts_are_where_the_other_layers_are(
    tiny_gguf: Path, server: str, on_cpu: Result, gpu_layers: int
) -> None:
    pools: dict[str, Override] = {"hobbit.pools": 4 << 20}
    result = logits.run(models.lib_dir(), tiny_gguf, SHORT_PLANS, pools, gpu_layers=gpu_layers, rpc=server)
    assert [device["name"] for device in result.devices] == (["RPC0"] if gpu_layers else ["CPU"])
    assert (result.stats["bytes_transferred"] > 0) == (gpu_layers > 0)
    _assert_same(result, on_cpu)


def test_low_precision_and_skipping(tiny_gguf: Path, server: str) -> None:
    overrides: dict[str, Override] = {"hobbit.t1": 0.5, "hobbit.t2": 0.9, "hobbit.strict": True}
    overrides["hobbit.pools"] = 8 << 20
    result = _on_rpc(tiny_gguf, server, overrides)
    assert result.stats["selections_low"] > 0
    assert result.stats["selections_skipped"] > 0
    _assert_same(result, logits.run(models.lib_dir(), tiny_gguf, SHORT_PLANS, overrides))


def test_too_little_device_memory_is_an_error_that_names_the_least(tiny_gguf: Path, server: str) -> None:
    with pytest.raises(
        RunError, match=r"device memory of 1\.0 KiB is too small: the smallest that works is \d+ MiB"
    ):
        _on_rpc(tiny_gguf, server, {"hobbit.device_memory": 1024})


CHAT = ("-p", "def read", "-n", 12, "--temp", 0, "--ctx", 256)


def test_chat_with_the_device_of_a_server_writes_the_same(
    tiny_gguf: Path, server: str, run_pyhobbit: RunPyhobbit, tmp_path: Path
) -> None:
    device = (
        "--rpc",
        server,
        "--device",
        "RPC0",
        "--device-memory",
        "16M",
        "--stats-json",
        tmp_path / "s.json",
    )
    done = run_pyhobbit("chat", tiny_gguf, *CHAT, *device)
    assert done.returncode == 0, done.stderr
    assert done.stdout == run_pyhobbit("chat", tiny_gguf, *CHAT, "--pools", "8M").stdout
    stats = json.loads((tmp_path / "s.json").read_text())
    assert stats["on_device"]
    assert stats["host_slots_high"] > 0
    assert stats["bytes_transferred"] > 0
    assert "to the device" in done.stderr


def test_the_server_counts_what_was_found_where(tiny_gguf: Path, server: str, tmp_path: Path) -> None:
    device = ("--rpc", server, "--device", "RPC0", "--pools", "8M")
    with servers.serving(tiny_gguf, tmp_path / "device.log", *device) as on_device:
        text = on_device.complete()
        cache = on_device.cache()
        metrics = on_device.request("/metrics").text
    with servers.serving(tiny_gguf, tmp_path / "cpu.log", "--pools", "8M") as on_cpu:
        assert text == on_cpu.complete()
        assert on_cpu.cache()["host_slots_high"] == 0
    assert cache["host_slots_high"] > cache["pool_slots_high"] > 0
    assert 0 < cache["host_hits_high"] < cache["misses_high"]
    for key, metric in {
        "bytes_transferred": "transferred_bytes",
        "transfer_s": "transfer_seconds",
        "selections_cpu": "cpu_selections",
        "cpu_s": "cpu_seconds",
        "layers_predicted": "predicted_layers",
        "predicted_s": "predicted_seconds",
        "measured_s": "measured_seconds",
    }.items():
        value = re.search(f"^hobbit_{metric}_total (.*)$", metrics, re.MULTILINE)
        assert value, metric
        assert float(value[1]) == pytest.approx(cache[key]), metric
    assert min(cache[key] for key in ("transfer_s", "layers_predicted", "predicted_s", "measured_s")) > 0


_OPEN = """
import sys
from pathlib import Path
from pyhobbit import Hobbit
from pyhobbit._devices import add_rpc_servers
add_rpc_servers(sys.argv[2])
for n in 0, 3, -1:
    with Hobbit(Path(sys.argv[1]), pools=8 << 20, n_gpu_layers=n, verbose=False) as model:
        model.create_completion("def", max_tokens=2)
        stats = model.stats()
        print(n, stats.info.on_device, stats.cache.bytes_transferred > 0)
"""


def test_from_python_the_experts_are_where_n_gpu_layers_says(tiny_gguf: Path, server: str) -> None:
    assert hobbits.run_script(_OPEN, tiny_gguf, server) == "0 False False\n3 True True\n-1 True True\n"


def test_config_names_the_cpu_where_it_has_all_layers(tiny_gguf: Path, run_pyhobbit: RunPyhobbit) -> None:
    document = json.loads(run_pyhobbit("config", tiny_gguf, "--pools", "8M", "--json").stdout)
    row = {row["name"]: row for row in document["settings"]}["device"]
    assert (row["value"], row["source"]) == ("CPU", "computed")


@pytest.mark.parametrize(("device", "source"), [(("--device", "RPC0"), "flag"), ((), "computed")])
def test_inspect_and_config_say_what_lies_where(
    tiny_gguf: Path, server: str, run_pyhobbit: RunPyhobbit, device: tuple[str, ...], source: str
) -> None:
    options = ("--rpc", server, *device, "--pools", "8M", "--ctx", 256)
    text = run_pyhobbit("inspect", tiny_gguf, *options, "--no-speed").stdout
    assert "RPC0 has the pools in its memory and computes the experts" in text
    memory = json.loads(run_pyhobbit("inspect", tiny_gguf, *options, "--no-speed", "--json").stdout)["memory"]
    assert memory["device"] == "RPC0"
    info = memory["info"]
    assert 0 < info["pool_bytes_high"] <= 8 << 20
    assert info["pool_slots_high"] < info["host_slots_high"]
    done = run_pyhobbit("config", tiny_gguf, *options, "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["settings"]}
    assert (rows["device"]["value"], rows["device"]["source"]) == ("RPC0", source)
    assert rows["high_pool"]["note"].endswith("on RPC0")
    assert rows["host_cache"]["value"] == info["host_bytes_high"] + info["host_bytes_low"]


def test_a_server_that_does_not_answer_is_an_error(tiny_gguf: Path, run_pyhobbit: RunPyhobbit) -> None:
    for endpoint, why in (("127.0.0.1:1", "no RPC server answers at"), ("host", "is not the address of")):
        done = run_pyhobbit("chat", tiny_gguf, *CHAT, "--rpc", endpoint, "--device", "RPC0")
        assert done.returncode > 0
        assert why in done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("device", ["RPC0", "CPU"])  # experts, or all but them
def test_a_server_that_is_lost_is_an_error(tiny_gguf: Path, device: str) -> None:
    with rpc_server.running(models.lib_dir()) as (endpoint, server):
        _assert_losing_is_an_error(tiny_gguf, server, endpoint, endpoint, device)


@pytest.mark.parametrize("n_requests", [0, 2, 4, 8, 16, 28, 48, 100, 200, 300])
def test_a_server_that_is_lost_while_a_model_is_opened_is_an_error(
    tiny_gguf: Path, server: str, run_pyhobbit: RunPyhobbit, n_requests: int
) -> None:
    with lost_server.lost_after(server, n_requests) as endpoint:
        options = ("--rpc", endpoint, "--device", "RPC0", "--pools", "8M", "--mode", "gpu")
        done = run_pyhobbit("chat", tiny_gguf, *CHAT, *options)
    assert done.returncode == 1, done.stderr
    error = done.stderr.splitlines()[-1]
    assert error.startswith("pyhobbit: error: ")
    assert endpoint in error or "RPC0" in error or "lost or broken" in error


def test_one_of_two_servers_that_is_lost_is_an_error(tiny_gguf: Path, server: str) -> None:
    with rpc_server.running(models.lib_dir()) as (endpoint, second):
        _assert_losing_is_an_error(tiny_gguf, second, endpoint, f"{server},{endpoint}", "RPC0,RPC1")


def _assert_losing_is_an_error(
    model: Path, server: "subprocess.Popen[bytes]", endpoint: str, endpoints: str, device: str
) -> None:
    """endpoint: of the server, among endpoints."""
    options = (*CHAT, "-n", 200, "--pools", "8M", "--device", device)
    command = [sys.executable, "-m", "pyhobbit", "chat", model, "--rpc", endpoints, *map(str, options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as chat:
        assert chat.stdout
        assert chat.stdout.read(1)
        server.kill()
        _, err = chat.communicate(timeout=120)
    assert chat.returncode == 1, err
    error = err.decode().splitlines()[-1]  # behind a note on the model
    # what is told depends on what was under way
    reasons = (
        f"RPC server {endpoint} does not answer",
        "failed to compute experts",
        "is lost or broken",
    )
    assert any(reason in error for reason in reasons), error


#
# several devices
#


@pytest.mark.parametrize(
    ("share", "mode", "gpu_layers"),
    [(1.0, "gpu", 0), (0.0, "gpu", 99), (0.0, "gpu", 3), (0.0, "auto", 0), (1.0, "auto", 99)],
)
def test_two_devices_compute_what_the_cpu_does(
    tiny_gguf: Path, servers_of_two: str, on_cpu: Result, share: float, mode: str, gpu_layers: int
) -> None:
    info = on_cpu.info
    smallest = 2 * info["n_experts_used"] * info["pool_bytes_high"] / info["pool_slots_high"]
    overrides: dict[str, Override] = {"hobbit.mode": mode}
    overrides["hobbit.pools"] = int(max(share * info["tier_bytes_high"], smallest) * 1.05)
    result = _on_both(tiny_gguf, servers_of_two, overrides, gpu_layers)
    _assert_same(result, on_cpu)
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


def test_two_devices_are_prefetched_to(tiny_gguf: Path, servers_of_two: str, on_cpu: Result) -> None:
    pools = on_cpu.info["tier_bytes_high"] // 2
    result = _on_both(tiny_gguf, servers_of_two, {"hobbit.pools": pools, "hobbit.prefetch": 2})
    _assert_same(result, on_cpu)
    assert result.stats["prefetched_used"] > 0


@pytest.mark.parametrize("gpu_layers", [0, 99])
def test_two_devices_compute_in_low_precision_too(
    tiny_gguf: Path, servers_of_two: str, gpu_layers: int
) -> None:
    overrides: dict[str, Override] = {"hobbit.t1": 0.5, "hobbit.t2": 0.9, "hobbit.strict": True}
    overrides["hobbit.pools"] = 8 << 20
    result = _on_both(tiny_gguf, servers_of_two, overrides, gpu_layers)
    assert result.stats["selections_low"] > 0
    assert result.stats["selections_skipped"] > 0
    assert all(device["pool_slots_low"] > 0 for device in result.devices)
    _assert_same(result, logits.run(models.lib_dir(), tiny_gguf, SHORT_PLANS, overrides))


@pytest.mark.parametrize("gpu_layers", [0, 99])
def test_two_devices_add_the_biases_of_their_experts(servers_of_two: str, gpu_layers: int) -> None:
    model = models.random_model("gpt-oss")
    overrides: dict[str, Override] = {"hobbit.pools": 4 << 20}
    cpu = logits.run(models.lib_dir(), model, SHORT_PLANS, overrides)
    _assert_same(_on_both(model, servers_of_two, overrides | {"hobbit.mode": "gpu"}, gpu_layers), cpu)


def test_the_memory_of_two_devices_has_one_bound(
    tiny_gguf: Path, servers_of_two: str, on_cpu: Result
) -> None:
    with pytest.raises(RunError, match=r"device memory of 1\.0 KiB is too small") as refused:
        _on_both(tiny_gguf, servers_of_two, {"hobbit.device_memory": 1024})
    least = int(str(refused.value).split("the smallest that works is ")[1].split(" MiB")[0]) << 20
    result = _on_both(tiny_gguf, servers_of_two, {"hobbit.device_memory": least})
    assert result.info["pool_slots_high"] < on_cpu.info["pool_slots_high"]
    _assert_same(result, on_cpu)


@pytest.mark.parametrize(
    ("device", "why"),
    [
        ("RPC0,CPU", "CPU has no memory of its own, as each of several devices must"),
        ("RPC0,RPC0", "hobbit.device names RPC0 twice"),
        ("RPC0,CUDA7", "there is no device 'CUDA7': choose one of CPU"),
    ],
)
def test_devices_that_cannot_be_together_are_an_error(
    tiny_gguf: Path, server: str, run_pyhobbit: RunPyhobbit, device: str, why: str
) -> None:
    done = run_pyhobbit("chat", tiny_gguf, *CHAT, "--rpc", server, "--device", device)
    assert done.returncode == 1
    assert why in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_chat_and_the_server_take_two_devices(
    tiny_gguf: Path, servers_of_two: str, run_pyhobbit: RunPyhobbit, tmp_path: Path
) -> None:
    devices = ("--rpc", servers_of_two, "--device", "RPC0,RPC1", "--device-memory", "64M")
    done = run_pyhobbit("chat", tiny_gguf, *CHAT, *devices, "--stats-json", tmp_path / "s.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout == run_pyhobbit("chat", tiny_gguf, *CHAT, "--pools", "8M").stdout
    assert json.loads((tmp_path / "s.json").read_text())["bytes_transferred"] > 0
    with servers.serving(tiny_gguf, tmp_path / "devices.log", *devices) as on_devices:
        text = on_devices.complete()
    with servers.serving(tiny_gguf, tmp_path / "cpu.log", "--pools", "8M") as on_cpu:
        assert text == on_cpu.complete()


def test_inspect_says_what_each_device_has(
    tiny_gguf: Path, servers_of_two: str, run_pyhobbit: RunPyhobbit
) -> None:
    options = ("--rpc", servers_of_two, "--device", "RPC0,RPC1", "--pools", "8M", "--ctx", 256, "--no-speed")
    text = run_pyhobbit("inspect", tiny_gguf, *options).stdout
    memory = json.loads(run_pyhobbit("inspect", tiny_gguf, *options, "--json").stdout)["memory"]
    assert [device["name"] for device in memory["devices"]] == ["RPC0", "RPC1"]
    for device in memory["devices"]:
        n_layers, slots = device["n_layers"], device["pool_slots_high"]
        assert slots > 0
        what = f"{n_layers} of 6 layers with experts, {slots} of their {8 * n_layers} experts in "
        assert re.search(f"^{device['name']} +{what}", text, re.MULTILINE)
    assert sum(device["pool_bytes_high"] for device in memory["devices"]) == memory["info"]["pool_bytes_high"]


def test_a_device_that_is_not_there_is_an_error_that_names_those_there_are(
    tiny_gguf: Path, run_pyhobbit: RunPyhobbit
) -> None:
    done = run_pyhobbit("chat", tiny_gguf, "-p", "x", "-n", 1, "--device", "CUDA7")
    assert done.returncode == 1
    assert "there is no device 'CUDA7': choose one of CPU" in done.stderr


def test_device_memory_wants_a_device_that_has_any(tiny_gguf: Path, run_pyhobbit: RunPyhobbit) -> None:
    for command in (("chat", "-p", "x", "-n", 1), ("inspect", "--no-speed")):
        done = run_pyhobbit(command[0], tiny_gguf, *command[1:], "--device-memory", "64M")
        assert done.returncode == 1
        assert "hobbit.device_memory bounds a device that has memory of its own" in done.stderr


def test_a_mode_wants_a_device_that_has_memory_of_its_own(tiny_gguf: Path, run_pyhobbit: RunPyhobbit) -> None:
    done = run_pyhobbit("chat", tiny_gguf, "-p", "x", "-n", 1, "--device", "CPU", "--mode", "cooperative")
    assert done.returncode == 1
    assert "hobbit.mode says who computes beside a device with memory of its own" in done.stderr
