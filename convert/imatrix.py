# SPDX-License-Identifier: MIT
"""Importance matrices as llama-imatrix writes them."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pyhobbit.errors import HobbitError
from pyhobbit.model.gguf_file import GgufFile, TensorInfo, read_gguf
from pyhobbit.model.tiers import routed_part

_GATE_UP = re.compile(r"(\.ffn_)(?:gate_up|gate|up)(_exps\.)")
_USUAL_DIGITS, _LEAST = 10, 1e-8  # decimal digits of a row's mean, and a share of it
_SUMS, _COUNTS = ".in_sum2", ".counts"

Imatrix = Mapping[str, np.ndarray]
"""Tensor name -> float32 [n_expert, n_per_row]; n_expert is 1 for tensors that are no expert tensors."""


def read_imatrix(path: Path, tensors: Sequence[TensorInfo]) -> dict[str, np.ndarray]:
    """The importance of inputs of those `tensors` that the file knows. Raises HobbitError."""
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError("another format")
        entries = _read_gguf_entries(read_gguf(path))
    except OSError as error:
        raise HobbitError(f"cannot read the importance matrix {path}: {error.strerror}") from error
    except ValueError as error:
        raise HobbitError(
            f"{path} is no readable importance matrix: make one with pyhobbit llama imatrix, which also "
            "makes one of an older file by --in-file OLD.dat -o NEW.gguf"
        ) from error
    shapes = {tensor.name: (tensor.ne[2] if len(tensor.ne) > 2 else 1, tensor.ne[0]) for tensor in tensors}
    known: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        # Gate and up have the same inputs, in one tensor or in two.
        others = (_GATE_UP.sub(rf"\1{part}\2", name) for part in ("gate_up", "gate", "up"))
        found = next((each for each in (name, *others) if each in entries), None)
        if found is not None:
            if entries[found].size != shape[0] * shape[1]:
                raise HobbitError(
                    f"{path} has {entries[found].size} values for {found!r}, not {shape[0]} x {shape[1]}: "
                    "it was made from another model"
                )
            values = np.ascontiguousarray(entries[found].reshape(shape), np.float32)
            if not np.isfinite(values).all():
                raise HobbitError(f"{path} has values that are not finite for tensor {name!r}: make it again")
            known[name] = _usable(values)
    if not any(map(routed_part, known)):
        raise HobbitError(f"{path} has no values for the experts: it was made from another model")
    return known


def _usable(values: np.ndarray) -> np.ndarray:
    """Rows without zeros, and of a size at which products of floats are floats: ggml's quantisers make zeros
    of weights that do not count. A row of zeros becomes ones."""
    mean = values.mean(axis=1, dtype=np.float64, keepdims=True)
    is_empty = mean < np.finfo(np.float32).tiny
    mean = np.where(is_empty, 1, mean)
    # A power of two keeps the digits.
    power = np.where(np.abs(np.log10(mean)) > _USUAL_DIGITS, -np.floor(np.log2(mean)), 0).astype(np.int32)
    rows = np.maximum(np.ldexp(values.astype(np.float64), power), _LEAST * np.ldexp(mean, power))
    return np.where(is_empty, 1, rows).astype(np.float32)


def _read_gguf_entries(file: GgufFile) -> dict[str, np.ndarray]:
    tensors = {tensor.name: tensor for tensor in file.tensors}
    entries = {}
    for name in tensors:
        if name.endswith(_SUMS):
            tensor_name = name.removesuffix(_SUMS)
            if tensor_name + _COUNTS not in tensors:
                raise ValueError("sums without counts")
            counts = _values(tensors[tensor_name + _COUNTS])
            sums = _values(tensors[name]).reshape(counts.size, -1)
            # An expert that was never used has no sums: all its inputs count the same, as in llama-quantize.
            used = counts[:, None] > 0
            with np.errstate(over="ignore"):  # values that are not finite are refused later
                entries[tensor_name] = np.where(used, sums / np.where(used, counts[:, None], 1), 1).ravel()
    if not entries:
        raise ValueError("no entries")
    return entries


def _values(tensor: TensorInfo) -> np.ndarray:
    if tensor.type.name != "f32":
        raise ValueError("not f32")
    return np.fromfile(tensor.path, np.float32, tensor.nbytes // 4, offset=tensor.offset)
