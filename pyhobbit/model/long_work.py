# SPDX-License-Identifier: MIT
"""Work that takes long: room on the disk for its files, and bars that show how far it is."""

import shutil
import sys
import threading
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pyhobbit.errors import HobbitError
from pyhobbit.settings.config import format_size


def check_room(folder: Path, needed: int, hint: str) -> None:
    """Raises HobbitError where the disk of a folder, present or future, lacks room. hint: what to do."""
    place = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        room = f"{format_size(needed)} needed, {format_size(free)} free"
        raise HobbitError(f"not enough disk space in {place.resolve()}: {room}; {hint}")


def progress_bar(what: str, total: int | None, **unit: Any) -> "tqdm[Any]":
    """A bar on standard error. total: None where nobody knows it.  unit: as tqdm takes it."""
    tqdm.set_lock(threading.RLock())  # its own is two locks, and a signal may raise between them
    interval = 0.1 if sys.stderr.isatty() else 5  # seconds; a log file gets few lines
    return tqdm(desc=what, total=total, mininterval=interval, **unit)
