# SPDX-License-Identifier: MIT
"""GGUF files of random weights: what a model declares, and how it is written.

Everything follows from the seed. Quantisation is ggml's own, through libggml-base.so. Tensors are made and
written one at a time. Large ones repeat randomly chosen rows of a small pool, so that a model of many
gigabytes is written at about the speed of the disk.
"""

from __future__ import annotations

import ctypes
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, TokenType
from tqdm import tqdm

POOL_ROWS = 512
FIRST_PIECE = 259  # after <unk>, <s>, </s> and the 256 bytes


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. `n_ff` is one routed expert's; `n_ff_dense` a dense layer's or a shared expert's."""

    n_layer: int = 3
    n_embd: int = 256
    n_head: int = 4
    n_head_kv: int = 2
    n_ff: int = 256
    n_ff_dense: int = 512
    n_expert: int = 8
    n_used: int = 2
    n_vocab: int = 512
    n_ctx: int = 2048


@dataclass(frozen=True)
class Tensor:
    """One tensor to write: `ne` in ggml's order, values drawn from N(mean, std^2).

    With `choices`, each row has different int32 values below that. The first `n_zero` rows are zero."""

    name: str
    ne: tuple[int, ...]
    type: GGMLQuantizationType
    std: float
    mean: float = 0.0
    choices: int = 0
    n_zero: int = 0

    @property
    def n_rows(self) -> int:
        return int(np.prod(self.ne[1:], dtype=np.int64))

    @property
    def row_bytes(self) -> int:
        block, size = GGML_QUANT_SIZES[self.type]
        if self.ne[0] % block:
            raise ValueError(
                f"{self.name}: rows of {self.ne[0]} are not a multiple of {self.type.name}'s {block}"
            )
        return self.ne[0] // block * size


@dataclass
class Model:
    """Collects what an architecture's function declares: metadata keys and tensors, in file order."""

    arch: str
    shape: Shape
    expert_types: list[GGMLQuantizationType]
    dense_type: GGMLQuantizationType
    keys: dict[str, bool | int | float | list[int]] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    n_expert_tensors: int = 0

    def key(self, name: str, value: bool | int | float | list[int]) -> None:
        self.keys[f"{self.arch}.{name}"] = value

    def vector(self, name: str, n: int, mean: float = 0.0, std: float = 0.1) -> None:
        self.tensors.append(Tensor(name, (n,), GGMLQuantizationType.F32, std, mean))

    def norm(self, name: str, n: int) -> None:
        self.vector(name, n, mean=1.0)

    def matrix(self, name: str, *ne: int, gain: float = 1.0) -> None:
        self.tensors.append(Tensor(name, ne, self.dense_type, gain / ne[0] ** 0.5))

    def router(self, layer: int, std: float = 1.5) -> None:
        """Logits of about N(0, std^2) on a normalised input: varied and not saturated."""
        s = self.shape
        name = f"blk.{layer}.ffn_gate_inp.weight"
        self.tensors.append(
            Tensor(name, (s.n_embd, s.n_expert), GGMLQuantizationType.F32, std / s.n_embd**0.5)
        )

    def experts(self, layer: int, part: str, n_in: int, n_out: int) -> None:
        """The given types are taken in turn, so that more than one mixes types within and between layers."""
        kind = self.expert_types[self.n_expert_tensors % len(self.expert_types)]
        self.n_expert_tensors += 1
        name = f"blk.{layer}.ffn_{part}_exps.weight"
        self.tensors.append(Tensor(name, (n_in, n_out, self.shape.n_expert), kind, n_in**-0.5))


