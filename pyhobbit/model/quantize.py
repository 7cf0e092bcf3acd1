# SPDX-License-Identifier: MIT
"""ggml's tensor types and its own conversions between them."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from pyhobbit.errors import HobbitError, did_you_mean

# llama-quantize refuses these without an importance matrix, because the result would be garbage.
_WANTS_IMATRIX = frozenset({"iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs"})

_USUAL, _LARGEST = 1e3, 1e9  # weights: most types write zeros, or abort, somewhere between these
_LEAST_KEPT = 0.1  # share of a row's largest weight that a type has to keep
_Q2_0_BLOCK, _Q2_0_STEPS = 64, 2


@dataclass(frozen=True)
class GgmlType:
    """A tensor type of ggml: `block` values are stored in `size` bytes."""

    id: int
    name: str
    block: int
    size: int
    quantizable: bool
    wants_imatrix: bool

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.size / self.block

    def nbytes(self, n_values: int) -> int:
        return n_values // self.block * self.size


@cache
def _c() -> Any:  # loads libraries at the first use: a process may compute with those of another build
    from pyhobbit.native import hobbit_c

    return hobbit_c


@cache
def _types() -> dict[int, GgmlType]:
    # Blocks of no values mark the types that ggml has removed.
    present = (type_id for type_id in range(_c().lib.GGML_TYPE_COUNT) if _c().lib.ggml_blck_size(type_id) > 0)
    return {type_id: _describe(type_id) for type_id in present}


def _describe(type_id: int) -> GgmlType:
    name = _c().ffi.string(_c().lib.ggml_type_name(type_id)).decode()
    # ggml_quantize_chunk handles f32 and every type that can be turned back into floats.
    quantizable = name == "f32" or bool(_c().lib.ggml_get_type_traits(type_id).to_float)
    wants_imatrix = name in _WANTS_IMATRIX or _c().lib.ggml_quantize_requires_imatrix(type_id)
    sizes = _c().lib.ggml_blck_size(type_id), _c().lib.ggml_type_size(type_id)
    return GgmlType(type_id, name, *sizes, quantizable, wants_imatrix)


def type_of(type_id: int) -> GgmlType:
    return _types()[type_id]


def quantizable_types() -> list[GgmlType]:
    return [ggml_type for ggml_type in _types().values() if ggml_type.quantizable]


def type_by_name(name: str) -> GgmlType:
    """The quantisable type of that name, in any case. Raises HobbitError, which lists the names."""
    types = {ggml_type.name.lower(): ggml_type for ggml_type in quantizable_types()}
    if name.lower() not in types:
        hint = did_you_mean(name.lower(), types, f"choose one of {', '.join(types)}", 0.7)
        raise HobbitError(f"unknown type {name!r}: {hint}")
    return types[name.lower()]


def dequantize(ggml_type: GgmlType, data: np.ndarray, n_per_row: int) -> np.ndarray:
    """float32 rows [n_rows, n_per_row] of `data`, the bytes of whole rows of that type."""
    n_rows = data.nbytes // ggml_type.nbytes(n_per_row)
    if ggml_type.name == "f32":
        return data.view(np.float32).reshape(n_rows, n_per_row)
    rows = np.empty((n_rows, n_per_row), np.float32)
    to_float = _c().lib.ggml_get_type_traits(ggml_type.id).to_float
    to_float(_c().ffi.from_buffer(data), _c().ffi.from_buffer("float[]", rows), rows.size)
    return rows


def quantize(ggml_type: GgmlType, rows: np.ndarray, imatrix: np.ndarray | None) -> np.ndarray:
    """Bytes of float32 rows [n_rows, n_per_row], by imatrix [n_per_row]. Raises HobbitError out of range."""
    n_rows, n_per_row = rows.shape
    if not np.isfinite(rows).all():  # some of ggml's quantisers abort the process on these
        raise HobbitError("the weights contain values that are not finite: the model file is damaged")
    places = np.abs(rows).argmax(axis=1)[:, None]
    largest = np.take_along_axis(rows, places, 1)
    worst = largest.flat[np.abs(largest).argmax()]
    refusal = HobbitError(
        f"the weights exceed the range of {ggml_type.name}: choose another type; the largest is {worst:g}"
    )
    if ggml_type.block > 1 and abs(worst) > _LARGEST:
        raise refusal
    if ggml_type.name == "q2_0":
        data = _quantize_q2_0(rows, imatrix)
    else:
        data = np.empty(n_rows * ggml_type.nbytes(n_per_row), np.uint8)
        values, result = _c().ffi.from_buffer("float[]", rows), _c().ffi.from_buffer(data)
        weights = _c().ffi.NULL if imatrix is None else _c().ffi.from_buffer("float[]", imatrix)
        size = _c().lib.ggml_quantize_chunk(ggml_type.id, values, result, 0, n_rows, n_per_row, weights)
        if size != data.nbytes:
            raise refusal
    if not _c().lib.ggml_validate_row_data(ggml_type.id, _c().ffi.from_buffer(data), data.nbytes):
        raise refusal
    if abs(worst) > _USUAL:
        kept = np.take_along_axis(dequantize(ggml_type, data, n_per_row), places, 1)
        size = np.abs(largest)
        if ((size > _USUAL) & (kept * np.sign(largest) < _LEAST_KEPT * size)).any():
            raise refusal
    return data


def _quantize_q2_0(rows: np.ndarray, imatrix: np.ndarray | None) -> np.ndarray:
    """Blocks of a scale, of either sign, and its multiples -1 to 2, by least squares. ggml's quantiser takes
    the largest weight as the scale: the multiple 2 goes unused, and the error is twice as large."""
    values = rows.reshape(-1, _Q2_0_BLOCK)
    importance = np.ones(rows.shape[1], np.float32) if imatrix is None else imatrix
    weights = np.broadcast_to(importance, rows.shape).reshape(values.shape)
    weighted = weights * values
    with np.errstate(over="ignore", invalid="ignore"):  # scales that f16 cannot hold: the caller finds them
        size = np.sqrt(_sums(weighted, values) / _sums(weights, np.ones_like(values)))
        up, down = (_fit_q2_0(values, weights, weighted, scale) for scale in (size, -size))
    is_up = up[0] <= down[0]
    scales, codes = np.where(is_up, up[1], down[1]), np.where(is_up, up[2], down[2])
    quarters = codes.reshape(len(values), -1, 4) << np.array([0, 2, 4, 6], np.uint8)
    return np.hstack([scales.view(np.uint8), quarters.sum(2, dtype=np.uint8)]).ravel()


def _fit_q2_0(
    values: np.ndarray, weights: np.ndarray, weighted: np.ndarray, scale: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Errors, f16 scales and codes of the blocks, the best near `scale`."""
    for _ in range(_Q2_0_STEPS):
        multiple = _multiples(values, scale)
        norm = _sums(weights * multiple, multiple)
        scale = _sums(weighted, multiple) / np.where(norm, norm, 1)
    exact = scale.astype(np.float16)
    scale = exact.astype(np.float32)
    multiple = _multiples(values, scale)
    difference = values - multiple * scale
    return _sums(weights * difference, difference), exact, (multiple + 1).astype(np.uint8)


def _multiples(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(values / np.where(scale, scale, 1)), -1, 2)


def _sums(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sums of the products in each row."""
    return np.einsum("ij,ij->i", a, b)[:, None]
