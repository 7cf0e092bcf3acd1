# SPDX-License-Identifier: MIT
"""Pools on a GPU: CUDA's after `make cuda`; Vulkan's after `make vulkan`, where Mesa's software device stands
in for one.

The device rounds otherwise than the CPU, and llama.cpp chooses its kernels by the number of rows and of
experts: between two backends llama.cpp's tests accept an error, and so do these.

Mesa compiles a kernel when it is first used, and takes the longer the more rows it is for: without a mark are
tests that need those for one and two rows in two types.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import logits
import models
import numpy as np
import pytest
from exactness import CASES, SHORT_PLANS, assert_same_bits, nmse
from logits import ROOT, Override, Result

from bench.harness.devices import Device
from pyhobbit.errors import HobbitError

MAX_NMSE = 5e-4
"""The normalised mean square error that llama.cpp's test-backend-ops accepts of MUL_MAT_ID."""


def _prompt_and_tokens(n_prompt: int, n_tokens: int) -> logits.Plan:
    """Not greedy, so that two devices that round otherwise see the same tokens."""
    text = [(1 + 37 * i % 500, i, 0) for i in range(n_prompt + n_tokens)]
    return logits.Plan([text[:n_prompt], *([token] for token in text[n_prompt:])])


FEW_ROWS = {
    "tokens": logits.one_at_a_time([1 + 37 * i % 500 for i in range(6)]),
    "text": _prompt_and_tokens(2, 12),
    "sequences": logits.Plan([[(20 + 5 * n + s, n, s) for s in range(2)] for n in range(6)]),
}
PLANS = SHORT_PLANS | {"text": _prompt_and_tokens(5, 12)}

NAMES = [name for name, case in CASES.items() if not case.repack]
ALL_LAYERS = 99


def _pools(info: dict[str, float], everything: float, share: float) -> int:
    """Bytes for a share of all experts, but for at least those of a token in one layer."""
    smallest = info["n_experts_used"] * info["pool_bytes_high"] / info["pool_slots_high"]
    return int(max(share * everything, 1.05 * smallest)) + (64 << 10)


@dataclass(frozen=True)
class Gpu:
    """A device, as ggml names it, and the build that has it.

    stands_in: there is one in software, so that its absence is an error.  max_nmse: against the CPU, where
    llama.cpp's own is not larger.  bits: plans for which a trained model has llama.cpp's own. The others'
    experts may arrive in pieces, and kernels for fewer rows may sum in another order.
    """

    device: str
    target: str
    stands_in: bool = False
    max_nmse: float = MAX_NMSE
    bits: frozenset[str] = frozenset(PLANS)

    @property
    def lib_dir(self) -> Path:
        folders = [ROOT / "build" / each / "bin" for each in (self.target, "wheel")]
        return next((each for each in folders if (each / f"libggml-{self.target}.so").exists()), folders[0])

    def why_not(self) -> str:
        """The reason for which it cannot be used here, or nothing."""
        if not (self.lib_dir / "libllama.so").exists():
            return f"there is no build for {self.device}: run make {self.target}"
        if self.stands_in:
            return ""
        try:
            Device(self.device).describe(self.lib_dir)
        except HobbitError as e:
            return str(e)
        return ""

    def run(
        self,
        model: Path,
        plans: dict[str, logits.Plan],
        settings: dict[str, Override],
        gpu_layers: int = 0,
    ) -> Result:
        return logits.run(self.lib_dir, model, plans, settings, gpu_layers=gpu_layers, gpu=True)


GPUS = [
    Gpu("Vulkan0", "vulkan", stands_in=True),
    # activations are rounded in each of six layers
    Gpu("CUDA0", "cuda", max_nmse=6 * MAX_NMSE, bits=frozenset({"tokens"})),
]


@pytest.fixture(scope="module", params=GPUS, ids=lambda gpu: gpu.device)
def gpu(request: pytest.FixtureRequest) -> Gpu:
    if reason := request.param.why_not():
        pytest.skip(reason)
    return request.param


#
# with few kernels
#


def _few_rows(gpu: Gpu, model: Path, settings: dict[str, Override]) -> Result:
    return gpu.run(model, FEW_ROWS, {"hobbit.device": gpu.device} | settings)


