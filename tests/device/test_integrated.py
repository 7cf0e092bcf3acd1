# SPDX-License-Identifier: MIT
"""Pools in memory that an integrated GPU shares with its host: a modelled device with one memory."""

import sys
from pathlib import Path

import logits
import modelled
import models
import pytest
from exactness import CASES, SHORT_PLANS
from logits import Override, Result, RunError

sys.path.append(str(logits.ROOT / "tests/engine"))

import limits
import memory_modes

ONE = "name=CUDA one_memory=1 delay_us=100"
APART = "name=RPC events=0 one_queue=1 one_memory=1"
"""An integrated GPU whose backend offers no memory of the host."""
COPIED = "reads no memory of the host in place"


def _run(
    model: Path,
    overrides: dict[str, Override],
    settings: str = ONE,
    device: str = "CUDA0",
    gpu_layers: int = 99,
) -> Result:
    return modelled.run(model, settings, {"hobbit.device": device, **overrides}, gpu_layers=gpu_layers)


def _on_cpu(model: Path, overrides: dict[str, Override]) -> Result:
    return logits.run(models.lib_dir(), model, SHORT_PLANS, overrides)


@pytest.mark.parametrize("gpu_layers", [0, 99])
@pytest.mark.parametrize("name", ["tiny-f16", "tiny-q8_0", "q4_k_m", "gpt-oss-mxfp4"])
def test_the_bits_are_the_cpus_and_nothing_is_uploaded(name: str, gpu_layers: int) -> None:
    """Beside quantized experts a device with events runs ahead of the choice."""
    model = CASES[name].served()
    for share in (20.0, 0.4):  # blocks of small experts need wide strides
        pools = max(int(share * models.routed_expert_bytes(model)), 13 << 18)
        result = _run(model, {"hobbit.pools": pools, "hobbit.prefetch": 2}, gpu_layers=gpu_layers)
        modelled.assert_clean(result, _on_cpu(model, {"hobbit.pools": pools}))
        slots, info = result.info["pool_slots_high"], result.info
        assert (slots == info["n_layers"] * info["n_experts"]) == (share > 1)
        assert (result.stats["evictions"] > 0) == (share < 1)
        assert result.stats["bytes_read"] > 0
        assert result.stats["bytes_transferred"] == 0
        assert result.devices[0]["name"] == "CUDA0"
        assert not info["on_device"]
        assert info["host_slots_high"] == 0
        assert COPIED not in result.log


@pytest.mark.parametrize("policy", ["lru", "echo"])
def test_hits_and_misses_are_the_cpus(tiny_gguf: Path, policy: str) -> None:
    same: dict[str, Override] = {"hobbit.pools": 4 << 20, "hobbit.prefetch": 0, "hobbit.policy": policy}
    here, on_cpu = _run(tiny_gguf, same), _on_cpu(tiny_gguf, same)
    assert here.info["pool_slots_high"] == on_cpu.info["pool_slots_high"]
    for counter in ("hits_high", "misses_high", "evictions", "bytes_read"):
        assert here.stats[counter] == on_cpu.stats[counter] > 0


def test_low_precision_and_skipped_experts() -> None:
    model = models.tiny_tiers("f16", "q4_0")
    rules: dict[str, Override] = {"hobbit.t1": 0.5, "hobbit.t2": 0.9, "hobbit.strict": True}
    rules["hobbit.pools"] = 4 << 20
    result = _run(model, rules | {"hobbit.mode": "gpu"})
    modelled.assert_clean(result, _on_cpu(model, rules))
    assert min(result.stats["selections_low"], result.stats["selections_skipped"]) > 0
    assert result.stats["bytes_transferred"] == 0


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"hobbit.mode": "cooperative"}, "the CPU and a GPU with memory of its own"),
        ({"hobbit.device_memory": 64 << 20}, "limits a GPU's own memory, and the experts are in the host's"),
        ({"hobbit.memory": 1 << 30, "hobbit.pools": 4 << 20}, "in the same memory: give one of them"),
    ],
)
def test_what_divides_two_memories_is_refused(
    tiny_gguf: Path, overrides: dict[str, Override], said: str
) -> None:
    with pytest.raises(RunError, match=said):
        _run(tiny_gguf, overrides)


def test_without_memory_to_share_experts_are_copied_and_a_line_says_so(
    tiny_gguf: Path, on_cpu: Result
) -> None:
    result = _run(tiny_gguf, {"hobbit.pools": 4 << 20, "hobbit.mode": "gpu"}, APART, "RPC0")
    modelled.assert_clean(result, on_cpu)
    assert result.stats["bytes_transferred"] > 0
    assert result.log.count(COPIED) == 1


_CHAT = """
import ctypes, sys
from pyhobbit.cli.main import main
from pyhobbit.native import ffi
from pyhobbit.native.paths import LIB_DIR
for name in ("ggml-base", "ggml"):
    ggml = ctypes.CDLL(str(LIB_DIR / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)
device = ctypes.CDLL(sys.argv[1])
device.ggml_backend_init.restype = ctypes.c_void_p
device.modelled_configure(sys.argv[2].encode())
ggml.ggml_backend_register(ctypes.c_void_p(device.ggml_backend_init()))
sys.exit(main(sys.argv[3:]))
"""


def _program(*words: object) -> limits.Outcome:
    """The program beside a device with one memory of 8 GB."""
    environment = ["env", f"LD_PRELOAD={modelled.DEVICE}", sys.executable, "-P", "-c", _CHAT]
    return limits.run([*environment, modelled.DEVICE, "name=CUDA one_memory=1 memory=8000000000", *words])


def test_the_limit_holds_all_that_host_and_device_take() -> None:
    """KV cache and other weights are the device's, and count once."""
    budget, n_tokens = 240 << 20, memory_modes.N_TOKENS
    words = ("-p", memory_modes.PROMPT, "-n", n_tokens, "--temp", 0, "--ctx", 1024, "--device", "CUDA0")
    done = _program("chat", memory_modes.plain(), *words, "--memory", budget)
    assert done.returncode == 0, done.stderr
    assert "GPU: CUDA0 (modelled device), with the experts" in done.stderr
    assert 0.8 * budget < done.peak_rss <= budget  # it touches not all of its buffers


def test_inspect_names_the_device_and_one_memory() -> None:
    done = _program("inspect", memory_modes.plain(), "--device", "CUDA0", "--memory", 240 << 20)
    assert done.returncode == 0, done.stderr
    assert "CUDA0 has the pools in its memory and computes the experts" in done.stdout
    assert "host memory" not in done.stdout
