# SPDX-License-Identifier: MIT
"""Reads a finished output back and compares it with the plan, before it gets its name."""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO

from pyhobbit.convert.plan import Plan
from pyhobbit.convert.write import Progress, Written, in_threads, read_exactly
from pyhobbit.errors import HobbitError
from pyhobbit.model.gguf_file import GgufFile, KeyValue, Placement, read_gguf
from pyhobbit.model.quantize import ggml_accepts
from pyhobbit.model.tiers import check_tiers, routed_part


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
