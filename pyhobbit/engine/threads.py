# SPDX-License-Identifier: MIT
"""How many threads compute."""

import os
from pathlib import Path

from pyhobbit.settings.config import EngineConfig


def computing_threads(given: int | None) -> int:
    """As many as given; None takes one per processor core, as far as ggml can."""
    return given or min(processor_cores(), EngineConfig.max_threads)


def processor_cores() -> int:
    """Cores that this process may use; the hardware threads of one core count once."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        try:
            cores.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            cores.add(str(cpu))
    return len(cores)
