# SPDX-License-Identifier: MIT
"""Variables of the environment that libraries read while they are loaded."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Sets them within it alone; programs that we start need not see them."""
    previous = {name: value for name in wanted if (value := os.environ.get(name)) not in (None, wanted[name])}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            del os.environ[name]
        os.environ.update(previous)
