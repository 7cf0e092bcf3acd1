# SPDX-License-Identifier: MIT
"""Checks types of residuals: one is added to the low tier's weights, and the sum must come close."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from pyhobbit.errors import HobbitError
from pyhobbit.model.gguf_file import TensorInfo, tensor_nbytes
from pyhobbit.model.quantize import GgmlType, dequantize, quantize

_ROWS, _COLUMNS = 16, 2048  # whole blocks of every type
_MOST_LEFT = 0.5  # share of the low tier's error; with more, a residual is not worth its bytes


@cache
def relative_error(ggml_type: GgmlType) -> float:
    """Relative root mean square error of random normal rows in that type. Reproducible."""
    rows = np.random.default_rng(0).standard_normal((_ROWS, _COLUMNS), np.float32)
    data = quantize(ggml_type, rows, np.ones(_COLUMNS, np.float32))
    return float(np.linalg.norm(dequantize(ggml_type, data, _COLUMNS) - rows) / np.linalg.norm(rows))


def check_residual_types(routed: Sequence[TensorInfo], low: GgmlType, residual: GgmlType) -> None:
    """Raises HobbitError where experts in `low` and a residual in that type are of no use.

    routed: the routed experts' tensors that both are made from.
    """
    for tensor in routed:
        if tensor.type == low:
            raise HobbitError(
                f"tensor {tensor.name!r} is already in {low.name}, so its residual would be 0: choose a "
                "smaller --low, or convert a model in finer types"
            )
    source = sum(tensor.nbytes for tensor in routed)
    for what, ggml_type in (("low tier", low), ("residual", residual)):
        n_bytes = sum(tensor_nbytes(ggml_type, tensor.ne) for tensor in routed)
        if n_bytes >= source:
            raise HobbitError(
                f"a {what} in {ggml_type.name} is no smaller than the experts themselves, which saves "
                "nothing: choose a smaller type, or leave residual: out"
            )
    if relative_error(residual) > _MOST_LEFT:
        raise HobbitError(
            f"a residual in {residual.name} would leave most of the low tier's error: choose a finer type, "
            "such as q4_0"
        )
