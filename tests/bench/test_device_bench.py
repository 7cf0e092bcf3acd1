# SPDX-License-Identifier: MIT
"""bench.compare on a device: that every arm runs on a device and the output is complete, not how fast.

The device is the CPU behind ggml's RPC server, which computes as the CPU does, bit for bit.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench_jobs
import models
import numpy as np
import pytest

from bench.harness.files import SHAPES, write_model

N_LAYERS = 4
TINY = SHAPES["tiny"].scaled(N_LAYERS)
OURS = ["ours-gpu", "ours-cooperative", "ours-auto", "ours-twiddler"]
HOBBIT = [
    f"hobbit-{mode}{precision}"
    for mode in ("cooperative-2", *(f"gpu-{n}" for n in range(4)))
    for precision in ("", "-high")
]
LOSSLESS = ["stock", "demand", *OURS, *HOBBIT[1::2]]
STOCK = ["stock", "stock-repacked"]
ARMS = ["demand", "demand-rank", "demand-half", *STOCK, *OURS, "ours-daop", *HOBBIT, "ours-eq2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for models."""
    return tmp_path_factory.mktemp("device")


def _bench(folder: Path, out: Path, rpc: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    given: dict[str, Any] = {
        "--shape": "tiny", "--layers": N_LAYERS, "--type": "q8_0", "--folder": folder, "--output": out,
        "--stock": models.stock_dir(), "--device": "RPC0", "--rpc": rpc,
    }  # fmt: skip
    given |= {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    words = [word for name, value in given.items() for word in (name, *np.atleast_1d(value))]
    return subprocess.run(
        [sys.executable, "-m", "bench.compare", *map(str, words)],
        capture_output=True, text=True, timeout=1800, cwd=models.ROOT,
    )  # fmt: skip


def test_a_small_bench_runs_every_arm(folder: Path, tmp_path: Path, rpc: str) -> None:
    given: dict[str, Any] = {"low": "q2_k", "limits": 0.3, "reps": 1, "tokens": 4, "warm_up": 2}
    done = _bench(folder, tmp_path / "out", rpc, prompts=[4, 12], **given)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    head, results = lines[0], {line["arm"]: line for line in lines[1:]}
    assert head["device"]["name"] == "RPC0"
    assert f"name: RPC0, description: {head['device']['description']}, " in done.stdout
    assert head["n_cpu_moe"] == {"30%": 3}
    assert [line["arm"] for line in lines[1:]] == ARMS
    for result in results.values():
        assert result["n_decoded"] == 4
        assert set(result["ttft_s"]) == {"4", "12"}
        assert result["tokens_per_second"] > 0
    assert len({results[arm]["logits_crc"] for arm in LOSSLESS}) == 1
    for arm in ARMS[5:]:
        info, counters = results[arm]["info"], results[arm]["counters"]
        assert 0 < info["pool_bytes_high"] + info["pool_bytes_low"] <= 0.3 * head["expert_bytes"]
        assert counters["hits_high"] + counters["hits_low"] > 0
        if arm in LOSSLESS:
            _check_transfers(counters)
    demand = results["demand"]
    assert demand["info"]["pool_slots_high"] == TINY.n_used
    assert demand["hit_rate"] == 0
    _check_transfers(demand["counters"])
    assert demand["counters"]["bytes_transferred"] > 0
    assert results["ours-gpu"]["counters"]["selections_cpu"] == 0
    assert results["ours-cooperative"]["counters"]["selections_cpu"] > 0
    assert results["ours-eq2"]["counters"]["selections_low"] > 0
    assert "| 30%: 3 " in done.stdout
    assert done.stdout.rstrip("\n") == (tmp_path / "out/table.md").read_text().rstrip("\n")
    assert all(f"| {arm} " in done.stdout for arm in ARMS)


def test_daop_approximates_where_the_model_routes_by_itself(folder: Path, tmp_path: Path, rpc: str) -> None:
    given: dict[str, Any] = {"limits": 0.3, "reps": 1, "prompts": 4, "tokens": 8, "warm_up": 2}
    given |= {"arms": "ours-daop", "layers": 6}
    done = _bench(folder, tmp_path / "out", rpc, **given)
    assert done.returncode == 0, done.stderr
    *_, line = (tmp_path / "out/results.jsonl").read_text().splitlines()
    counters = json.loads(line)["counters"]
    assert counters["selections_replaced"] > 0
    assert counters["selections_early"] > 0


def test_twiddlers_profile_is_of_tokens_that_are_not_measured(folder: Path, tmp_path: Path, rpc: str) -> None:
    """The model routes by itself."""
    given = {"limits": 0.5, "reps": 1, "prompts": 4, "tokens": 8, "warm_up": 2, "arms": "ours-twiddler"}
    done = _bench(folder, tmp_path / "out", rpc, **given)
    assert done.returncode == 0, done.stderr
    *_, line = (tmp_path / "out/results.jsonl").read_text().splitlines()
    counters = json.loads(line)["counters"]
    assert counters["predicted"] == 0
    hits = counters["hits_high"] / (counters["hits_high"] + counters["misses_high"])
    assert hits > 0.8  # 0.95, by chance 0.5, and 0.01 with the experts that the profile uses least
    assert f"| {counters['bytes_transferred'] / 8e6:.1f} " in done.stdout.splitlines()[-1]


def _check_transfers(counters: dict[str, float]) -> None:
    """Everything was in host memory."""
    assert counters["bytes_read"] == 0
    for tier in ("high", "low"):
        assert counters[f"host_hits_{tier}"] == counters[f"misses_{tier}"]


def test_stock_keeps_the_experts_of_as_many_layers_in_host_memory_as_told(folder: Path, rpc: str) -> None:
    model = write_model(folder, "tiny", TINY, "q8_0")
    stock = {"lib_dir": str(models.stock_dir()), "device": "RPC0", "rpc": rpc}
    peaks = [bench_jobs.measure(model, **stock, n_cpu_moe=n).peak_rss_bytes for n in (3, 1)]
    one_layer = models.routed_expert_bytes(model) / N_LAYERS
    assert abs(peaks[0] - peaks[1] - 2 * one_layer) < one_layer / 2


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ({"device": "CUDA7"}, 1, "has no device 'CUDA7': choose one of CPU, RPC0"),
        ({"device": "CPU"}, 1, "the device 'CPU' computes in host memory; name one with memory of its own"),
        ({"limits": [0.5, 0.2]}, 2, "those of one layer take 25.5 MiB; give at least 0.25"),
        ({"arms": "ours"}, 2, "unknown arm 'ours'; choose one of stock, stock-repacked, demand"),
    ],
)
def test_what_cannot_be_is_one_sentence_before_anything_runs(
    options: dict[str, Any], status: int, message: str, folder: Path, tmp_path: Path, rpc: str
) -> None:
    done = _bench(folder, tmp_path / "out", rpc, **options)
    assert done.returncode == status
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()
