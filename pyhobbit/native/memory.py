# SPDX-License-Identifier: MIT
"""What this process holds and may still take, as the engine counts it (ggml_ext/src/base/system-memory.h)."""

import os
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_CGROUPS = Path("/sys/fs/cgroup")
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def resident_memory() -> int:
    """Bytes that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def available_memory() -> int:
    """Bytes that this process may still take without anything being swapped out or killed."""
    return min([_field(Path("/proc/meminfo"), "MemAvailable:") * 1024, *_cgroup_rooms()])


def _cgroup_rooms() -> list[int]:
    """What each of the process's memory cgroups leaves; the limits of all ancestors hold."""
    rooms = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (_CGROUPS / "memory", _V1) if controllers else (_CGROUPS, _V2)
        own = Path(path.lstrip("/"))
        rooms += [room for each in (own, *own.parents) if (room := _room(root / each, *names)) is not None]
    return rooms


def _room(folder: Path, limit: str, usage: str, cache: str) -> int | None:
    try:
        n_limit = int((folder / limit).read_text())  # "max" has none
        n_used = int((folder / usage).read_text()) - _field(folder / "memory.stat", cache)
    except (OSError, ValueError):
        return None
    return max(0, n_limit - max(0, n_used))


def _field(path: Path, key: str) -> int:
    for line in path.read_text().splitlines():
        name, value, *_ = line.split()
        if name == key:
            return int(value)
    return 0
