# SPDX-License-Identifier: MIT
"""Memory and disk of this machine, as the engine measures them."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pyhobbit.native.ffi import check, ffi, lib

_LIBC = ctypes.CDLL(None)
resident_memory: Callable[[], int] = lib.hobbit_resident_memory
"""Bytes that this process holds now."""
memory_limit: Callable[[], int] = lib.hobbit_memory_limit
"""Bytes that this process may hold at most, by the machine and by its memory cgroups."""
available_memory: Callable[[], int] = lib.hobbit_available_memory
"""Bytes that this process may still take without anything being swapped out or killed."""


@contextlib.contextmanager
def trimmed_heap() -> Iterator[None]:
    """In the end, free memory of the heap goes back to the system, where the C library can do that."""
    try:
        yield
    finally:
        if hasattr(_LIBC, "malloc_trim"):
            _LIBC.malloc_trim(0)


@dataclass(frozen=True)
class Disk:
    """A disk. bytes_per_s: of n_threads reads of read_bytes at a time.  direct: past the page cache."""

    bytes_per_s: float
    read_bytes: int
    n_threads: int
    direct: bool


def measure_disk(path: Path, read_bytes: int, n_threads: int, seconds: float = 1.0) -> Disk:
    """Reads at random places of the file, as the loader does. Raises HobbitError."""
    speed = ffi.new("struct hobbit_disk_speed *")
    check(lib.hobbit_measure_disk, bytes(path), read_bytes, n_threads, seconds, speed)
    return Disk(speed.bytes_per_s, speed.read_bytes, n_threads, speed.direct_io)
