# SPDX-License-Identifier: MIT
"""Functions that scripts share: options, memory cgroups, the page cache and the disk."""

import argparse
import fcntl
import os
import platform
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pyhobbit.errors import HobbitError

ROOT = Path(__file__).resolve().parents[2]
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_READ_BYTES, _READERS = 512 << 10, 4  # as the loader reads


def option_parser(description: str | None) -> argparse.ArgumentParser:
    """Keeps the lines of the description as they are: a script's docstring shows how it is called."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


@dataclass(frozen=True)
class Cgroup:
    """A memory cgroup. procs: the file that a process joins by."""

    procs: Path
    peak_file: Path

    def joining(self, command: Sequence[str]) -> list[str]:
        """The command, which joins before its program starts, so that all its memory counts."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.procs), *command]

    def peak(self) -> int | None:
        """The most bytes held so far, page cache included; None where the kernel does not say."""
        try:
            return int(self.peak_file.read_text())
        except OSError:
            return None


class NoCgroupError(HobbitError):
    """No memory cgroup can be made here; the message says why."""


@contextmanager
def memory_cgroup(limit: int | None) -> Iterator[Cgroup]:
    """A memory cgroup (v1 or v2) of `limit` bytes, page cache included, without swap; None: no limit.

    Raises NoCgroupError.
    """
    v2 = (_CGROUP_ROOT / "cgroup.controllers").exists()
    parent = _CGROUP_ROOT if v2 else _CGROUP_ROOT / "memory"
    folder = parent / f"hobbit-{uuid.uuid4().hex[:8]}"
    try:
        if v2 and "memory" not in (parent / "cgroup.subtree_control").read_text().split():
            (parent / "cgroup.subtree_control").write_text("+memory")
        folder.mkdir()
    except OSError as e:
        raise NoCgroupError(
            f"no memory cgroup can be made in {parent} ({e.strerror}): run as root, or give --limits without "
            "a number to measure only what holds everything in memory"
        ) from e
    try:
        if limit is not None:
            (folder / ("memory.max" if v2 else "memory.limit_in_bytes")).write_text(str(limit))
            swap, value = ("memory.swap.max", 0) if v2 else ("memory.memsw.limit_in_bytes", limit)
            if (folder / swap).exists():  # not every kernel counts swap
                (folder / swap).write_text(str(value))
        yield Cgroup(folder / "cgroup.procs", folder / ("memory.peak" if v2 else "memory.max_usage_in_bytes"))
    finally:
        remove_cgroup(folder)


def remove_cgroup(folder: Path) -> None:
    for _ in range(600):  # a killed process takes a moment to leave
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.1)
    folder.rmdir()


def drop_cached(paths: Iterable[Path]) -> None:
    """Empties the page cache of these files, as far as no process has them mapped."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- the disk


def readahead_setting(path: Path) -> Path | None:
    """The file that holds the readahead, in KiB, of the disk under `path`; None where there is none."""
    device = path.stat().st_dev
    node = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    places = (queue / "queue/read_ahead_kb" for queue in (node, node.parent))  # a partition has its disk's
    return next((place for place in places if place.exists()), None)


@contextmanager
def readahead(path: Path, kilobytes: int | None) -> Iterator[None]:
    """Another readahead for the disk of `path`; the old one comes back in the end. With None nothing changes.

    Raises HobbitError.
    """
    if kilobytes is None:
        yield
        return
    setting = readahead_setting(path)
    if setting is None or not os.access(setting, os.W_OK):
        why = "run as root on a disk, or leave stock-128k out (--arms)"
        raise HobbitError(f"the readahead of {path} cannot be set: {why}")
    with setting.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # another run must not take ours for the disk's own
        before = setting.read_text()
        try:
            setting.write_text(str(kilobytes))
            yield
        finally:
            setting.write_text(before)


def disk_bandwidth(path: Path, seconds: float = 1.0) -> float | None:
    """Bytes per second of direct reads as the loader's; None where the file system refuses direct I/O."""
    from pyhobbit.native.machine import measure_disk  # with our libraries: a process of stock has its own

    disk = measure_disk(path, _READ_BYTES, _READERS, seconds)
    return disk.bytes_per_s if disk.direct else None


def bytes_from_disk() -> int:
    """Bytes that the disk read for this process: direct reads, and pages of mappings with their readahead."""
    return int(Path("/proc/self/io").read_text().split("read_bytes:")[1].split()[0])


def machine() -> dict[str, object]:
    """The machine of the measurements."""
    cpu = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cpu": cpu and cpu[1].strip(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
