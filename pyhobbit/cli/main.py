# SPDX-License-Identifier: MIT
"""The command line's entry: what a process owes its user whatever the command does."""

# Imports next to nothing, so that Ctrl-C finds main() running soon after the start.
from __future__ import annotations

import os
import sys

from pyhobbit.cli.status import BROKEN_PIPE, INTERRUPTED, complain, discard
from pyhobbit.errors import ConfigError, HobbitError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `pyhobbit ARGUMENTS`; returns the exit status: 1 error, 2 wrong usage, 130 after Ctrl-C."""
    try:
        return _run(arguments)
    except HobbitError as e:
        complain(_with_options(str(e)))
        return 2 if isinstance(e, ConfigError) else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except MemoryError:
        complain("there is not enough memory; free some, or use a smaller --memory or --ctx")
        return 1
    except BrokenPipeError:
        # The reader of our output has gone.
        discard(sys.stdout)
        return BROKEN_PIPE
    except OSError as e:
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except OSError:
            discard(sys.stdout)
        complain(f"{e.filename or 'standard input or output'} cannot be used: {e.strerror or e}")
        return 1


# Keywords of Python, and the options that set them.
_KEYWORDS = {"n_ctx": "--ctx", "n_threads": "--threads"}


def _with_options(message: str) -> str:
    """An error with the names that a setting has on the command line: hobbit.io_threads is --io-threads."""
    import re

    from pyhobbit.settings.table import OPTIONS

    def option(key: re.Match[str]) -> str:
        return f"--{key[1].replace('_', '-')}" if key[1] in OPTIONS else key[0]

    first, space, rest = message.partition(" ")
    if "_" in first and first in OPTIONS:
        first = f"--{first.replace('_', '-')}"
    return re.sub(r"\bhobbit\.(\w+)", option, _KEYWORDS.get(first, first) + space + rest)


def _run(arguments: Sequence[str] | None) -> int:
    from pyhobbit.cli import verbs

    if sys.stderr is None:
        # Libraries write there too, such as a progress bar.
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115
    try:
        return verbs.run(arguments)
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()  # here a full disk is an error, at the interpreter's end a traceback
