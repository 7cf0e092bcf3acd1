# SPDX-License-Identifier: MIT
"""Carries a plan out: converts, writes and verifies piece by piece, so that memory stays small."""

import os
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np

from pyhobbit.convert.imatrix import Imatrix
from pyhobbit.convert.plan import Plan, PlannedTensor
from pyhobbit.errors import HobbitError
from pyhobbit.model.gguf_file import KeyValue, TensorInfo, pack_header
from pyhobbit.model.quantize import dequantize, quantize
from pyhobbit.model.tiers import ALIGNMENT

# All threads together hold about four times this in source bytes, floats and results.
_FLOAT_BYTES = 96 << 20
_MAX_PIECE_BYTES = 16 << 20

Progress = Callable[[int], object]
_INFINITIES = {  # their bits: a NaN has the same exponent and more behind it
    "f16": np.uint16(0x7C00),
    "bf16": np.uint16(0x7F80),
    "f32": np.uint32(0x7F800000),
    "f64": np.uint64(0x7FF0000000000000),
}
T = TypeVar("T")
R = TypeVar("R")


class NotFiniteError(HobbitError):
    """A source has infinities or NaN."""


@dataclass(frozen=True)
class Piece:
    """Some bytes of a source, and what is made of them: one expert's whole rows, unless all are copies."""

    source: TensorInfo
    start: int
    size: int
    expert: int
    targets: tuple[PlannedTensor, ...]

    def place(self, target: PlannedTensor) -> tuple[int, int]:
        """Start and size, in the output's data, of the bytes that the piece becomes in one of its targets."""
        # A piece that is not only copied is whole rows, so this is exact.
        if target.experts is not None:
            n_before = self.expert - target.experts.index(self.expert)  # experts it lacks
            slice_bytes = self.source.nbytes // self.source.ne[2]
            return target.offset + self.start - n_before * slice_bytes, self.size
        start, end = (n * target.nbytes // self.source.nbytes for n in (self.start, self.start + self.size))
        return target.offset + start, end - start


@dataclass(frozen=True)
class Written:
    """Bytes of the output file and their CRC-32. tensor: its name, or "header"."""

    tensor: str
    offset: int
    size: int
    crc: int


def pieces(plan: Plan, threads: int) -> Iterator[Piece]:
    """Every source tensor of the plan, cut into pieces in the order of the file."""
    by_source: dict[TensorInfo, list[PlannedTensor]] = {}
    for tensor in plan.tensors:
        by_source.setdefault(tensor.source, []).append(tensor)
    piece_bytes = min(_MAX_PIECE_BYTES, _FLOAT_BYTES // threads) // 8 * 8  # whole values of 64 bits
    for source, targets in by_source.items():
        n_slices, step = 1, piece_bytes
        if targets[0].experts is not None:
            n_slices = source.ne[2]
        elif not all(target.is_copy for target in targets):
            n_slices = source.ne[2]
            step = max(1, piece_bytes // (4 * source.ne[0])) * source.type.nbytes(source.ne[0])
        slice_bytes = source.nbytes // n_slices
        for expert in targets[0].experts or range(n_slices):
            for start in range(0, slice_bytes, step):
                size = min(step, slice_bytes - start)
                yield Piece(source, expert * slice_bytes + start, size, expert, tuple(targets))


def write_output(
    path: Path, plan: Plan, metadata: Sequence[KeyValue], imatrix: Imatrix, threads: int, progress: Progress
) -> list[Written]:
    """Writes the file; returns what is where. progress: takes source bytes. Raises HobbitError, OSError."""
    header = pack_header(metadata, plan.placements(), ALIGNMENT)
    written = [Written("header", 0, len(header), zlib.crc32(header))]
    with ExitStack() as stack:
        paths = {source.path for source in plan.sources()}
        sources = {path: stack.enter_context(path.open("rb", buffering=0)) for path in paths}
        file = stack.enter_context(path.open("wb", buffering=0))
        file.write(header)
        file.truncate(len(header) + plan.data_bytes)
        convert = partial(_convert_piece, sources, file, len(header), imatrix)
        for piece, result in _in_threads(convert, pieces(plan, threads), threads):
            written += result
            progress(piece.size)
        os.fsync(file.fileno())
    return written


def verify_output(path: Path, plan: Plan, written: list[Written], threads: int, progress: Progress) -> None:
    """Checks that the disk has all of every tensor. progress: takes bytes compared. Raises HobbitError."""
    done: Counter[str] = Counter()
    for piece in written:
        done[piece.tensor] += piece.size
    for tensor in plan.tensors:
        if (n := done[tensor.name]) != tensor.nbytes:
            raise HobbitError(f"verification failed: {tensor.name!r} has {n} of {tensor.nbytes} bytes")
    with path.open("rb", buffering=0) as data:
        os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # compare what is on the disk
        for piece, _ in _in_threads(partial(_check_piece, data), written, threads):
            progress(piece.size)


def _check_piece(data: BinaryIO, piece: Written) -> None:
    if zlib.crc32(_read_exactly(data, piece.size, piece.offset)) != piece.crc:
        raise HobbitError(f"verification failed: {piece.tensor!r} reads back differently")


def _in_threads(work: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[tuple[T, R]]:
    """Yields each item with its result, in order; never has more than a few items per thread under way."""
    under_way: deque[tuple[T, Future[R]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                under_way.append((item, pool.submit(work, item)))
                if len(under_way) > 2 * threads:
                    item, future = under_way.popleft()
                    yield item, future.result()
            for item, future in under_way:
                yield item, future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _convert_piece(
    sources: Mapping[Path, BinaryIO], file: BinaryIO, data_start: int, imatrix: Imatrix, piece: Piece
) -> list[Written]:
    source = piece.source
    data = _read_exactly(sources[source.path], piece.size, source.offset + piece.start)
    if (infinity := _INFINITIES.get(source.type.name)) is not None:
        _check_finite(source, data.view(infinity.dtype), infinity)
    rows = None
    written = []
    for target in piece.targets:
        result = data
        if not target.is_copy:
            if rows is None:
                rows = dequantize(source.type, data, source.ne[0])
            result = _quantize(target, rows, imatrix, piece.expert)
        offset = data_start + piece.place(target)[0]
        _write_exactly(file, result, offset)
        written.append(Written(target.name, offset, result.nbytes, zlib.crc32(result)))
    return written


def _check_finite(source: TensorInfo, bits: np.ndarray, infinity: np.unsignedinteger) -> None:
    if (bits & infinity == infinity).any():
        is_nan = (bits << 1 > infinity << 1).any()  # without their signs
        what = "not finite (NaN)" if is_nan else f"infinite in {source.type.name}"
        raise NotFiniteError(f"tensor {source.name!r} has values that are {what}")


def _quantize(target: PlannedTensor, rows: np.ndarray, imatrix: Imatrix, expert: int) -> np.ndarray:
    weights = imatrix[target.source.name][expert] if target.source.name in imatrix else None
    try:
        return quantize(target.type, rows, weights)
    except HobbitError as error:
        raise HobbitError(f"tensor {target.source.name!r}: {error}") from error


def _read_exactly(file: BinaryIO, size: int, offset: int) -> np.ndarray:
    """`size` bytes at `offset`. Raises HobbitError if the file ends before."""
    data = np.empty(size, np.uint8)
    done = 0
    while done < size:
        n = os.preadv(file.fileno(), [data[done:]], offset + done)
        if n == 0:
            raise HobbitError(f"{file.name} became shorter while it was read")
        done += n
    return data


def _write_exactly(file: BinaryIO, data: np.ndarray, offset: int) -> None:
    done = 0
    while done < data.nbytes:
        done += os.pwrite(file.fileno(), data[done:], offset + done)