@pytest.fixture(scope="module")
def few_rows_on_cpu(tiny_gguf: Path) -> Result:
    return logits.run(models.lib_dir(), tiny_gguf, FEW_ROWS, {"hobbit.pools": 64 << 20})


@pytest.fixture(scope="module")
def few_rows(gpu: Gpu, tiny_gguf: Path, few_rows_on_cpu: Result) -> Result:
    """Runs with room for all experts."""
    return _few_rows(gpu, tiny_gguf, {"hobbit.mode": "gpu", "hobbit.pools": 64 << 20})


def _assert_close(gpu: Gpu, result: Result, reference: Result) -> None:
    for plan, wanted in reference.logits.items():
        assert nmse(result.logits[plan], wanted) < gpu.max_nmse, plan


def test_experts_on_the_device(gpu: Gpu, few_rows: Result, few_rows_on_cpu: Result) -> None:
    assert few_rows.info["pool_slots_high"] == few_rows.info["n_layers"] * few_rows.info["n_experts"]
    assert few_rows.stats["bytes_transferred"] > 0
    _assert_close(gpu, few_rows, few_rows_on_cpu)


@pytest.mark.parametrize("share", [0.5, 0.0])
def test_pools_of_any_size_give_the_same_bits(
    gpu: Gpu, tiny_gguf: Path, few_rows: Result, share: float
) -> None:
    pools = _pools(few_rows.info, few_rows.info["tier_bytes_high"], share)
    result = _few_rows(gpu, tiny_gguf, {"hobbit.mode": "gpu", "hobbit.pools": pools})
    assert result.stats["evictions"] > 0
    for plan, wanted in few_rows.logits.items():
        assert_same_bits(result.logits[plan], wanted)


@pytest.mark.parametrize("mode", ["cooperative", "auto"])
def test_the_cpu_has_a_share(gpu: Gpu, tiny_gguf: Path, few_rows_on_cpu: Result, mode: str) -> None:
    result = _few_rows(gpu, tiny_gguf, {"hobbit.mode": mode, "hobbit.pools": 4 << 20})
    assert result.stats["selections_cpu"] > 0
    _assert_close(gpu, result, few_rows_on_cpu)


def test_low_precision_and_skipping(gpu: Gpu, tiny_gguf: Path) -> None:
    rules: dict[str, Override] = {"hobbit.t1": 0.5, "hobbit.t2": 0.9, "hobbit.strict": True}
    rules["hobbit.pools"] = 8 << 20
    result = _few_rows(gpu, tiny_gguf, rules | {"hobbit.mode": "gpu"})
    assert min(result.stats[f"selections_{what}"] for what in ("high", "low", "skipped")) > 0
    _assert_close(gpu, result, logits.run(models.lib_dir(), tiny_gguf, FEW_ROWS, rules))


@pytest.mark.parametrize("mode", ["gpu", "cooperative", "auto"])
def test_one_queue_with_llama_cpps_layers(
    gpu: Gpu, tiny_gguf: Path, few_rows_on_cpu: Result, mode: str
) -> None:
    settings: dict[str, Override] = {
        "hobbit.device": gpu.device,
        "hobbit.mode": mode,
        "hobbit.pools": 4 << 20,
    }
    result = gpu.run(tiny_gguf, FEW_ROWS, settings, ALL_LAYERS)
    assert result.stats["misses_high"] > 0
    assert result.stats["device_waits"] < result.stats["layers_computed"] / 2
    _assert_close(gpu, result, few_rows_on_cpu)


#
# with all kernels
#


@functools.cache
def _without_cache(gpu: Gpu, name: str) -> Result:
    return gpu.run(CASES[name].plain(), PLANS, {"hobbit.enable": False}, ALL_LAYERS)


@functools.cache
def _with_pools(gpu: Gpu, name: str, share: float) -> Result:
    """With room for all, every plan is also run a second time: "again ..."."""
    case = CASES[name]
    everything = models.routed_expert_bytes(case.plain())
    pools = 2 * everything if share == 1 else _pools(_with_pools(gpu, name, 1.0).info, everything, share)
    settings: dict[str, Override] = {"hobbit.device": gpu.device, "hobbit.mode": "gpu", "hobbit.pools": pools}
    again = {f"again {plan}": steps for plan, steps in PLANS.items()} if share == 1 else {}
    return gpu.run(case.served(), PLANS | again, settings, ALL_LAYERS)


