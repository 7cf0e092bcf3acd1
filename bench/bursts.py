# SPDX-License-Identifier: MIT
"""What the disk delivers in bursts, as the missing experts of a layer are read, beside reads without a pause.

    python bench/bursts.py FILE

In Qwen3-30B-A3B's shape in q4_0 a matrix of an expert is read in two chunks of 432 KiB: a layer that
misses two or three experts reads 12 to 18 of them, and then none until the next layer's router has chosen.
"""

import mmap
import os
import random
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from pyhobbit.bench.script import option_parser, table_head, table_row
from pyhobbit.native.machine import measure_disk

READ_BYTES = 432 << 10  # a multiple of what direct reads need
PAUSE_S = 0.003
SECONDS = 2.0
_HUGE_PAGE = 2 << 20


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


def in_bursts(path: Path, n_reads: int, n_threads: int) -> float:
    """Bytes per second from the first request of a burst to its last byte, the median burst."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as e:
        raise SystemExit(f"the file system of {path} has no direct I/O: there is nothing to measure") from e
    n_places = path.stat().st_size // READ_BYTES
    draw, own, took = random.Random(n_reads), threading.local(), []
    with ExitStack() as stack:
        stack.callback(os.close, descriptor)
        lock = threading.Lock()

        def prepare() -> None:
            with lock:
                own.memory = stack.enter_context(huge_pages(READ_BYTES))

        readers = stack.enter_context(ThreadPoolExecutor(n_threads, initializer=prepare))
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            places = [draw.randrange(n_places) * READ_BYTES for _ in range(n_reads)]
            start = time.perf_counter()
            list(readers.map(lambda place: os.preadv(descriptor, [own.memory], place), places))
            took.append(time.perf_counter() - start)
            time.sleep(PAUSE_S)
    return n_reads * READ_BYTES / statistics.median(took)


def main() -> None:
    """Prints a table: threads by reads in a burst."""
    parser = option_parser(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--reads", type=int, nargs="+", default=[6, 12, 18, 36], help="in one burst")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8])
    options = parser.parse_args()
    print(table_head(("threads", *(f"{n} reads" for n in options.reads), "without a pause")))
    for n_threads in options.threads:
        figures = [in_bursts(options.file, n, n_threads) for n in options.reads]
        figures.append(measure_disk(options.file, READ_BYTES, n_threads).bytes_per_s)
        print(table_row((str(n_threads), *(f"{f / 1e9:.2f} GB/s" for f in figures))))


if __name__ == "__main__":
    main()
