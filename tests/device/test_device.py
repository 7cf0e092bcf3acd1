# SPDX-License-Identifier: MIT
"""Pools on a device with memory of its own (on_rpc.py)."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import hobbits
import logits
import models
import on_rpc
import pytest
import servers
from conftest import RunPyhobbit
from exactness import SHORT_PLANS
from logits import Override, Result, RunError

from pyhobbit.engine.beams import best_continuations
from pyhobbit.quality.stored import Calibration


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_the_logits_are_the_cpus_with_pools_of_any_size(
    tiny_gguf: Path, rpc: str, on_cpu: Result, share: float
) -> None:
    info = on_cpu.info
    smallest = info["n_experts_used"] * info["pool_bytes_high"] / info["pool_slots_high"]
    pools = int(max(share * info["tier_bytes_high"], smallest) * 1.05)
    result = on_rpc.run(tiny_gguf, rpc, {"hobbit.pools": pools})
    assert (result.info["pool_slots_high"] == info["n_layers"] * info["n_experts"]) == (share == 1)
    assert result.stats["bytes_read"] > 0
    on_rpc.assert_same(result, on_cpu)


@pytest.mark.parametrize("room", [None, 8 << 20])
def test_host_memory_stands_between_the_device_and_the_disk(
    tiny_gguf: Path, rpc: str, on_cpu: Result, room: int | None
) -> None:
    slot = on_cpu.info["pool_bytes_high"] // on_cpu.info["pool_slots_high"]
    n_all = on_cpu.info["n_layers"] * on_cpu.info["n_experts"]
    overrides: dict[str, Override] = {"hobbit.mode": "gpu", "hobbit.prefetch": 0}
    overrides["hobbit.pools"] = (on_cpu.info["n_experts_used"] + 1) * slot
    if room is not None:
        overrides["hobbit.memory"] = _least_budget(tiny_gguf, rpc) + room
    result = on_rpc.run(tiny_gguf, rpc, overrides)
    on_rpc.assert_same(result, on_cpu)
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


def test_a_start_finds_on_the_device_what_a_calibration_used(
    tiny_gguf: Path, rpc: str, on_cpu: Result, tmp_path: Path
) -> None:
    model = tmp_path / "tiny.gguf"
    model.symlink_to(tiny_gguf)
    n_all = on_cpu.info["n_layers"] * on_cpu.info["n_experts"]
    uses, size = (1,) * n_all, tiny_gguf.stat().st_size
    low_bytes = int(on_cpu.info["tier_bytes_low"])
    Calibration(size, low_bytes, {}, expert_uses=uses).write(model)
    result = on_rpc.run(model, rpc, {"hobbit.pools": 64 << 20})
    assert result.stats["misses_high"] == 0  # though the first token came at once
    assert result.stats["bytes_transferred"] > 0
    on_rpc.assert_same(result, on_cpu)


@pytest.mark.parametrize("mode", ["gpu", "cooperative"])
def test_one_batch_waits_once_where_llama_cpp_computes_on_the_device_too(
    tiny_gguf: Path, rpc: str, on_cpu: Result, mode: str
) -> None:
    settings: dict[str, Override] = {"hobbit.pools": 4 << 20, "hobbit.mode": mode}
    result = on_rpc.run(tiny_gguf, rpc, settings, gpu_layers=99)
    on_rpc.assert_same(result, on_cpu)
    n_batches = sum(len(plan.batches) + plan.greedy for plan in SHORT_PLANS.values())
    n_layers = n_batches * result.info["n_layers"]
    assert result.stats["device_waits"] == n_batches < n_layers / 2
    assert result.stats["device_reads"] >= n_layers > 2 * n_batches
    assert result.stats["misses_high"] > 0


def _least_budget(model: Path, rpc: str) -> int:
    with pytest.raises(RunError, match=r"memory budget of 1\.0 MiB is too small") as refused:
        on_rpc.run(model, rpc, {"hobbit.memory": 1 << 20})
    return int(str(refused.value).split("the smallest that works is ")[1].split(" MiB")[0]) << 20


@pytest.mark.parametrize("mode", ["gpu", "cooperative", "auto", "twiddler"])
def test_the_logits_are_the_same_whoever_computes_what_is_missing(
    tiny_gguf: Path, rpc: str, on_cpu: Result, mode: str
) -> None:
    slot = on_cpu.info["pool_bytes_high"] // on_cpu.info["pool_slots_high"]
    pools = (on_cpu.info["n_experts_used"] + 1) * slot
    result = on_rpc.run(tiny_gguf, rpc, {"hobbit.pools": pools, "hobbit.mode": mode})
    on_rpc.assert_same(result, on_cpu)
    stats = result.stats
    assert stats["misses_high"] > stats["hits_high"]
    assert (stats["selections_cpu"] > 0) == (stats["cpu_s"] > 0) == (mode != "gpu")
    if mode == "cooperative":
        assert stats["selections_cpu"] > stats["selections_high"] / 4  # the prompt is left to the device
    assert stats["transfer_s"] > 0


@pytest.mark.parametrize("mode", ["gpu", "cooperative", "auto"])
def test_beam_search_finds_the_same(tiny_gguf: Path, rpc: str, mode: str) -> None:
    beams = {"beams": replace(logits.one_at_a_time([1, 38, 75, 112]), greedy=16, beams=4)}
    settings: dict[str, Override] = {"hobbit.device": "RPC0", "hobbit.mode": mode, "hobbit.pools": 4 << 20}
    result = logits.run(models.lib_dir(), tiny_gguf, beams, settings, rpc=rpc)
    on_rpc.assert_same(result, logits.run(models.stock_dir(), models.tiny(), beams))
    rows = result.logits["beams"]
    assert len(rows) == 4 + 16 * 4
    best = best_continuations([0.0], rows[3:4], 4)
    forks = 0
    for step in range(15):
        last = rows[4 + 4 * step :][:4]
        best = best_continuations([score for _, _, score in best], last, 4)
        forks += [parent for parent, _, _ in best] != [0, 1, 2, 3]
    assert forks > 0
    stats = result.stats
    assert stats["selections_high"] > stats["hits_high"] + stats["misses_high"]  # tokens share experts
    assert (stats["selections_cpu"] > 0) == (mode != "gpu")


@pytest.mark.parametrize("mode", ["cooperative", "auto"])
def test_the_cpu_has_a_share_beside_prefetch(tiny_gguf: Path, rpc: str, on_cpu: Result, mode: str) -> None:
    pools = on_cpu.info["tier_bytes_high"] // 2
    result = on_rpc.run(tiny_gguf, rpc, {"hobbit.pools": pools, "hobbit.mode": mode, "hobbit.prefetch": 2})
    on_rpc.assert_same(result, on_cpu)
    assert result.stats["prefetched_used"] > 0
    assert result.stats["selections_cpu"] > 0


def test_the_cpu_computes_in_low_precision_too(tiny_gguf: Path, rpc: str) -> None:
    overrides: dict[str, Override] = {"hobbit.t1": 0.5, "hobbit.t2": 0.9, "hobbit.strict": True}
    overrides["hobbit.pools"] = 8 << 20
    result = on_rpc.run(tiny_gguf, rpc, overrides | {"hobbit.mode": "cooperative"})
    assert result.stats["selections_cpu"] > 0
    assert result.stats["selections_low"] > 0
    assert result.stats["selections_skipped"] > 0
    on_rpc.assert_same(result, logits.run(models.lib_dir(), tiny_gguf, SHORT_PLANS, overrides))


@pytest.mark.parametrize("gpu_layers", [0, 99])
def test_experts_with_biases_are_shared_too(rpc: str, gpu_layers: int) -> None:
    model = models.random_model("gpt-oss")
    overrides: dict[str, Override] = {"hobbit.pools": 4 << 20}
    cpu = logits.run(models.lib_dir(), model, SHORT_PLANS, overrides)
    result = on_rpc.run(model, rpc, overrides | {"hobbit.mode": "cooperative"}, gpu_layers=gpu_layers)
    assert result.stats["selections_cpu"] > 0
    on_rpc.assert_same(result, cpu)


@pytest.mark.parametrize("mode", ["gpu", "cooperative"])
def test_skipped_experts_add_no_bias(rpc: str, mode: str) -> None:
    model = models.random_model("gpt-oss")
    overrides: dict[str, Override] = {"hobbit.pools": 4 << 20, "hobbit.strict": True}
    overrides |= {"hobbit.t1": 0.5, "hobbit.t2": 0.5}
    cpu = logits.run(models.lib_dir(), model, SHORT_PLANS, overrides)
    result = on_rpc.run(model, rpc, overrides | {"hobbit.mode": mode})
    assert result.stats["selections_skipped"] > 0
    on_rpc.assert_same(result, cpu)


@pytest.mark.parametrize("gpu_layers", [0, 99])
@pytest.mark.parametrize("mode", ["gpu", "cooperative", "auto", "twiddler"])
def test_experts_with_scales_are_the_devices_alone(rpc: str, mode: str, gpu_layers: int) -> None:
    model = models.random_model("llama-scaled")
    settings: dict[str, Override] = {"hobbit.pools": 4 << 20, "hobbit.mode": mode}
    result = on_rpc.run(model, rpc, settings, gpu_layers=gpu_layers)
    on_rpc.assert_same(result, logits.run(models.stock_dir(), model, SHORT_PLANS))
    assert result.stats["misses_high"] > 0
    assert result.stats["selections_cpu"] == 0
    said = result.log.count("the device computes some experts alone: this model has operations")
    assert said == (0 if mode == "gpu" else 1)


def test_low_precision_of_experts_with_scales(rpc: str, tmp_path: Path) -> None:
    """In both tiers, since the scales belong to the expert."""
    model = tmp_path / "scaled.gguf"
    shutil.copyfile(models.random_model("llama-scaled", "f16"), model)
    models.convert("--low", "q8_0", "--sidecar", model)
    settings: dict[str, Override] = {"hobbit.pools": 4 << 20, "hobbit.strict": True}
    settings |= {"hobbit.t1": 0.5, "hobbit.t2": 0.8}
    result = on_rpc.run(model, rpc, settings | {"hobbit.mode": "cooperative"})
    assert result.stats["selections_low"] > 0
    assert result.stats["selections_skipped"] > 0
    on_rpc.assert_same(result, logits.run(models.lib_dir(), model, SHORT_PLANS, settings))


def test_the_other_layers_may_be_on_the_device_too(tiny_gguf: Path, rpc: str, on_cpu: Result) -> None:
    on_rpc.assert_same(on_rpc.run(tiny_gguf, rpc, {"hobbit.pools": 4 << 20}, gpu_layers=99), on_cpu)


@pytest.mark.parametrize("gpu_layers", [0, 3, 99])
def test_the_experts_are_where_the_other_layers_are(
    tiny_gguf: Path, rpc: str, on_cpu: Result, gpu_layers: int
) -> None:
    pools: dict[str, Override] = {"hobbit.pools": 4 << 20}
    result = logits.run(models.lib_dir(), tiny_gguf, SHORT_PLANS, pools, gpu_layers=gpu_layers, rpc=rpc)
    assert [device["name"] for device in result.devices] == (["RPC0"] if gpu_layers else ["CPU"])
    assert (result.stats["bytes_transferred"] > 0) == (gpu_layers > 0)
    on_rpc.assert_same(result, on_cpu)


def test_low_precision_and_skipping(tiny_gguf: Path, rpc: str) -> None:
    overrides: dict[str, Override] = {"hobbit.t1": 0.5, "hobbit.t2": 0.9, "hobbit.strict": True}
    overrides["hobbit.pools"] = 8 << 20
    result = on_rpc.run(tiny_gguf, rpc, overrides)
    assert result.stats["selections_low"] > 0
    assert result.stats["selections_skipped"] > 0
    on_rpc.assert_same(result, logits.run(models.lib_dir(), tiny_gguf, SHORT_PLANS, overrides))


def test_chat_with_the_device_of_a_server_writes_the_same(
    tiny_gguf: Path, rpc: str, run_pyhobbit: RunPyhobbit, tmp_path: Path
) -> None:
    device = (
        "--rpc",
        rpc,
        "--device",
        "RPC0",
        "--device-memory",
        "16M",
        "--stats-json",
        tmp_path / "s.json",
    )
    done = run_pyhobbit("chat", tiny_gguf, *on_rpc.CHAT, *device)
    assert done.returncode == 0, done.stderr
    assert done.stdout == run_pyhobbit("chat", tiny_gguf, *on_rpc.CHAT, "--pools", "8M").stdout
    stats = json.loads((tmp_path / "s.json").read_text())
    assert stats["on_device"]
    assert stats["host_slots_high"] > 0
    assert stats["bytes_transferred"] > 0
    assert "uploaded" in done.stderr
    assert re.search(r"^pyhobbit: GPU: RPC0 \(.+\), with the experts$", done.stderr, re.MULTILINE)


def test_the_server_counts_what_was_found_where(tiny_gguf: Path, rpc: str, tmp_path: Path) -> None:
    device = ("--rpc", rpc, "--device", "RPC0", "--pools", "8M")
    with servers.serving(tiny_gguf, tmp_path / "device.log", *device) as on_device:
        text = on_device.complete()
        cache, metrics = on_device.cache(), on_device.request("/metrics").text
        while cache != on_device.cache():  # an upload in the background was counted in between
            cache, metrics = on_device.cache(), on_device.request("/metrics").text
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
    }.items():
        value = re.search(f"^hobbit_{metric}_total (.*)$", metrics, re.MULTILINE)
        assert value, metric
        assert float(value[1]) == pytest.approx(cache[key]), metric
    assert cache["transfer_s"] > 0


_OPEN = """
import sys
from pathlib import Path
from pyhobbit import Hobbit
from pyhobbit.native.rpc_servers import add_rpc_servers
add_rpc_servers(sys.argv[2])
for n in 0, 3, -1:
    with Hobbit(Path(sys.argv[1]), pools=8 << 20, n_gpu_layers=n, verbose=False) as model:
        model.create_completion("def", max_tokens=2)
        stats = model.stats()
        print(n, stats.info.on_device, stats.cache.bytes_transferred > 0)
