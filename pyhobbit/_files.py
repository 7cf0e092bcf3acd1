# SPDX-License-Identifier: MIT
"""Files that are written whole or not at all."""

import os
from pathlib import Path


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
