# SPDX-License-Identifier: MIT
"""Texts that are read, and files that are written whole or not at all."""

import os
from pathlib import Path

from pyhobbit.errors import HobbitError


def read_text(path: Path) -> str:
    """A text in any encoding: bytes that are no UTF-8 become surrogates. Raises HobbitError."""
    try:
        return path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as e:
        raise HobbitError(f"the text {path} cannot be read: {e.strerror}") from e


def write_text(path: Path, text: str) -> None:
    """Replaces `path`, or what it links to, by `text` in UTF-8. Raises OSError and leaves what was there."""
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
