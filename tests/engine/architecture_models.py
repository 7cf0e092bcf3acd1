# SPDX-License-Identifier: MIT
"""A small random-weight GGUF of any MoE architecture of llama.cpp, from its hyper-parameters alone.

llama.cpp's own loader says which tensors such a model has: it is asked to make a model in memory from the
metadata (llama_model_init_from_user), and names every tensor with its shape. Random values are then written
in a file that llama.cpp loads as any other. Routed experts are quantised, all else is f32.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import random_weights
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

N_LAYER = 4
N_EMBD = 256
N_FF = 256
N_VOCAB = 320
N_EXPERT = 8
N_USED = 2
N_CTX = 512

Value = bool | int | float | str | list[int] | list[float] | list[bool] | tuple[int, ...]  # a tuple: uint64

EXPERT_TYPES = tuple(GGMLQuantizationType[name] for name in ("F16", "Q8_0", "Q4_0", "Q5_0", "Q4_K"))
EXPERTS = re.compile(r"\.ffn_(gate|up|down|gate_up)_exps\.weight$")
NOTHING = "(?!)"  # a pattern
# keys that only some models of an architecture have
_LEFT_OUT = re.compile(r"rope_freqs|rope_factors|\.scale$|\.input_scale$")


@dataclass(frozen=True)
class Architecture:
    """Hyper-parameters by name, without the architecture's prefix, beside or in place of COMMON's.

    kept: a pattern of the optional tensors that other models here lack.
    letters: whether its pieces are letters, so that a text's tokens are those that wrote it.
    at_once: its attention is not causal, so that llama.cpp takes a prompt in one micro-batch.
    embeds: it gives embeddings and no logits.
    """

    keys: dict[str, Value] = field(default_factory=dict)
    kept: str = NOTHING
    at_once: bool = False
    embeds: bool = False
    letters: bool = False


@dataclass(frozen=True)
class Tensor:
    name: str
    ne: tuple[int, ...]


COMMON: dict[str, Value] = {
    "vocab_size": N_VOCAB,
    "context_length": N_CTX,
    "embedding_length": N_EMBD,
    "block_count": N_LAYER,
    "feed_forward_length": N_FF,
    "expert_count": N_EXPERT,
    "expert_used_count": N_USED,
    "expert_feed_forward_length": N_FF,
    "expert_shared_feed_forward_length": 128,
    "expert_shared_count": 1,
    "expert_gating_func": 2,
    "leading_dense_block_count": 1,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}


def _add(writer: GGUFWriter, key: str, value: Value) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if isinstance(value, tuple):
        writer.add_key_value(key, list(value), GGUFValueType.ARRAY, GGUFValueType.UINT64)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        kinds[type(value)](key, value)


def metadata_writer(name: str, architecture: Architecture, path: Path) -> GGUFWriter:
    """A writer of the model's keys and vocabulary, which expects tensors next."""
    writer = GGUFWriter(path, name)
    for key, value in (COMMON | architecture.keys).items():
        _add(writer, key if key.startswith("tokenizer.") else f"{name}.{key}", value)
    random_weights.add_tokenizer(writer, N_VOCAB, 1 if architecture.letters else 2)
    return writer


def write_metadata(name: str, architecture: Architecture, path: Path) -> None:
    """Writes a file without tensors, for wanted_tensors."""
    _write(metadata_writer(name, architecture, path))


