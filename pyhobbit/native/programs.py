# SPDX-License-Identifier: MIT
"""llama.cpp's programs, which the package brings."""

import os
import sys
from typing import NoReturn

from pyhobbit.native.threads import processor_cores


def become(command: list[str]) -> NoReturn:
    """Replaces this process by a program, which gets all signals. Raises OSError."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    # llama.cpp counts neither the affinity nor a CPU quota, and warns where it is told twice
    threads = {} if {"-t", "--threads"} & {*command} else {"LLAMA_ARG_THREADS": str(processor_cores())}
    os.execve(command[0], command, {**threads, **os.environ})
