# SPDX-License-Identifier: MIT
"""How fast the disk delivers what the loader asks it for."""

import mmap
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_ALIGNMENT = 4096  # of direct reads
_HUGE_PAGE = 2 << 20
_DISK_SECONDS = 1.0


@dataclass(frozen=True)
class Disk:
    """bytes_per_s: of n_threads reads at a time of read_bytes each, at random places of the file.

    direct: past the page cache; False where the file system refuses that.
    """

    bytes_per_s: float
    read_bytes: int
    n_threads: int
    direct: bool


def measure_disk(path: Path, read_bytes: int, n_threads: int, seconds: float = _DISK_SECONDS) -> Disk:
    """Reads at random places of the file, past the page cache where its file system can."""
    size = min(-(-read_bytes // _ALIGNMENT) * _ALIGNMENT, path.stat().st_size // _ALIGNMENT * _ALIGNMENT)
    descriptor, direct = open_direct(path)
    n_places = max(1, path.stat().st_size // size)
    end = time.perf_counter() + seconds

    def read(reader: int) -> int:
        draw = random.Random(reader)
        n_bytes = 0
        with huge_pages(size) as memory:
            while time.perf_counter() < end:
                offset = draw.randrange(n_places) * size
                n_bytes += os.preadv(descriptor, [memory], offset)
                if not direct:
                    os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)
        return n_bytes

    start = time.perf_counter()
    try:
        with ThreadPoolExecutor(n_threads) as readers:
            n_bytes = sum(readers.map(read, range(n_threads)))
    finally:
        os.close(descriptor)
    return Disk(n_bytes / (time.perf_counter() - start), size, n_threads, direct)


@contextmanager
def huge_pages(size: int) -> Iterator[memoryview]:
    """Memory such as the loader reads into: in huge pages, where there are any."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory has small pages
    with mmap.mmap(-1, -(-size // _HUGE_PAGE) * _HUGE_PAGE + _HUGE_PAGE, flags) as buffer:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            buffer.madvise(mmap.MADV_HUGEPAGE)
        address = np.frombuffer(buffer, np.uint8).ctypes.data
        start = -address % _HUGE_PAGE
        with memoryview(buffer) as whole, whole[start : start + size] as memory:
            yield memory


def open_direct(path: Path) -> tuple[int, bool]:
    """A descriptor to read from, and whether it reads past the page cache."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT), True
    except OSError:  # the file system has no direct I/O
        return os.open(path, os.O_RDONLY), False
