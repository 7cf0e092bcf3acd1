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
    from collections.abc import Callable, Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `pyhobbit ARGUMENTS`; returns the exit status."""
    return ended(lambda: _run(arguments))


def ended(command: Callable[[], int]) -> int:
    """The exit status of a command: its own, 1 error, 2 wrong usage, 130 after Ctrl-C."""
    try:
        return command()
    except HobbitError as e:
        complain(with_options(str(e)))
        return 2 if isinstance(e, ConfigError) else 1
    except KeyboardInterrupt:
        if sys.stderr is not None and sys.stderr.isatty():
            sys.stderr.write("\n")  # the terminal has shown ^C, and the shell's prompt would stand behind it
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


def with_options(message: str) -> str:
    """An error with names of options: hobbit.device_memory is --device-memory, and hobbit.t1 is t1."""
    from pyhobbit.settings.table import NAMED, OPTIONS

    options = {name: f"--{name.replace('_', '-')}" if name in NAMED else name for name in OPTIONS}
    options |= {"n_batch": "--batch", "n_ctx": "--ctx", "n_threads": "--threads", "max_tokens": "-n"}
    first = message.partition(" ")[0]
    if "_" in first and first in options:
        message = options[first] + message.removeprefix(first)
    for name in sorted(options, reverse=True):  # device_memory before device
        message = message.replace(f"hobbit.{name}", options[name])
    return message


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
