# SPDX-License-Identifier: MIT
"""Context-manager base class."""

from collections.abc import Callable
from types import TracebackType
from typing import Any

from pyhobbit.errors import HobbitError


class Closing:
    """A context manager that is closed at its end. If two errors meet, the first one is raised."""

    close: Callable[[], None]

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except HobbitError:
            if value is None:
                raise
