# SPDX-License-Identifier: MIT
"""How many threads compute."""

from pyhobbit.native.threads import processor_cores
from pyhobbit.settings.config import EngineConfig


def computing_threads(given: int | None) -> int:
    """As many as given; None takes one per core that the process may use, as far as ggml can."""
    return given or min(processor_cores(), EngineConfig.max_threads)
