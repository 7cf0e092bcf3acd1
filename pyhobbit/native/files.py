# SPDX-License-Identifier: MIT
"""Texts that are read, and files that are written whole or not at all."""

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyhobbit.errors import HobbitError

_MARKED = 1 << 16  # bytes at both ends of a file


def read_text(path: Path) -> str:
    """A text in any encoding: bytes that are no UTF-8 become surrogates. Raises HobbitError."""
    try:
        return path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as e:
        raise HobbitError(f"the text {path} cannot be read: {e.strerror}") from e


def head_and_tail(path: Path) -> bytes:
    """The first and the last bytes of a model file, which tell it from others. Raises OSError."""
    with path.open("rb") as file:
        first = file.read(_MARKED)
        file.seek(-min(_MARKED, path.stat().st_size), os.SEEK_END)
        return first + file.read()


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 to `path`, or what it links to: all or nothing, but to a pipe or a device.

    Raises HobbitError.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        with atomic_output(path.resolve()) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as e:
        raise HobbitError(f"{path} cannot be written: {e.strerror}") from e


@contextmanager
def temporary_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`; the file is removed at the end, as are those of killed conversions."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        pid = left.name.split(".")[-2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            left.unlink(missing_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_output(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, which takes the place of `path` at the end unless there is an error."""
    with temporary_file(path) as temporary:
        yield temporary
        with temporary.open("rb") as file:  # after a crash there is the old file or all of the new one
            os.fsync(file.fileno())
        temporary.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