def _write(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class _Head(ctypes.Structure):
    """The first fields of ggml_tensor."""

    _fields_ = (("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4))


def expected_tensors(llama: Any, lib_dir: Path, metadata: Path) -> list[Tensor]:
    """The tensors of a model with this metadata, optional ones too, as llama.cpp's loader names them."""
    base = ctypes.CDLL(str(lib_dir / "libggml-base.so"))
    base.ggml_get_name.restype, base.ggml_get_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    base.gguf_init_from_file.restype = ctypes.c_void_p
    base.gguf_init_from_file.argtypes = [ctypes.c_char_p, _GgufParams]
    base.gguf_free.argtypes = [ctypes.c_void_p]
    params = llama.llama_model_default_params()
    params.load_mtp = True  # a model without draft layers has none then
    found: dict[str, Tensor] = {}

    def note(tensor: int, _: int) -> None:
        name = base.ggml_get_name(tensor).decode()
        ne = list(_Head.from_address(tensor).ne)
        while len(ne) > 1 and ne[-1] == 1:
            ne.pop()
        found[name] = Tensor(name, tuple(ne))

    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
    make = llama._lib.llama_model_init_from_user
    make.restype = ctypes.c_void_p
    make.argtypes = [ctypes.c_void_p, callback, ctypes.c_void_p, llama.llama_model_params]
    context = base.gguf_init_from_file(bytes(metadata), _GgufParams(True, None))
    model = make(context, callback(note), None, params)
    base.gguf_free(context)
    if not model:
        raise ValueError(f"llama.cpp makes no model from {metadata.name}")
    llama.llama_model_free(model)
    return list(found.values())


def wanted_tensors(llama: Any, lib_dir: Path, architecture: Architecture, metadata: Path) -> list[Tensor]:
    """The expected tensors without optional ones, but with those that the architecture keeps."""
    return [
        tensor
        for tensor in expected_tensors(llama, lib_dir, metadata)
        if not _LEFT_OUT.search(tensor.name) or re.search(architecture.kept, tensor.name)
    ]


class _GgufParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def _values(tensor: Tensor, rng: np.random.Generator) -> np.ndarray:
    """Data of the tensor's shape, last dimension first: int32 ids, or float32 that keeps activations'
    size."""
    shape = tuple(reversed(tensor.ne))
    if tensor.name.endswith("ffn_gate_tid2eid.weight"):  # experts by token
        return np.stack([rng.permutation(N_EXPERT)[: shape[1]] for _ in range(shape[0])]).astype(np.int32)
    noise = rng.standard_normal(shape, np.float32)
    if tensor.name.endswith(".ssm_a"):
        return -np.abs(noise) - np.float32(0.1)  # a decay
    if tensor.name.endswith(("norm.weight", "_norm", ".scale", "rope_freqs.weight")):
        return 1 + np.float32(0.1) * noise
    if ".ffn_gate_inp" in tensor.name:
        return noise * np.float32(1.5 / tensor.ne[0] ** 0.5)
    if tensor.name == "token_embd.weight":
        return noise
    if len(tensor.ne) == 1:
        return np.float32(0.1) * noise
    return noise * np.float32(tensor.ne[0] ** -0.5)


def _experts(tensors: list[Tensor]) -> Iterator[tuple[Tensor, GGMLQuantizationType]]:
    routed = [tensor for tensor in tensors if EXPERTS.search(tensor.name)]
    for i, tensor in enumerate(routed):
        yield tensor, EXPERT_TYPES[i % len(EXPERT_TYPES)]


def write_model(llama: Any, lib_dir: Path, name: str, architecture: Architecture, path: Path) -> None:
    """llama: the module llama_cpp.llama_cpp, with the unpatched library in `lib_dir`."""
    write_metadata(name, architecture, path)
    tensors = wanted_tensors(llama, lib_dir, architecture, path)
    writer = metadata_writer(name, architecture, path)
    types = {tensor.name: kind for tensor, kind in _experts(tensors)}
    quantizer = random_weights.Quantizer(lib_dir)
    rng = np.random.default_rng(7)
    for tensor in tensors:
        values = _values(tensor, rng)
        kind = types.get(tensor.name)
        if kind:
            rows = quantizer.rows(np.ascontiguousarray(values.reshape(-1, tensor.ne[0])), kind)
            writer.add_tensor(tensor.name, rows.reshape(*values.shape[:-1], -1), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, values)
    _write(writer)
