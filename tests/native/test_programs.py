# SPDX-License-Identifier: MIT
"""llama.cpp's programs and adapters on models of the cache: what would go wrong in silence is refused."""

import csv
import functools
import json
import os
import re
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

import models
import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from hobbits import open_model
from servers import serving

from pyhobbit.errors import HobbitError

pytestmark = pytest.mark.model


def test_a_file_with_tiers_is_not_quantized(tiny_gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    command = [models.bin_dir() / "llama-quantize", tiny_gguf, out, "q8_0", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "quantize the model that it was made from" in done.stdout + done.stderr
    assert not out.exists()


def test_another_llama_cpp_in_the_path_is_not_taken(tiny_gguf: Path) -> None:
    """Its libraries have the names of ours, and our libllama would run on them until it crashed."""
    command = [sys.executable, "-m", "pyhobbit", "chat", tiny_gguf, "--pools", "5M", "-p", "x", "-n", "4"]
    environment = os.environ | {"LD_LIBRARY_PATH": str(models.stock_dir())}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def write_adapter(model: Path, tensor: str, path: Path) -> None:
    """A LoRA adapter of rank 4 for one of the model's tensors."""
    (shape,) = [[int(n) for n in t.shape] for t in GGUFReader(model).tensors if t.name == tensor]
    writer = GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    experts = shape[2:]
    writer.add_tensor(f"{tensor}.lora_a", np.ones((*experts, 4, shape[0]), np.float32))
    writer.add_tensor(f"{tensor}.lora_b", np.ones((*experts, shape[1], 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_an_adapter_for_experts_in_the_cache_is_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    write_adapter(tiny_gguf, "blk.0.ffn_up_exps.weight", tmp_path / "experts.gguf")
    with pytest.raises(HobbitError, match="LoRA adapters on routed experts are not supported"):
        open_model(tiny_gguf, lora_path=str(tmp_path / "experts.gguf"))
    with open_model(tiny_gguf) as model:  # the process goes on
        assert model("x", max_tokens=1)["choices"]


def test_an_adapter_for_other_weights_is_taken(tiny_gguf: Path, tmp_path: Path) -> None:
    write_adapter(tiny_gguf, "blk.0.attn_q.weight", tmp_path / "attention.gguf")
    with open_model(tiny_gguf, lora_path=str(tmp_path / "attention.gguf")) as model:
        assert model("x", max_tokens=1)["choices"]


#
# llama.cpp's own options and programs
#


@functools.cache
def _tiers() -> Path:
    return models.tiny_tiers("q8_0", "q4_0")


@functools.cache
def _served(folder: Path, *options: str) -> tuple[str, dict[str, float], int]:
    """The text, the cache's counters, and the bytes of memory that the server has locked."""
    with serving(
        _tiers(), folder / "log", "--pools", "3M", "--prefetch", "0", "--parallel", "1", *options
    ) as server:
        text, cache = server.complete(), server.cache()
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        return text, cache, 1024 * int(re.search(r"VmLck:\s*(\d+) kB", status)[1])


COUNTERS = ("hits_high", "misses_high", "evictions", "bytes_read")


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, float], int]:
    return _served(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    "options",
    [("--cpu-moe",), ("--n-cpu-moe", "2"), ("--override-tensor", "exps=CPU"), ("--load-mode", "mlock")],
    ids=lambda options: options[0].strip("-"),
)
def test_options_for_experts_leave_them_in_the_cache(
    plain_run: tuple[str, dict[str, float], int], tmp_path: Path, options: tuple[str, ...]
) -> None:
    text, cache, locked = _served(tmp_path, *options)
    assert text == plain_run[0]
    assert {name: cache[name] for name in COUNTERS} == {name: plain_run[1][name] for name in COUNTERS}
    assert cache["misses_high"] > 0
    assert locked < _tiers().stat().st_size // 2  # most of the file are experts
    if (
        options[0] == "--load-mode"
        and resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY
    ):
        assert locked > 0


def test_llama_bench_runs_a_file_with_tiers() -> None:
    command = [models.bin_dir() / "llama-bench", "-m", _tiers(), "-p", "16", "-n", "8", "-r", "2", "-t", "2"]
    done = subprocess.run([*command, "-o", "json"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["n_prompt"], row["n_gen"]) for row in rows] == [(16, 0), (0, 8)]
    assert all(len(row["samples_ts"]) == 2 and min(row["samples_ts"]) > 0 for row in rows)


def _importance(folder: Path, model: Path, out: Path, *options: str) -> dict[str, np.ndarray]:
    command = [folder / "llama-imatrix", "-m", model, "-f", models.TINY / "heldout.txt", "-o", out, "-t", "2"]
    command += ["-c", "64", "--chunks", "2", "--no-ppl", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {tensor.name: np.array(tensor.data) for tensor in GGUFReader(out).tensors}


def test_llama_imatrix_counts_as_stock(tmp_path: Path) -> None:
    trace = tmp_path / "used.csv"
    cache = f"hobbit.enable=bool:true,hobbit.pools=int:3000000,hobbit.trace=str:{trace}"
    options = ("--no-repack", "--override-kv", cache)
    ours = _importance(models.bin_dir(), models.tiny(), tmp_path / "ours.gguf", *options)
    stock = _importance(models.stock_dir(), models.tiny(), tmp_path / "stock.gguf", "--no-repack")
    assert sum("exps" in name for name in stock) > 0
    assert ours.keys() == stock.keys()
    for name, values in stock.items():
        np.testing.assert_array_equal(ours[name], values, err_msg=name)
    counted = {name: stock[f"{name}.counts"].ravel() for name in _expert_inputs(stock)}
    assert len(counted) == 6
    rows = csv.DictReader(line for line in trace.read_text().splitlines() if not line.startswith("#"))
    used = Counter((int(row["layer"]), int(row["expert"])) for row in rows)  # by the cache's own record
    for name, counts in counted.items():
        layer = int(name.split(".")[1])
        assert [used[layer, expert] for expert in range(8)] == counts.tolist(), name


def _expert_inputs(tensors: dict[str, np.ndarray]) -> list[str]:
    """A name for each layer with experts."""
    ending = ".ffn_up_exps.weight.counts"
    return [name.removesuffix(".counts") for name in tensors if name.endswith(ending)]