"""


def test_from_python_the_experts_are_where_n_gpu_layers_says(tiny_gguf: Path, rpc: str) -> None:
    assert hobbits.run_script(_OPEN, tiny_gguf, rpc) == "0 False False\n3 True True\n-1 True True\n"


def test_config_names_the_cpu_where_it_has_all_layers(tiny_gguf: Path, run_pyhobbit: RunPyhobbit) -> None:
    document = json.loads(run_pyhobbit("config", tiny_gguf, "--pools", "8M", "--json").stdout)
    row = {row["name"]: row for row in document["settings"]}["device"]
    assert (row["value"], row["source"]) == ("CPU", "computed")


def test_inspect_shows_what_an_expert_takes(tiny_gguf: Path, rpc: str, run_pyhobbit: RunPyhobbit) -> None:
    options = ("--rpc", rpc, "--device", "RPC0", "--set", "mode=twiddler", "--pools", "8M", "--ctx", 256)
    done = run_pyhobbit("inspect", tiny_gguf, *options)
    assert done.returncode == 0, done.stderr
    times = r"CPU [0-9.]+ ms, GPU [0-9.]+ ms, upload [0-9.]+ ms"
    assert re.search(rf"one expert +of [0-9.]+ [KM]iB for 1 token: {times}", done.stdout), done.stdout


@pytest.mark.parametrize(("device", "source"), [(("--device", "RPC0"), "flag"), ((), "computed")])
def test_inspect_and_config_say_what_lies_where(
    tiny_gguf: Path, rpc: str, run_pyhobbit: RunPyhobbit, device: tuple[str, ...], source: str
) -> None:
    options = ("--rpc", rpc, *device, "--pools", "8M", "--ctx", 256)
    text = run_pyhobbit("inspect", tiny_gguf, *options, "--no-speed").stdout
    assert "RPC0 has the pools in its memory and computes the experts" in text
    assert re.search(r"^GPU +RPC0 \(.+\), with the experts$", text, re.MULTILINE)
    memory = json.loads(run_pyhobbit("inspect", tiny_gguf, *options, "--no-speed", "--json").stdout)["memory"]
    assert memory["device"] == "RPC0"
    info = memory["info"]
    assert 0 < info["pool_bytes_high"] <= 8 << 20
    assert info["pool_slots_high"] < info["host_slots_high"]
    done = run_pyhobbit("config", tiny_gguf, *options, "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["settings"]}
    assert (rows["device"]["value"], rows["device"]["source"]) == ("RPC0", source)
