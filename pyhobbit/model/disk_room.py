# SPDX-License-Identifier: MIT
"""Room on the disk for what is to be written."""

import shutil
from pathlib import Path

from pyhobbit.errors import HobbitError
from pyhobbit.settings.config import format_size


def check_room(folder: Path, needed: int, hint: str) -> None:
    """Raises HobbitError where the disk of a folder, present or future, lacks room. hint: what to do."""
    place = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        room = f"{format_size(needed)} needed, {format_size(free)} free"
        raise HobbitError(f"not enough disk space in {place.resolve()}: {room}; {hint}")
