# SPDX-License-Identifier: MIT
"""--memory bounds a process, and little of it lies idle. memory_modes.py measures more ways."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import limits
import memory_modes
import models
import pytest
import random_moe
import rpc_server
from hobbits import run_script
from memory_modes import Peak

from bench.harness.system import NoCgroupError, memory_cgroup

pytestmark = pytest.mark.model

MiB = 1 << 20
BUDGET = 640 * MiB


@pytest.mark.parametrize("mode", ["chat, large vocabulary", "serve, 1 slot", "serve, 4 slots"])
def test_the_peak_is_the_budget(mode: str) -> None:
    found = memory_modes.measure(mode, 320 * MiB)
    assert found.is_right, f"{found.peak / MiB:.1f} of {found.budget / MiB:.0f} MiB"


@pytest.fixture(scope="module")
def big_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A qwen3moe of 2.9 GB: 8 layers of 128 experts, q4_0, which llama.cpp repacks where experts do not."""
    shape = random_moe.Shape(n_layer=8, n_embd=2048, n_ff=768, n_expert=128, n_used=8)
    path = tmp_path_factory.mktemp("big") / "qwen3moe-q4_0.gguf"
    random_moe.write_model(random_moe.declare("qwen3moe", shape, "q4_0", "q4_0"), path, models.lib_dir())
    assert path.stat().st_size > 4 * BUDGET
    yield path
    path.unlink()


def chat(model: Path, stats: Path, *options: object) -> list[object]:
    # a prompt that needs most experts of a layer at once, then tokens one by one
    prompt = "A long prompt, so that a batch of it asks for most experts of every layer at once. " * 4
    return [
        sys.executable, "-P", "-m", "pyhobbit", "chat", model, "-p", prompt, "-n", 24, "--temp", 0,
        "--ctx", 1024, "--stats-json", stats, *options,
    ]  # fmt: skip


def test_peak_memory_stays_within_the_budget(big_model: Path, tmp_path: Path) -> None:
    done = limits.run(chat(big_model, tmp_path / "stats.json", "--memory", BUDGET))
    assert done.returncode == 0, done.stderr
    assert Peak(BUDGET, done.peak_rss).is_right
    stats = json.loads((tmp_path / "stats.json").read_text())
    assert stats["generated_tokens"] == 24
    assert stats["misses_high"] > 0
    print(f"\nmodel {big_model.stat().st_size / MiB:.0f} MiB, budget {BUDGET / MiB:.0f} MiB, "
          f"peak {done.peak_rss / MiB:.0f} MiB, pools {stats['pool_bytes_high'] / MiB:.0f} MiB")  # fmt: skip


_PLAN = """
import sys
from pathlib import Path
from pyhobbit.engine.plan import lay_out
from pyhobbit.settings.config import EngineConfig
plan = lay_out(Path(sys.argv[1]), EngineConfig(n_ctx=1024))
assert not plan.info.cached
print(plan.most)
"""


@pytest.mark.parametrize("kind", ["q4_0", "q6_K"])  # the file's own layout; repacked by llama.cpp
def test_a_model_without_a_cache_is_in_memory_once(kind: str, tmp_path: Path) -> None:
    shape = random_moe.Shape(n_layer=4, n_embd=2048, n_ff=768, n_expert=64, n_used=8)
    model = tmp_path / "m.gguf"
    random_moe.write_model(random_moe.declare("qwen3moe", shape, kind, kind), model, models.lib_dir())
    most = int(run_script(_PLAN, model))
    done = limits.run(chat(model, tmp_path / "stats.json"))
    assert done.returncode == 0, done.stderr
    assert most - 100 * MiB < done.peak_rss <= most
    print(f"\nplanned {most / MiB:.0f} MiB, peak {done.peak_rss / MiB:.0f} MiB")


def test_runs_in_a_memory_cgroup_of_the_budget(big_model: Path, tmp_path: Path) -> None:
    outside = limits.run(chat(big_model, tmp_path / "outside.json", "--memory", BUDGET))
    try:
        with memory_cgroup(BUDGET) as cgroup:
            inside = limits.run(chat(big_model, tmp_path / "inside.json", "--memory", BUDGET), cgroup.procs)
    except NoCgroupError as e:
        pytest.skip(str(e))
    assert inside.returncode == 0, inside.stderr
    assert inside.stdout == outside.stdout


def test_a_second_program_sees_the_memory_of_the_first(big_model: Path, tmp_path: Path) -> None:
    """Pools take their memory when they are made, so that a budget planned later leaves it to them."""
    limit = 2000 * MiB
    first = [sys.executable, "-P", "-c", _WAITING, big_model]
    try:
        with memory_cgroup(limit) as cgroup:
            joined = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', *map(str, [cgroup.procs, *first])]
            pipe = subprocess.PIPE
            with subprocess.Popen(joined, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as waiting:
                deadline = time.monotonic() + 300
                while _held(waiting.pid) < 0.8 * limit:
                    assert time.monotonic() < deadline, "the pools did not take their memory"
                    time.sleep(0.1)
                second = limits.run(chat(big_model, tmp_path / "second.json"), cgroup.procs)
                _, errors = waiting.communicate("go on")
    except NoCgroupError as e:
        pytest.skip(str(e))
    assert waiting.returncode == 0, errors
    if second.returncode != 0:
        assert second.returncode == 1
        assert "not enough free memory for expert pools" in second.stderr


_WAITING = """
import sys
from pyhobbit import Engine, EngineConfig
with Engine(sys.argv[1], EngineConfig(n_ctx=1024, n_batch=512)) as engine:
    sys.stdin.read()
    assert len(list(engine.generate("Hello", 4))) == 4
"""


def _held(pid: int) -> int:
    """Bytes of memory that the process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_a_cache_behind_a_device_stays_within_the_budget(big_model: Path, tmp_path: Path) -> None:
    with rpc_server.running(models.lib_dir()) as (endpoint, _):
        device = ("--rpc", endpoint, "--device", "RPC0", "--device-memory", 256 * MiB)
        done = limits.run(chat(big_model, tmp_path / "stats.json", "--memory", BUDGET, *device))
    assert done.returncode == 0, done.stderr
    assert done.peak_rss <= BUDGET + memory_modes.ABOVE
    stats = json.loads((tmp_path / "stats.json").read_text())
    assert stats["generated_tokens"] == 24
    assert stats["pool_bytes_high"] <= 256 * MiB
    assert stats["host_bytes_high"] > 256 * MiB
    assert 0 < stats["host_hits_high"] < stats["misses_high"]
    print(f"\nbudget {BUDGET / MiB:.0f} MiB, peak {done.peak_rss / MiB:.0f} MiB, "
          f"cache {stats['host_bytes_high'] / MiB:.0f} MiB")  # fmt: skip


def test_budget_below_the_smallest_names_one_that_works(big_model: Path, tmp_path: Path) -> None:
    done = limits.run(chat(big_model, tmp_path / "stats.json", "--memory", 100 * MiB))
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    smallest = done.stderr.split("the smallest that works is ")[1].split(" MiB")[0]
    again = limits.run(chat(big_model, tmp_path / "stats.json", "--memory", int(smallest) * MiB))
    assert again.returncode == 0, again.stderr
    assert again.peak_rss <= int(smallest) * MiB + memory_modes.ABOVE
