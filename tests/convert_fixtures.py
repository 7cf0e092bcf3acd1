# SPDX-License-Identifier: MIT
"""Small mixture-of-experts GGUFs for the converter's tests, and an independent look at what it wrote."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import forked
import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from pyhobbit.model.quantize import quantize, type_by_name

CONVERT = (sys.executable, "-m", "pyhobbit", "convert")
N_LAYER, N_EMBD, N_FF, N_EXPERT = 2, 256, 512, 4
PARTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
ROUTED = [f"blk.{layer}.{part}" for layer in range(N_LAYER) for part in PARTS]


def write_moe(
    path: Path,
    expert_type: str = "f16",
    *,
    parts: Sequence[str] = PARTS,
    n_ff: int = N_FF,
    split_max_tensors: int = 0,
    expert_scale: float = 0.05,
    architecture: str = "llama",
    n_head: int = 4,
    tokens: Sequence[str] = ("<unk>", "é", "x" * 100),
    seed: int = 7,
) -> Path:
    """A random model with biases, in the shape that llama.cpp gives to mixtral; `parts` () makes it dense.

    With expert_scale 0 experts are bytes of 0: some types take half a minute to quantise anything.
    """
    random = np.random.default_rng(seed)
    writer = GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
    writer.add_block_count(N_LAYER)
    writer.add_context_length(64)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_expert_count(N_EXPERT)
    writer.add_expert_used_count(2)
    writer.add_float32("llama.rope.scale", 0.1)
    writer.add_token_list(tokens)
    writer.add_array("test.flags", [True, False])

    def add(name: str, *shape: int, type_name: str = "f32", scale: float = 0.05) -> None:
        values = random.standard_normal(shape, np.float32) * np.float32(scale)
        if type_name == "f32":
            writer.add_tensor(name, values)
            return
        ggml_type = type_by_name(type_name)
        data = np.zeros((*shape[:-1], ggml_type.nbytes(shape[-1])), np.uint8)
        if scale:
            rows = quantize(ggml_type, values.reshape(-1, shape[-1]), np.ones(shape[-1], np.float32))
            data = rows.reshape(data.shape)
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType(ggml_type.id))

    add("token_embd.weight", 32, N_EMBD, type_name="f16")
    shapes = {"ffn_down_exps": (N_EMBD, n_ff), "ffn_gate_up_exps": (2 * n_ff, N_EMBD)}
    for layer in range(N_LAYER):
        add(f"blk.{layer}.attn_norm.weight", N_EMBD)
        for part in parts:
            shape = shapes.get(part, (n_ff, N_EMBD))
            add(f"blk.{layer}.{part}.weight", N_EXPERT, *shape, type_name=expert_type, scale=expert_scale)
            add(f"blk.{layer}.{part}.bias", N_EXPERT, shape[0])
        add(f"blk.{layer}.ffn_gate_inp.weight", N_EXPERT, N_EMBD)
    add("output_norm.weight", N_EMBD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensor_bytes(path: Path) -> dict[str, np.ndarray]:
    """Name -> bytes, as the gguf package reads them."""
    return {tensor.name: tensor.data.view(np.uint8).ravel() for tensor in GGUFReader(path).tensors}


def tensor_values(path: Path) -> dict[str, np.ndarray]:
    """Name -> float32, dequantised by the gguf package."""
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in GGUFReader(path).tensors
    }


def values_of(path: Path, key: str) -> object:
    field = GGUFReader(path).get_field(key)
    return None if field is None else field.contents()


def write_imatrix(path: Path, importance: dict[str, np.ndarray], counts: Sequence[float]) -> Path:
    """Writes what llama-imatrix writes: sums of squares [n_expert, n_in] and the uses of each expert."""
    writer = GGUFWriter(path, "imatrix")
    writer.add_array("imatrix.datasets", ["test"])
    for name, sums in importance.items():
        writer.add_tensor(f"{name}.in_sum2", sums.astype(np.float32))
        writer.add_tensor(f"{name}.counts", np.array(counts, np.float32).reshape(-1, 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def run_converter(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    if not options:
        return forked.PYHOBBIT.run(["convert", *arguments], timeout=300)
    command = [*CONVERT, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **options)
