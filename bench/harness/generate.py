# SPDX-License-Identifier: MIT
"""Random-weight MoE models of real shapes, written at about the speed of the disk.

Each kind of matrix has one pool of quantised random blocks. Every tensor is the pool, repeated, from a place
of its own: the weights of two experts differ, though their blocks are the same.
"""

import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
from gguf.constants import GGUFValueType, TokenType
from tqdm import tqdm

from bench.harness.shapes import Kind, RandomTensor, Shape, metadata, tensors
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.model.gguf_file import (
    KeyValue,
    Placement,
    align,
    numbers_entry,
    pack_header,
    read_gguf,
    scalar_entry,
    string_entry,
    strings_entry,
    tensor_nbytes,
)
from pyhobbit.model.quantize import GgmlType, quantize, type_by_name
from pyhobbit.model.tiers import ALIGNMENT, LOW, routed_part, sidecar_metadata, tier_tensor_name
from pyhobbit.native.files import atomic_output

_MODEL_ALIGNMENT = 32  # GGUF's default: what most published files have
_POOL_ROWS, _ROW = 2039, 2048  # a prime number of rows, which no expert's size divides
_SEED = 1
_BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
_FREE_BYTES = 64 << 20


def model_path(folder: Path, name: str, shape: Shape, kind: str, *, holes: bool = False) -> Path:
    """The path of write_model's file, whose name tells what is in it."""
    return folder / f"{name}-{shape.n_layer}x-{kind}{'-holes' * holes}.gguf"


def write_model(folder: Path, name: str, shape: Shape, kind: str, *, holes: bool = False) -> Path:
    """The model with all matrices in type `kind`, taken as it is where it exists. Raises HobbitError.

    holes: its weights are zeros that take no place on the disk.
    """
    path = model_path(folder, name, shape, kind, holes=holes)
    entries = [
        string_entry("general.architecture", shape.arch),
        string_entry(
            "general.name", "random weights"
        ),  # by the names of some models llama.cpp knows their vocabulary
        *(_number_entry(key, value) for key, value in metadata(shape).items()),
        *_tokenizer(shape.n_vocab),
    ]
    both = type_by_name(kind)
    _write(path, entries, tensors(shape), {"expert": both, "matrix": both}, _MODEL_ALIGNMENT, holes=holes)
    return path


def write_low_tier(model: Path, shape: Shape, kind: str) -> Path:
    """A sidecar with the experts in type `kind`, as random as those of the model. Raises HobbitError."""
    path = model.with_name(f"{model.stem}.low-{kind}.gguf")
    low = [
        RandomTensor(tier_tensor_name(part, LOW, 0), t.ne, "expert", t.std)
        for t in tensors(shape)
        if (part := routed_part(t.name))
    ]
    _write(path, sidecar_metadata(read_gguf(model)), low, {"expert": type_by_name(kind)}, ALIGNMENT)
    return path


def _number_entry(key: str, value: int | float) -> KeyValue:
    kind = GGUFValueType.UINT32 if isinstance(value, int) else GGUFValueType.FLOAT32
    return scalar_entry(key, kind, value)


def _tokenizer(n_vocab: int) -> list[KeyValue]:
    """A vocabulary of all bytes and of pieces that no text contains."""
    tokens = ["<unk>", "<s>", "</s>", *_BYTE_TOKENS]
    types = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * len(_BYTE_TOKENS)]
    n_more = n_vocab - len(tokens)
    types += [TokenType.NORMAL] * n_more
    tokens += [f"\u2581piece{i}\u2581" for i in range(n_more)]
    return [
        string_entry("tokenizer.ggml.model", "llama"),
        strings_entry("tokenizer.ggml.tokens", tokens),
        numbers_entry("tokenizer.ggml.scores", GGUFValueType.FLOAT32, [0.0] * n_vocab),
        numbers_entry("tokenizer.ggml.token_type", GGUFValueType.INT32, types),
        scalar_entry("tokenizer.ggml.bos_token_id", GGUFValueType.UINT32, 1),
        scalar_entry("tokenizer.ggml.eos_token_id", GGUFValueType.UINT32, 2),
    ]


#
# data
#


def _write(
    path: Path,
    entries: Sequence[KeyValue],
    wanted: Sequence[RandomTensor],
    types: dict[Kind, GgmlType],
    alignment: int,
    *,
    holes: bool = False,
) -> None:
    types = {**types, "f32": type_by_name("f32")}
    # a file of other weights is not taken for this one
    entries = [*entries, string_entry("general.version", f"{zlib.crc32(repr(wanted).encode()):08x}")]
    placements, offset = [], 0
    for t in wanted:
        kind = types[t.kind]
        if t.ne[0] % kind.block:
            raise ConfigError(
                f"{path.name} cannot be made: rows of {t.ne[0]} values are not whole blocks of {kind.name} "
                f"({kind.block} values); choose another type, like q4_0"
            )
        placements.append(Placement(t.name, kind, t.ne, offset))
        offset = align(offset + tensor_nbytes(kind, t.ne), alignment)
    header = pack_header(entries, placements, alignment)
    if _holds(path, header, len(header) + offset):
        return
    _check_disk(path, len(header) + (0 if holes else offset))
    with atomic_output(path) as temporary, temporary.open("wb") as file:
        file.write(header)
        if holes:
            file.truncate(len(header) + offset)
            return
        with tqdm(total=offset, desc=path.name, unit="B", unit_scale=True, leave=False, disable=None) as bar:
            for t, placement in zip(wanted, placements, strict=True):
                size = tensor_nbytes(placement.type, t.ne)
                _write_tensor(file, _pool(placement.type, t.std, t.mean), t.name, size, bar.update)
                file.write(bytes(align(size, alignment) - size))
        file.flush()
        os.fsync(file.fileno())


def _holds(path: Path, header: bytes, size: int) -> bool:
    if not path.exists() or path.stat().st_size != size:
        return False
    with path.open("rb") as file:
        return file.read(len(header)) == header


def _check_disk(path: Path, size: int) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path.parent).free
    except OSError as e:
        raise HobbitError(f"{path.parent} cannot be used: {e.strerror}; choose another --folder") from e
    if size + _FREE_BYTES > free:
        raise HobbitError(
            f"{path.name} takes {size / 1e9:.1f} GB and {path.parent} has {free / 1e9:.1f} GB left; "
            "choose another --folder, or fewer --layers"
        )


@cache
def _pool(kind: GgmlType, std: float, mean: float) -> np.ndarray:
    """uint8 blocks of random values, reproducible from the arguments alone."""
    rng = np.random.default_rng([_SEED, kind.id, zlib.crc32(f"{std} {mean}".encode())])
    values = mean + std * rng.standard_normal((_POOL_ROWS, _ROW), np.float32)
    importance = np.ones(_ROW, np.float32) if kind.wants_imatrix else None
    return quantize(kind, values.astype(np.float32, copy=False), importance)


def _write_tensor(
    file: BinaryIO, pool: np.ndarray, name: str, size: int, progress: Callable[[int], object]
) -> None:
    row_bytes = pool.size // _POOL_ROWS
    start = zlib.crc32(name.encode()) % _POOL_ROWS * row_bytes
    left = size
    while left:
        piece = pool[start : start + left]
        file.write(piece.data)
        progress(piece.size)
        left -= piece.size
        start = 0
