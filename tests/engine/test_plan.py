# SPDX-License-Identifier: MIT
import ctypes
import json
from pathlib import Path

import pytest
import random_moe
from gguf import GGUFReader
from hobbits import run_script
from models import random_model

from pyhobbit.engine import plan
from pyhobbit.engine.plan import lay_out
from pyhobbit.errors import HobbitError
from pyhobbit.native.machine import resident_memory
from pyhobbit.settings.config import CacheConfig, EngineConfig

pytestmark = pytest.mark.model

_MIB = 1 << 20


# A bound counts from what the process holds, which in this one depends on the tests that ran before.
_PLAN_AND_ENGINE = """
import json, sys
from pathlib import Path
from pyhobbit import CacheConfig, Engine, EngineConfig
from pyhobbit.native.machine import resident_memory
from pyhobbit.engine.plan import lay_out

path = Path(sys.argv[1])
config = EngineConfig(cache=CacheConfig(memory=resident_memory() + (int(sys.argv[2]) << 20)), n_threads=1)
plan = lay_out(path, config)
with Engine(path, config) as engine:
    infos = plan.info, engine.info()
names = "n_ctx", "n_experts", "pool_slots_high", "pool_bytes_high"
print(json.dumps([{name: getattr(info, name) for name in names} for info in infos]))
print(plan.share_high)
"""


def _plan_and_engine(path: Path, n_mib: int) -> tuple[dict[str, int], dict[str, int], float]:
    """The plan of a process with n_mib more than it holds, the engine's memory, and the plan's share."""
    infos, share = run_script(_PLAN_AND_ENGINE, path, n_mib).splitlines()
    expected, found = json.loads(infos)
    return expected, found, float(share)


# With a large vocabulary the first plan leaves several MiB in the process.
@pytest.mark.parametrize("arch", sorted(set(random_moe.ARCHS) - {"qwen3moe-vocabulary"}))
def test_the_plan_is_what_the_engine_does(arch: str) -> None:
    expected, found, _ = _plan_and_engine(random_model(arch), 72)
    assert expected["n_ctx"] == found["n_ctx"]
    assert expected["n_experts"] == found["n_experts"]
    assert abs(expected["pool_bytes_high"] - found["pool_bytes_high"]) < 2 * _MIB


def test_pools_that_hold_a_part_are_planned_to_the_megabyte(tiny_gguf: Path) -> None:
    expected, found, share = _plan_and_engine(tiny_gguf, 45)
    assert 0 < found["pool_slots_high"] < 48
    # the process's memory includes the remains of the first plan
    assert abs(expected["pool_bytes_high"] - found["pool_bytes_high"]) < 3 * _MIB
    assert share == expected["pool_slots_high"] / 48


def test_a_plan_says_what_everything_takes(tiny_gguf: Path) -> None:
    before = resident_memory()
    found = lay_out(tiny_gguf, EngineConfig(n_ctx=256, n_threads=1))
    assert resident_memory() - before < 16 * _MIB  # nothing was loaded
    assert found.context == 6 * 2 * 256 * 2 * 2 * 64  # layers, K and V, tokens, f16, KV heads, their width
    assert found.weights + found.info.tier_bytes_high + found.info.tier_bytes_low == pytest.approx(
        tiny_gguf.stat().st_size, rel=0.02
    )
    assert 0 < found.compute < 64 * _MIB
    assert found.info.n_ctx_train == 512
    assert found.info.n_all_experts == 48
    assert found.info.pool_slots_high == 48


_VOCABULARY = """
import ctypes, os, sys
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # discards llama.cpp's log
import pyhobbit.hobbit, llama_cpp

class Info(ctypes.Structure):
    _fields_ = [(str(i), ctypes.c_size_t) for i in range(10)]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info

def in_use():
    info = libc.mallinfo2()
    return getattr(info, "4") + getattr(info, "7")  # mapped, and in the heap

params = llama_cpp.llama_model_default_params()
params.vocab_only = True
before = in_use()
model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), params)
assert model
print(in_use() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library counts nothing")
def test_the_vocabulary_is_part_of_the_plan() -> None:
    models = [random_model(arch) for arch in ("qwen3moe", "qwen3moe-vocabulary")]
    planned = [lay_out(path, EngineConfig(cache=CacheConfig(pools=8 * _MIB))).weights for path in models]
    shared = [sum(t.n_bytes for t in GGUFReader(path).tensors if "_exps" not in t.name) for path in models]
    counted = (planned[1] - shared[1]) - (planned[0] - shared[0])
    taken = [int(run_script(_VOCABULARY, path)) for path in models]
    assert counted == pytest.approx(taken[1] - taken[0], rel=0.1)


def test_a_plain_model_that_fits_runs_whole() -> None:
    path = random_model("qwen3moe")
    found = lay_out(path, EngineConfig())
    assert not found.info.cached
    assert found.info.has_experts
    assert found.weights == pytest.approx(path.stat().st_size, rel=0.05)
    assert lay_out(path, EngineConfig(cache=CacheConfig(pools=8 * _MIB))).info.cached


def test_what_does_not_fit_is_said_before_it_is_loaded(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HobbitError, match=r"the smallest that works is \d+ MiB .* for a context of 512 tok"):
        lay_out(tiny_gguf, EngineConfig(cache=CacheConfig(memory=20 * _MIB)))
    with pytest.raises(HobbitError, match="trained for 512 tokens at most"):
        lay_out(tiny_gguf, EngineConfig(n_ctx=513))
    monkeypatch.setattr(plan, "available_memory", lambda: 5 * _MIB)
    for path in (tiny_gguf, random_model("qwen3moe")):
        with pytest.raises(HobbitError, match=r"does not fit into memory: .* 5.0 MiB are free; free some"):
            lay_out(path, EngineConfig())


def test_a_limit_above_the_machines_memory_is_refused(tiny_gguf: Path) -> None:
    config = EngineConfig(cache=CacheConfig(memory=1 << 50))
    with pytest.raises(
        HobbitError,
        match=r"a limit of 1048576.00 GiB is above the .* GiB that this machine, or the memory cgroup",
    ):
        lay_out(tiny_gguf, config)


def test_a_trace_is_left_alone(tiny_gguf: Path, tmp_path: Path) -> None:
    trace = tmp_path / "run.csv"
    trace.write_text("an older one")
    found = lay_out(tiny_gguf, EngineConfig(cache=CacheConfig(trace=trace)))
    assert found.info.cached
    assert trace.read_text() == "an older one"


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(HobbitError, match=r"broken.gguf"):
        lay_out(broken, EngineConfig())
