# SPDX-License-Identifier: MIT
"""Reads a finished output back and compares it with the plan, before it gets its name."""

from __future__ import annotations

import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pyhobbit.convert.plan import Plan
from pyhobbit.convert.residual import relative_error
from pyhobbit.convert.write import Piece, Progress, Written, in_threads, pieces, read_exactly
from pyhobbit.errors import HobbitError
from pyhobbit.model.gguf_file import GgufFile, KeyValue, Placement, read_gguf
from pyhobbit.model.quantize import dequantize, ggml_accepts
from pyhobbit.model.tiers import HIGH, LOW, check_tiers, routed_part

# A block's largest value decides about the others, so what is not normal can be off by more than what is.
_MARGIN = 2.0
_SCALE_ERROR = 2.0**-25 * 128  # relative, by the rounding of a very small scale to f16


@dataclass(frozen=True)
class Errors:
    """Relative root mean square errors over all routed experts."""

    low: float
    both: float


def verify_output(
    path: Path,
    plan: Plan,
    metadata: Sequence[KeyValue],
    written: Sequence[Written],
    threads: int,
    progress: Progress,
) -> None:
    """Compares header, tiers and every byte of data with what was meant to be written.

    `progress` is called with the number of bytes compared. Raises HobbitError at the first difference.
    """
    file = read_gguf(path)
    if not ggml_accepts(path):
        raise HobbitError("verification failed: ggml does not accept the header of the output")
    _check_header(file, plan, metadata)
    check_tiers(file, {part: source for source in plan.sources() if (part := routed_part(source.name))})
    _check_complete(plan, written)
    with path.open("rb", buffering=0) as data:
        os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # compare what is on the disk
        for piece, _ in in_threads(partial(_check_piece, data), written, threads):
            progress(piece.size)


def _check_header(file: GgufFile, plan: Plan, metadata: Sequence[KeyValue]) -> None:
    if list(file.metadata.values()) != list(metadata):
        raise HobbitError("verification failed: the metadata differ from what was to be written")
    start = file.tensors[0].offset
    found = [Placement(tensor.name, tensor.type, tensor.ne, tensor.offset - start) for tensor in file.tensors]
    for expected, actual in zip_longest(plan.placements(), found):
        if expected != actual:
            raise HobbitError(f"verification failed: expected tensor {expected}, found {actual}")


def _check_complete(plan: Plan, written: Sequence[Written]) -> None:
    done: Counter[str] = Counter()
    for piece in written:
        done[piece.tensor] += piece.size
    for tensor in plan.tensors:
        if (n := done[tensor.name]) != tensor.nbytes:
            raise HobbitError(f"verification failed: {tensor.name!r} has {n} of {tensor.nbytes} bytes")


def _check_piece(data: BinaryIO, piece: Written) -> None:
    if zlib.crc32(read_exactly(data, piece.size, piece.offset)) != piece.crc:
        raise HobbitError(f"verification failed: tensor {piece.tensor!r} reads back differently")


def verify_residuals(path: Path, plan: Plan, weighted: bool, threads: int, progress: Progress) -> Errors:
    """Adds low tier and residual of a finished output up and compares the sum with the source, by tensor.

    The residual may miss as much of the low tier's error as its type misses of random normal values, with a
    margin; all of it where an importance matrix weighs the error. `progress` is called with the number of
    source bytes compared. Raises HobbitError.
    """
    targets = {tensor.source.name: tensor for tensor in plan.tensors if tensor.residual_on}
    sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(3))
    with ExitStack() as stack:
        paths = {tensor.source.path for tensor in targets.values()}
        sources = {path: stack.enter_context(path.open("rb", buffering=0)) for path in paths}
        data = stack.enter_context(path.open("rb", buffering=0))
        start = read_gguf(path).tensors[0].offset
        own = (piece for piece in pieces(plan, threads) if piece.source.name in targets)
        for piece, squares in in_threads(partial(_piece_errors, sources, data, start), own, threads):
            sums[piece.source.name] += squares
            progress(piece.size)
    for name, (_, low, both) in sums.items():
        tensor = targets[name]
        most = 1.0 if weighted else min(1.0, _MARGIN * relative_error(tensor.type))
        slack = _SCALE_ERROR * tensor.source.n_values**0.5
        if both**0.5 > most * low**0.5 + slack:
            raise HobbitError(
                f"verification failed: the low tier and the residual of {name!r} together have "
                f"{(both / low) ** 0.5:.2g} of the low tier's error; at most {most:.2g} is allowed"
            )
    weights, low, both = sum(sums.values())
    return Errors(*(float((square / weights) ** 0.5) if weights else 0.0 for square in (low, both)))


def _piece_errors(sources: Mapping[Path, BinaryIO], data: BinaryIO, start: int, piece: Piece) -> np.ndarray:
    """Sums of squares: of the weights, of what low precision misses, and of what both miss: float64 [3]."""
    source = piece.source
    read = read_exactly(sources[source.path], piece.size, source.offset + piece.start)
    left = dequantize(source.type, read, source.ne[0])
    squares = [_square(left)]
    parts = {target.tier: target for target in piece.targets}
    for tier in (LOW, HIGH):
        offset, size = piece.place(parts[tier])
        part = read_exactly(data, size, start + offset)
        left -= dequantize(parts[tier].type, part, source.ne[0])
        squares.append(_square(left))
    return np.array(squares)


def _square(rows: np.ndarray) -> float:
    return float(np.square(rows, dtype=np.float64).sum())
