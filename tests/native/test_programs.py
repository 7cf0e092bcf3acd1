# SPDX-License-Identifier: MIT
"""llama.cpp's programs and adapters on models of the cache: what would go wrong in silence is refused."""

import subprocess
from pathlib import Path

import models
import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from hobbits import open_model

from pyhobbit.errors import HobbitError


def test_a_file_with_tiers_is_not_quantized(tiny_gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    command = [models.bin_dir() / "llama-quantize", tiny_gguf, out, "q8_0", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "quantize the model that it was made from" in done.stdout + done.stderr
    assert not out.exists()


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