@functools.cache
def _on_cpu(model: Path) -> Result:
    return logits.run(models.lib_dir(), model, PLANS, {"hobbit.pools": 64 << 20})


def _error(name: str, ours: np.ndarray, wanted: np.ndarray) -> float:
    """The error of a trained model over all tokens. Routers of random weights have close scores, and where
    rounding
    makes them choose other experts, that token is far off: then what three tokens in four stay below."""
    if name.startswith("tiny"):
        return nmse(ours, wanted)
    return float(np.quantile([nmse(*token) for token in zip(ours, wanted, strict=True)], 0.75))


def _check(gpu: Gpu, name: str, result: Result) -> None:
    """Against the CPU: no further from it than llama.cpp's own error on the device allows."""
    for plan, wanted in _on_cpu(CASES[name].served()).logits.items():
        allowed = max(gpu.max_nmse, 2 * _error(name, _without_cache(gpu, name).logits[plan], wanted))
        assert _error(name, result.logits[plan], wanted) < allowed, plan


@pytest.mark.kernels
@pytest.mark.parametrize("name", NAMES)
def test_with_room_for_all(gpu: Gpu, name: str) -> None:
    result = _with_pools(gpu, name, 1.0)
    assert result.info["pool_slots_high"] == result.info["n_layers"] * result.info["n_experts"]
    assert result.stats["bytes_transferred"] > 0
    _check(gpu, name, result)


@pytest.mark.kernels
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("tiny")])
def test_with_room_for_all_a_trained_model_gives_llama_cpps_bits(gpu: Gpu, name: str) -> None:
    """Checks prompts the second time, when all their experts are resident: rows in pieces have other
    kernels."""
    ours = _with_pools(gpu, name, 1.0).logits
    for plan, wanted in _without_cache(gpu, name).logits.items():
        for run in (plan, f"again {plan}"):
            if plan in gpu.bits and run != "prompt":
                assert_same_bits(ours[run], wanted)
            assert nmse(ours[run], wanted) < MAX_NMSE, run


@pytest.mark.kernels
@pytest.mark.parametrize("share", [0.5, 0.0])
@pytest.mark.parametrize("name", NAMES)
def test_with_less_room(gpu: Gpu, name: str, share: float) -> None:
    result = _with_pools(gpu, name, share)
    assert result.stats["evictions"] > 0
    _check(gpu, name, result)


@pytest.mark.kernels
@pytest.mark.parametrize("gpu_layers", [0, ALL_LAYERS])
@pytest.mark.parametrize("mode", ["gpu", "cooperative", "auto"])
@pytest.mark.parametrize("name", ["tiny-f16", "gpt-oss"])
def test_whoever_computes_what_is_missing(gpu: Gpu, name: str, mode: str, gpu_layers: int) -> None:
    settings: dict[str, Override] = {
        "hobbit.device": gpu.device,
        "hobbit.mode": mode,
        "hobbit.pools": 4 << 20,
    }
    result = gpu.run(CASES[name].served(), PLANS, settings, gpu_layers)
    assert (result.stats["selections_cpu"] > 0) == (mode != "gpu")
    _check(gpu, name, result)


@pytest.mark.kernels
@pytest.mark.parametrize("gpu_layers", [0, ALL_LAYERS])
def test_two_tiers(gpu: Gpu, gpu_layers: int) -> None:
    """By their scores, which a device may round across a threshold."""
    model = models.tiny_tiers("f16", "q4_0")
    rules: dict[str, Override] = {"hobbit.pools": 4 << 20, "hobbit.strict": True}
    rules |= {"hobbit.t1": 0.5, "hobbit.t2": 0.9}
    result = gpu.run(model, PLANS, rules | {"hobbit.device": gpu.device, "hobbit.mode": "gpu"}, gpu_layers)
    assert min(result.stats[f"selections_{what}"] for what in ("high", "low", "skipped")) > 0
    _assert_close(gpu, result, logits.run(models.lib_dir(), model, PLANS, rules))
