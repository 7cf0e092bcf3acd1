# SPDX-License-Identifier: MIT
"""Texts that are read, and files that are written whole or not at all."""

import codecs
import errno
import fcntl
import glob
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from pyhobbit.errors import HobbitError

_MARKED = 1 << 16  # bytes at both ends of a file


def read_text(path: Path) -> str:
    """A text in UTF-8. Other bytes become surrogates. Raises HobbitError."""
    try:
        return decoded(path.read_bytes())
    except OSError as e:
        raise HobbitError(f"the text {path} cannot be read: {e.strerror}") from e
    except ValueError as e:
        raise HobbitError(f"{path} is not a text ({e}); save it as UTF-8") from e


def decoded(data: bytes) -> str:
    """The text of a file's bytes. Raises ValueError where zeros show that it is none, or not UTF-8."""
    text = data.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogateescape")
    if "\0" in text:
        raise ValueError("it has characters of value 0")
    return text


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading. Raises OSError, also for a pipe or a device, which might be waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.EINVAL, "it is not a regular file")


def head_and_tail(path: Path) -> bytes:
    """The first and the last bytes of a model file, which tell it from others. Raises OSError."""
    with open_regular(path) as file:
        first = file.read(_MARKED)
        file.seek(-min(_MARKED, path.stat().st_size), os.SEEK_END)
        return first + file.read()


@contextmanager
def os_errors(what: str, hint: str = "") -> Iterator[None]:
    """Within it, an OSError becomes a HobbitError: what has failed, the reason of the system, and a hint."""
    try:
        yield
    except OSError as e:
        raise HobbitError(f"{what}: {e.strerror}{hint}") from e


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 to `path` or its target: all or nothing, but to a pipe or device. Raises HobbitError."""
    with os_errors(f"{path} cannot be written"):
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        with atomic_output(path.resolve()) as temporary:
            temporary.write_text(text, encoding="utf-8")


@contextmanager
def temporary_file(path: Path) -> Iterator[Path]:
    """A new file beside `path`, removed at the end, as are those of programs that were killed.

    It is locked while its program lives: process numbers say nothing across containers.
    """
    _clear_left(path)
    descriptor, temporary = _locked_beside(path)
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
        os.close(descriptor)


def _clear_left(path: Path) -> int:
    """Removes what killed programs left beside `path`; returns how many others write there now."""
    n_alive = 0
    for left in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.tmp"):
        with suppress(OSError):  # it is gone, or the file system has no locks
            descriptor = os.open(left, os.O_RDWR | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()
            except BlockingIOError:
                n_alive += 1
            finally:
                os.close(descriptor)
    return n_alive


def _locked_beside(path: Path) -> tuple[int, Path]:
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:  # else another program took it for left, before the lock
            return descriptor, temporary
        os.close(descriptor)


@contextmanager
def atomic_output(path: Path, replaces: bool = True) -> Iterator[Path]:
    """A temporary path beside `path`, which takes the place of `path` at the end unless there is an error.

    replaces: False raises HobbitError where there is such a file at the end, or another program makes it.
    """
    if not replaces and _clear_left(path):
        raise HobbitError(f"another program is writing {path}: wait for it, or choose another name")
    with temporary_file(path) as temporary:
        yield temporary
        with temporary.open("rb") as file:  # after a crash there is the old file or all of the new one
            os.fsync(file.fileno())
        if replaces:
            temporary.replace(path)
        else:
            _publish(temporary, path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except OSError as e:
        if path.exists():
            raise HobbitError(f"another program has written {path} meanwhile: choose another name") from e
        temporary.replace(path)  # no links on such a file system
