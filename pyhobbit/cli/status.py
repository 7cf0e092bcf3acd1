# SPDX-License-Identifier: MIT
"""How a command ends: its exit status and the sentence of an error."""

# Imports next to nothing, as main does.
from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

INTERRUPTED = 130
BROKEN_PIPE = 141


def complain(message: str) -> None:
    """Writes the one sentence of an error to standard error, if that can be written."""
    try:
        if sys.stderr is not None:
            sys.stderr.write(f"pyhobbit: error: {message}\n")
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO | None) -> None:
    """The interpreter flushes the stream at its end, which must not fail once more."""
    if stream is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
