# SPDX-License-Identifier: MIT
"""The options of a conversion, and the only home of their defaults."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from pyhobbit.native.threads import processor_cores


@dataclass(frozen=True)
class Options:
    """`high` is the name of a type, "keep", or None: keep, but read a checkpoint as f16.

    `low` None means about half of the high tier's bits. `output` None means beside the model.
    `t1`, `t2`: thresholds of Eq. 2 that the output stores and runs by; None takes `default_t1`, and 1.
    With a t1 of 1 it stores none, so that all experts are high.
    `drop_high`: the share of the high versions of a two-tier model to leave out, or within_limit, as many as
    its calibration with static widths allows; all other types stay. `once`: the experts whose high versions
    stay lose their low ones.
    """

    within_limit: ClassVar[str] = "limit"
    default_t1: ClassVar[float] = 0.6  # no pair of types has a better one: docs/quality.md

    model: Path
    low: str | None = None
    high: str | None = None
    output: Path | None = None
    imatrix: Path | None = None
    sidecar: bool = False
    split: bool = False  # a checkpoint becomes llama.cpp's own GGUF and a sidecar, not one file
    t1: float | None = None
    t2: float | None = None
    drop_high: float | str | None = None
    once: bool = False
    dry_run: bool = False
    force: bool = False
    threads: int = field(default_factory=processor_cores)
