# SPDX-License-Identifier: MIT
"""What a conversion is asked for; the only home of its defaults."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Options:
    """`high` is the name of a type, "keep", or None: keep, but read a checkpoint as f16.

    `output` None means beside the model.
    """

    model: Path
    low: str = "q4_0"
    high: str | None = None
    output: Path | None = None
    imatrix: Path | None = None
    sidecar: bool = False
    dry_run: bool = False
    force: bool = False
    threads: int = field(default_factory=usable_cores)