class Quantizer:
    """ggml's own quantisation, from the libggml-base.so in `lib_dir`."""

    def __init__(self, lib_dir: Path) -> None:
        self._chunk = ctypes.CDLL(str(lib_dir / "libggml-base.so")).ggml_quantize_chunk
        self._chunk.restype = ctypes.c_size_t
        self._chunk.argtypes = [
            ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
            ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
        ]  # fmt: skip

    def rows(self, values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
        """values: float32 [n_rows, n]; returns uint8 [n_rows, bytes per row] in type `kind`."""
        n_rows, n = values.shape
        block, size = GGML_QUANT_SIZES[kind]
        out = np.empty((n_rows, n // block * size), np.uint8)
        importance = np.ones(n, np.float32)  # some types insist on one
        written = self._chunk(
            int(kind), values.ctypes.data, out.ctypes.data, 0, n_rows, n, importance.ctypes.data
        )
        if written != out.nbytes:
            raise RuntimeError(
                f"ggml_quantize_chunk wrote {written} bytes of {kind.name} instead of {out.nbytes}"
            )
        return out


def _tensor_data(t: Tensor, seed: int, quantizer: Quantizer, most_made: int = 16 * POOL_ROWS) -> np.ndarray:
    """uint8 [..., bytes per row], reproducible from the seed and the tensor's name alone."""
    rng = np.random.default_rng([seed, zlib.crc32(t.name.encode())])
    if t.choices:
        return rng.random((t.n_rows, t.choices)).argsort()[:, : t.ne[0]].astype(np.int32).view(np.uint8)
    n_made = min(t.n_rows, POOL_ROWS) if t.n_rows > most_made else t.n_rows
    values = t.mean + t.std * rng.standard_normal((n_made, t.ne[0]), np.float32)
    data = quantizer.rows(np.ascontiguousarray(values, np.float32), t.type)
    if n_made < t.n_rows:
        data = data[rng.integers(0, n_made, t.n_rows)]
    data[: t.n_zero] = 0
    return data.reshape(*reversed(t.ne[1:]), t.row_bytes)


def add_tokenizer(writer: GGUFWriter, n_vocab: int, n_letters: int = 2) -> None:
    """A SentencePiece vocabulary of all bytes and pieces of one or two letters: any text tokenises."""
    if n_vocab < FIRST_PIECE:
        raise ValueError(f"a vocabulary of {n_vocab} is below the {FIRST_PIECE} byte and control tokens")
    letters = "abcdefghijklmnopqrstuvwxyz \u2581ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    pieces = [a + b for a in letters for b in letters] if n_letters == 2 else list(letters + ".,:;!?-")
    pieces += [f"<extra{i}>" for i in range(n_vocab)]
    pieces = pieces[: n_vocab - FIRST_PIECE]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)] + pieces)
    writer.add_token_scores([0.0] * FIRST_PIECE + [-float(i) for i in range(len(pieces))])
    writer.add_token_types(
        [TokenType.UNKNOWN]
        + [TokenType.CONTROL] * 2
        + [TokenType.BYTE] * 256
        + [TokenType.NORMAL] * len(pieces)
    )
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write_model(model: Model, path: Path, lib_dir: Path, seed: int = 1, progress: bool = False) -> None:
    """Writes `model` to `path` through a temporary name. Memory needed: one tensor."""
    quantizer = Quantizer(lib_dir)
    part = path.with_name(path.name + ".part")
    total = sum(t.n_rows * t.row_bytes for t in model.tensors)
    try:
        writer = _write_header(model, part)
        with tqdm(total=total, unit="B", unit_scale=True, disable=not progress) as bar:
            for t in model.tensors:
                writer.write_tensor_data(_tensor_data(t, seed, quantizer))
                bar.update(t.n_rows * t.row_bytes)
        writer.close()
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_header(model: Model, path: Path) -> None:
    """Writes `model` with a hole in place of its weights: a file of any size, which takes no room."""
    writer = _write_header(model, path)
    writer.close()
    with path.open("ab") as file:
        sizes = [file.tell(), *(t.n_rows * t.row_bytes for t in model.tensors)]
        file.truncate(sum(writer.ggml_pad(size, writer.data_alignment) for size in sizes))


def write_tensors(writer: GGUFWriter, tensors: list[Tensor], quantizer: Quantizer, seed: int = 1) -> None:
    """Adds the tensors to a writer that has all keys, and closes it. Memory needed: one tensor."""
    _write_infos(writer, tensors)
    for t in tensors:
        writer.write_tensor_data(_tensor_data(t, seed, quantizer, POOL_ROWS))
    writer.close()


def _write_infos(writer: GGUFWriter, tensors: list[Tensor]) -> None:
    for t in tensors:
        byte_shape = (*reversed(t.ne[1:]), t.row_bytes)
        writer.add_tensor_info(t.name, byte_shape, np.dtype(np.uint8), t.n_rows * t.row_bytes, t.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def _write_header(model: Model, path: Path) -> GGUFWriter:
    """A writer that expects the tensors' data next, in their order."""
    writer = GGUFWriter(path, model.arch)
    writer.add_name(f"random {model.arch}")
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for name, value in model.keys.items():
        add[type(value)](name, value)
    add_tokenizer(writer, model.shape.n_vocab)
    _write_infos(writer, model.tensors)
    return writer
