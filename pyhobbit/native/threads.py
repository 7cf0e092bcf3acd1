# SPDX-License-Identifier: MIT
"""How many threads compute, and how long they wait for each other."""

import ctypes
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pyhobbit.native.paths import LIB_DIR

_ROOT = Path("/")  # tests set another one
# By version of cgroups: where they are, and the files with quota and period. Version 2 names no controllers.
_V1 = "sys/fs/cgroup/cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us")
_V2 = "sys/fs/cgroup", ("cpu.max",)


def processor_cores() -> int:
    """Cores that this process may use, by its affinity and the CPU quotas of its cgroups.

    The hardware threads of one core count once. A quota is rounded down: threads above it would wait for each
    other until the next period.
    """
    cores = set()
    for cpu in os.sched_getaffinity(0):
        try:
            cores.add((_ROOT / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            cores.add(str(cpu))
    return max(1, math.floor(min(len(cores), *_quotas(), math.inf)))


def barrier_wait_s() -> float:
    """Seconds that computing threads have waited for each other at barriers so far, added up over threads."""
    for path in LIB_DIR.glob("libggml-cpu*.so"):
        with suppress(OSError):  # it is for another processor, and not loaded
            waited = ctypes.CDLL(str(path), os.RTLD_NOLOAD).ggml_cpu_barrier_wait
            waited.restype = ctypes.c_int64
            return waited() / 1e9
    return 0.0


def _quotas() -> Iterator[float]:
    """Cores that each of this process's cgroups, of version 1 and 2, and each of their ancestors allows."""
    try:
        cgroups = (_ROOT / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for controllers, path in (line.split(":", 2)[1:] for line in cgroups if line.count(":") >= 2):
        if controllers and "cpu" not in controllers.split(","):
            continue
        root, names = _V1 if controllers else _V2
        folder = _ROOT / root / path.lstrip("/")
        for each in (folder, *folder.parents):
            with suppress(OSError, ValueError):  # no such file, or the quota "max"
                texts = [(each / name).read_text() for name in names]
                quota, period = map(int, " ".join(texts).split())
                if quota > 0:
                    yield quota / period
