# SPDX-License-Identifier: MIT
"""Variables of the environment that libraries read while they are loaded."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_shared: set[str] = set()


def share(name: str, value: str) -> None:
    """Sets a variable that the user has not set, until the end of the next environment() with it."""
    if name not in os.environ:
        os.environ[name] = value
        _shared.add(name)


@contextmanager
def environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Sets variables within the block; afterwards the caller's own values are back."""
    previous = {name: os.environ[name] for name in wanted if name in os.environ and name not in _shared}
    _shared.difference_update(wanted)
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            del os.environ[name]
        os.environ.update(previous)
