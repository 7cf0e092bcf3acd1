# SPDX-License-Identifier: MIT
"""Numbers of experts that few models have: many in a layer, or others for each layer or by an override."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import logits
import models
import numpy as np
import pytest
import random_moe
from conftest import RunPyhobbit
from exactness import assert_same_bits

from pyhobbit import Hobbit
from pyhobbit.errors import HobbitError
from pyhobbit.routing.trace import read_trace

LIMIT = 1024  # llama.cpp's
PLANS = {
    "prompt": logits.prefill([1 + 37 * i % 300 for i in range(40)]),
    "text": logits.prefill([5, 6, 7, 8, 9], greedy=12),
}
N_USED, WIDTHS = [0, 0, 4, 2], [0, 0, 256, 128]
TEXT = models.TINY / "heldout.txt"
_WRITE = """
import sys
from dataclasses import replace
from json import loads
from pathlib import Path
import llama_cpp.llama_cpp as llama
from architecture_models import write_model
from architectures import ARCHITECTURES
name, keys, path, folder = sys.argv[1], loads(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
of = ARCHITECTURES[name]
write_model(llama, folder, name, replace(of, keys={**of.keys, **keys}), path)
"""


def write_architecture(name: str, keys: Mapping[str, Any], path: Path) -> Path:
    """A model of tests/engine/architectures.py with other hyper-parameters, made by the unpatched library."""
    tests = models.ROOT / "tests"
    env = dict(os.environ, LLAMA_CPP_LIB_PATH=str(models.stock_dir()), PYTHONPATH=f"{tests}:{tests}/engine")
    command = [sys.executable, "-c", _WRITE, name, json.dumps(keys), str(path), str(models.stock_dir())]
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=models.TIMEOUT_S)
    return path


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of four layers have experts, which differ in width and in how many a token uses."""
    keys = {"expert_used_count": N_USED, "expert_feed_forward_length": WIDTHS}
    return write_architecture("nemotron_h_moe", keys, tmp_path_factory.mktemp("uneven") / "m.gguf")


def many_experts(n_experts: int, path: Path) -> Path:
    of = random_moe.ARCHS["qwen3moe"].shape
    shape = replace(of, n_expert=n_experts, n_used=16, n_layer=2, n_embd=64, n_head=2, n_head_kv=1, n_ff=32)
    random_moe.write_model(random_moe.declare("qwen3moe", shape, "q8_0", "f16"), path, models.stock_dir())
    return path


def assert_stocks_bits(model: Path, pools: int, **overrides: logits.Override) -> None:
    stock = logits.run(models.stock_dir(), model, PLANS, overrides=overrides).logits
    for prefetch in (0, 2):
        settings = {"hobbit.pools": pools, "hobbit.prefetch": prefetch, "hobbit.enable": True, **overrides}
        ours = logits.run(models.lib_dir(), model, PLANS, overrides=settings).logits
        for name in PLANS:
            assert_same_bits(ours[name], stock[name])


#
# many experts
#


@pytest.mark.model
@pytest.mark.parametrize("n_experts", [513, LIMIT])
def test_as_many_experts_as_llama_cpp_runs(n_experts: int, tmp_path: Path, run_pyhobbit: RunPyhobbit) -> None:
    model, trace = many_experts(n_experts, tmp_path / "m.gguf"), tmp_path / "t.csv"
    assert_stocks_bits(model, 4 << 20)
    (tmp_path / "x.txt").write_text(TEXT.read_text()[:8000])
    chat = ("chat", model, "-p", "abc", "-n", 8, "--temp", 0, "--pools", "4M")
    for verb in (
        (*chat, "--trace", trace),
        (
            "simulate",
            "--trace",
            trace,
            "--capacity",
            0.2,
            "--set",
            f"prior={trace}",
            "--set",
            "predictor=paths",
        ),
        ("inspect", model, "--pools", "4M"),
        ("convert", "--low", "q4_0", "--sidecar", model),
        ("calibrate", model, "--text", tmp_path / "x.txt", "--chunks", 4, "--ctx", 16),
        (*chat, "--policy", "echo"),
    ):
        done = run_pyhobbit(*verb)
        assert done.returncode == 0, done.stderr
    recorded = read_trace(trace)
    assert recorded.n_experts == n_experts
    assert recorded.routes["expert"].max() > n_experts - 100


@pytest.mark.parametrize("verb", ["chat", "inspect", "convert", "calibrate"])
def test_more_experts_than_llama_cpp_runs_are_refused_with_the_limit(
    verb: str, tmp_path: Path, run_pyhobbit: RunPyhobbit
) -> None:
    model = many_experts(LIMIT + 1, tmp_path / "m.gguf")
    options = {
        "chat": ("-p", "x", "-n", 1),
        "inspect": ("--no-speed",),
        "convert": ("--low", "q4_0", "--sidecar"),
        "calibrate": ("--text", TEXT),
    }[verb]
    done = run_pyhobbit(verb, *options, model) if verb == "convert" else run_pyhobbit(verb, model, *options)
    assert done.returncode == 1
    assert "layers of 1025 experts" in done.stderr
    assert f"{LIMIT} experts" in done.stderr
    assert "damaged" not in done.stderr


#
# numbers by layer
#


@pytest.mark.model
def test_each_layer_uses_its_own_number(uneven: Path, tmp_path: Path, run_pyhobbit: RunPyhobbit) -> None:
    assert_stocks_bits(uneven, 1 << 20)
    trace = tmp_path / "t.csv"
    chat = ("chat", uneven, "-p", "a b c", "-n", 12, "--pools", "1M", "--temp", 0)
    for verb in (
        (*chat, "--trace", trace),
        ("inspect", uneven, "--pools", "1M"),
        (*chat, "--policy", "echo", "--set", "predictor=paths"),
    ):
        done = run_pyhobbit(*verb)
        assert done.returncode == 0, done.stderr
    recorded = read_trace(trace)
    assert (recorded.n_used, recorded.n_used_by_layer) == (4, (4, 2))
    _, counts = np.unique(recorded.routes[["token", "layer"]], return_counts=True)
    assert set(counts.tolist()) == {4, 2}

    done = run_pyhobbit(
        "simulate", "--trace", trace, "--capacity", 0.5, 1, "--set", "predictor=paths", "--json"
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["n_used_by_layer"] == [4, 2]
    for run in document["runs"]:
        selections = sum(
            run[name] for name in ("hits_high", "misses_high", "hits_low", "misses_low", "skipped")
        )
        assert selections == 6 * run["n_tokens"]

    text = run_pyhobbit("inspect", uneven, "--no-speed").stdout
    assert "8 per layer, 2 to 4 used per token" in text
    model = json.loads(run_pyhobbit("inspect", uneven, "--no-speed", "--json").stdout)["model"]
    assert (model["n_experts_used"], model["n_experts_used_by_layer"]) == (4, [4, 2])


@pytest.mark.model
def test_calibration_and_analyses_count_each_layers_own_number(
    uneven: Path, tmp_path: Path, run_pyhobbit: RunPyhobbit
) -> None:
    from bench import report
    from pyhobbit.engine.engine import Engine
    from pyhobbit.settings.config import CacheConfig, EngineConfig

    text = tmp_path / "x.txt"
    text.write_text(TEXT.read_text()[:8000])
    done = run_pyhobbit("convert", "--low", "q4_0", "--sidecar", uneven, "--force")
    assert done.returncode == 0, done.stderr
    for rule in ((), ("--set", "rule=edgemoe")):
        done = run_pyhobbit(
            "calibrate", uneven, "--text", text, "--chunks", 4, "--ctx", 16, "--max-kl", 0.5, *rule
        )
        assert done.returncode == 0, done.stderr
    parts = ["--parts", "routing", "skipping", "--output", str(tmp_path)]
    assert report.main([str(uneven), "--text", str(text), "--chunks", "1", "--hours", "99", *parts]) == 0
    assert (tmp_path / "lines.jsonl").read_text().count('"figures"') == 2
    with Engine(uneven, EngineConfig(cache=CacheConfig(pools=4 << 20), n_ctx=64)) as engine:
        info = engine.info()
    sizes: dict[int, float] = {}
    for tensor in models.GGUFReader(uneven).tensors:
        if tensor.name.endswith("_exps.weight"):
            block = int(tensor.name.split(".")[1])
            sizes[block] = sizes.get(block, 0) + int(tensor.n_bytes) / 8
    assert info.token_bytes_high == pytest.approx(4 * sizes[2] + 2 * sizes[3])


#
# overrides
#


def test_an_override_of_the_number_is_the_number_that_runs(tmp_path: Path, run_pyhobbit: RunPyhobbit) -> None:
    model, trace = models.tiny(), tmp_path / "t.csv"
    assert_stocks_bits(model, 12 << 20, **{"llama.expert_used_count": 6})
    options: dict[str, Any] = {"pools": "12M", "n_ctx": 128, "verbose": False, "trace": trace}
    with Hobbit(str(model), kv_overrides={"llama.expert_used_count": 6}, **options) as opened:
        opened("def f(x):", max_tokens=6, temperature=0)
        assert opened.stats().info.n_experts_used == 6
    assert read_trace(trace).n_used == 6
    done = run_pyhobbit("simulate", "--trace", trace, "--capacity", 0.5, "--json")
    assert json.loads(done.stdout)["n_used"] == 6


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("llama.expert_used_count", -1, "cannot be -1"),
        ("llama.expert_used_count", 2**32 + 2, "cannot be 4294967298"),
        ("llama.expert_used_count", 2.0, "is of type float and must be int"),
        ("llama.expert_used_count", True, "is of type bool and must be int"),
    ],
)
def test_an_impossible_override_is_named_and_the_file_not_blamed(
    key: str, value: logits.Override, reason: str
) -> None:
    with pytest.raises(HobbitError, match=f"the override of {key} {reason}") as error:
        Hobbit(str(models.tiny()), pools="6M", n_ctx=64, verbose=False, kv_overrides={key: value})
    assert "damaged" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"), [("expert_used_count", 9), ("expert_used_count", 0), ("block_count", 7)]
)
def test_an_error_that_an_override_may_cause_says_so(key: str, value: int) -> None:
    with pytest.raises(HobbitError, match=r"override of its metadata|blk.6.\S+ not found"):
        Hobbit(str(models.tiny()), pools="6M", n_ctx=64, verbose=False, kv_overrides={f"llama.{key}": value})


def test_an_override_of_a_number_by_layer_is_refused(uneven: Path) -> None:
    key = "nemotron_h_moe.expert_used_count"
    with pytest.raises(HobbitError, match=f"the override of {key} is one value"):
        Hobbit(str(uneven), pools="2M", n_ctx=64, verbose=False, kv_overrides={key: 3})
