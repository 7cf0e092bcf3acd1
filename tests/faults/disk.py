# SPDX-License-Identifier: MIT
"""A disk of ours under a model: its reads are late, out of order or fail, it disappears and comes back.

    python tests/faults/disk.py [--schedules N] [--seed S] [--jobs N]

It is a file system in this process, by the kernel's protocol of /dev/fuse, so that every way of reading meets
it: system calls, mapped pages, io_uring. Each schedule is drawn from its seed; a program loads the model from
this disk and computes logits meanwhile. Prints a row for each kind, and exits with 1 where one ended in wrong
logits, a crash or a hang. Needs the right to mount.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import heapq
import os
import random
import select
import shutil
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import matrix  # noqa: E402
import models  # noqa: E402

# Numbers of linux/fuse.h.
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _STATFS, _RELEASE = 1, 2, 3, 14, 15, 17, 18
_FLUSH, _INIT, _OPENDIR, _READDIR, _RELEASEDIR, _INTERRUPT, _BATCH_FORGET = 25, 26, 27, 28, 29, 36, 42
_HEADER, _REPLY = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ")
_FOLDER = 1  # the kernel's number of the root; files follow
_ASYNC_READ = 1
_VALID_S = 3600
_READ_ONLY, _FORCE = 0x7, 0x3  # flags of mount, without devices and set-user-id; of umount2: fail all, detach

_libc = ctypes.CDLL(None, use_errno=True)


class NoMountError(OSError):
    """This process may not mount a file system."""


@dataclass(frozen=True)
class Schedule:
    """Faults of the reads from number `at` on, `count` of them.

    late: each waits so many seconds at most. error: how they fail; 0: they do not. is_pulled: at the first,
    the disk disappears with all that is open on it, and is back for who opens it anew.
    """

    kind: str = "sound"
    at: int = 0
    count: int = 0
    late: float = 0.0
    error: int = 0
    is_pulled: bool = False


def schedules(n: int, n_reads: int, seed: int) -> Iterator[Schedule]:
    """n of them, drawn; n_reads: of a program that nothing disturbs."""
    numbers = random.Random(seed)
    for _ in range(n):
        at = numbers.randrange(n_reads)
        few, many = numbers.randrange(1, 5), numbers.randrange(n_reads)
        error = numbers.choice((errno.EIO, errno.EAGAIN, errno.ENOMEM, errno.ESTALE, errno.EINTR))
        yield numbers.choice(
            (
                Schedule("out of order", 0, n_reads, late=numbers.uniform(0.001, 0.02)),
                Schedule("late", at, few, late=numbers.uniform(1, 4)),
                Schedule("fails once", at, 1, error=error),
                Schedule("fails often", at, many, error=error),
                Schedule("gone and back", at, many, late=0.01, error=errno.ENODEV),
                Schedule("pulled", at, 1, is_pulled=True),
            )
        )


class Disk:
    """Shows the files of a folder at `mount`, read-only. n_reads, n_hit: since begin()."""

    def __init__(self, folder: Path, mount: Path) -> None:
        self._paths = [folder, folder, *sorted(folder.iterdir())]  # by the kernel's number
        self._mount = mount
        self.begin(Schedule())

    def begin(self, schedule: Schedule, seed: int = 0) -> None:
        """Mounts it anew, so that no page of it is cached."""
        self.close()
        self._schedule, self._random, self.n_reads, self.n_hit = schedule, random.Random(seed), 0, 0
        self._due: list[tuple[float, int, bytes]] = []  # replies, by when
        self._fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        options = f"fd={self._fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
        if _libc.mount(b"hobbit", bytes(self._mount), b"fuse", _READ_ONLY, options) != 0:
            os.close(self._fd)
            raise NoMountError(ctypes.get_errno(), "no file system can be mounted")
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        if hasattr(self, "_thread"):
            self._pull()
            self._thread.join()
            os.close(self._fd)
            del self._thread

    def _pull(self) -> None:
        _libc.umount2(bytes(self._mount), _FORCE)

    def _serve(self) -> None:
        """Takes requests, and replies when it is due, until the file system is unmounted."""
        ready = select.poll()
        ready.register(self._fd, select.POLLIN)
        with suppress(OSError):
            while True:
                wait = max(0.0, self._due[0][0] - time.monotonic()) * 1e3 if self._due else None
                for _, events in ready.poll(wait):
                    if events & select.POLLERR:
                        return
                    with suppress(BlockingIOError, InterruptedError, FileNotFoundError):
                        self._take(os.read(self._fd, 1 << 20))
                while self._due and self._due[0][0] <= time.monotonic():
                    with suppress(FileNotFoundError):  # the program has gone
                        os.write(self._fd, heapq.heappop(self._due)[2])

    def _take(self, request: bytes) -> None:
        _, opcode, unique, node, *_ = _HEADER.unpack_from(request)
        if opcode in (_FORGET, _BATCH_FORGET, _INTERRUPT):
            return
        late, error = 0.0, 0
        try:
            if opcode == _READ:
                late = self._strike()
            data = self._answer(opcode, node, request[_HEADER.size :])
        except OSError as e:
            data, error = b"", e.errno
        reply = _REPLY.pack(_REPLY.size + len(data), -error, unique) + data
        heapq.heappush(self._due, (time.monotonic() + late, unique, reply))

    def _strike(self) -> float:
        """Seconds by which the read is late. Raises OSError."""
        schedule, n = self._schedule, self.n_reads
        self.n_reads += 1
        if not schedule.at <= n < schedule.at + schedule.count:
            return 0.0
        self.n_hit += 1
        if schedule.is_pulled:
            self._pull()
        if schedule.error:
            raise OSError(schedule.error, "")
        return self._random.uniform(0, schedule.late)

    def _answer(self, opcode: int, node: int, body: bytes) -> bytes:
        """The data of a reply. Raises OSError."""
        if opcode == _INIT:
            return struct.pack("<4I2H2I2H8I", 7, 31, 1 << 17, _ASYNC_READ, 64, 48, 1 << 17, 1, *[0] * 10)
        if opcode == _LOOKUP:
            for i, path in enumerate(self._paths[_FOLDER + 1 :], _FOLDER + 1):
                if os.fsencode(path.name) == body.rstrip(b"\0"):
                    return struct.pack("<QQQQII", i, 0, _VALID_S, _VALID_S, 0, 0) + self._attributes(i)
            raise OSError(errno.ENOENT, "")
        if opcode == _GETATTR:
            return struct.pack("<QII", _VALID_S, 0, 0) + self._attributes(node)
        if opcode in (_OPEN, _OPENDIR):
            return struct.pack("<QII", 0, 0, 0)
        if opcode == _READ:
            offset, size = struct.unpack_from("<8xQI", body)
            with self._paths[node].open("rb") as file:
                return os.pread(file.fileno(), size, offset)
        if opcode == _READDIR:
            return self._entries(*struct.unpack_from("<8xQI", body))
        if opcode == _STATFS:
            return struct.pack("<QQQQQIIII24x", 1 << 20, 0, 0, 1 << 10, 0, 4096, 255, 4096, 0)
        if opcode in (_RELEASE, _RELEASEDIR, _FLUSH):
            return b""
        raise OSError(errno.ENOSYS, "")

    def _attributes(self, node: int) -> bytes:
        of = self._paths[node].stat()
        times = [t // 10**9 for t in (of.st_atime_ns, of.st_mtime_ns, of.st_ctime_ns)]
        rest = [t % 10**9 for t in (of.st_atime_ns, of.st_mtime_ns, of.st_ctime_ns)]
        numbers = (of.st_mode & ~0o222, 1, os.getuid(), os.getgid(), 0, 4096, 0)
        return struct.pack("<6Q10I", node, of.st_size, of.st_blocks, *times, *rest, *numbers)

    def _entries(self, first: int, size: int) -> bytes:
        entries = b""
        for i, path in list(enumerate(self._paths))[_FOLDER + 1 + first :]:
            name = os.fsencode(path.name)
            entry = struct.pack("<QQII", i, i - _FOLDER, len(name), 8) + name
            if len(entries) + len(entry) + 8 > size:
                break
            entries += entry + bytes(-len(entry) % 8)
        return entries


@contextmanager
def disk_of(model: Path, folder: Path) -> Iterator[tuple[Disk, Path]]:
    """A disk with a copy of the model, and its path there. folder: an empty one. Raises NoMountError."""
    files, mount = folder / "files", folder / "mount"
    for each in (files, mount):
        each.mkdir(parents=True)
    matrix.copy_of(model, files)
    disk = Disk(files, mount)
    try:
        yield disk, mount / model.name
    finally:
        disk.close()


def run_all(model: Path, folder: Path, n: int, seed: int, jobs: int) -> list[tuple[Schedule, str, str]]:
    """The outcome of each schedule (matrix.OUTCOMES), and the program's words. Raises NoMountError."""
    runners = matrix.Runners(matrix.build_shim(folder), jobs)
    try:
        with disk_of(model, folder / "sound") as (disk, path):
            sound = _run(runners, disk, path, folder, Schedule(), 0)
            if sound.status != 0:
                raise RuntimeError(f"it fails on a sound disk: {sound.err}")
            n_reads = disk.n_reads
        drawn: Queue[tuple[int, Schedule]] = Queue()
        for each in enumerate(schedules(n, n_reads, seed)):
            drawn.put(each)

        def work(job: int) -> list[tuple[Schedule, str, str]]:
            found = []
            with disk_of(model, folder / f"job-{job}") as (disk, path):
                while not drawn.empty():
                    number, schedule = drawn.get()
                    result = _run(runners, disk, path, folder, schedule, number)
                    outcome = matrix.outcome_of(result, disk.n_hit, result.out == sound.out)
                    found.append((schedule, outcome, result.err.strip()))
            return found

        with ThreadPoolExecutor(jobs) as pool:
            return [each for found in pool.map(work, range(jobs)) for each in found]
    finally:
        runners.close()


def _run(
    runners: matrix.Runners, disk: Disk, path: Path, folder: Path, schedule: Schedule, number: int
) -> matrix.Result:
    case = folder / f"case-{number}"
    case.mkdir()
    disk.begin(schedule, number)
    try:
        return runners.run(place="load", model=str(path), fault="none:none:0:0::", folder=str(case))
    finally:
        shutil.rmtree(case)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hobbit-disk-") as folder:
        model = models.tiny_tiers("q8_0", "q4_0")
        results = run_all(model, Path(folder), args.schedules, args.seed, args.jobs)
    print(f"{'kind':14}" + "".join(f"{name:>8}" for name in matrix.OUTCOMES))
    for kind in sorted({schedule.kind for schedule, *_ in results}):
        counts = Counter(outcome for schedule, outcome, _ in results if schedule.kind == kind)
        print(f"{kind:14}" + "".join(f"{counts[name] or '-':>8}" for name in matrix.OUTCOMES))
    bad = [each for each in results if each[1] not in (*matrix.GOOD, "not hit")]
    for schedule, outcome, said in bad:
        print(f"\n{outcome}: {schedule}\n{said[-1500:]}")
    return min(1, len(bad))


if __name__ == "__main__":
    sys.exit(main())
