# SPDX-License-Identifier: MIT
"""How a model's files are named: splits, sidecar, calibration, options, counts. Imports nothing large."""

import re
from pathlib import Path

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def split_name(path: Path) -> tuple[str, int, int] | None:
    """Prefix, number (from 1) and count of a file named like a split of a model; None for other names."""
    match = _SPLIT.fullmatch(path.name)
    return (match[1], int(match[2]), int(match[3])) if match else None


def model_stem(model: Path) -> str:
    """The name of a model's file without .gguf and without the number of a split."""
    split = split_name(model)
    return split[0] if split else model.name.removesuffix(".gguf")


def sidecar_path(base: Path) -> Path:
    """Where the engine looks for the sidecar of a model."""
    return base.with_name(model_stem(base) + ".hobbit.gguf")


def calibration_path(base: Path) -> Path:
    """Where the engine looks for the calibration of a model."""
    return base.with_name(model_stem(base) + ".calibration.gguf")


def options_path(base: Path) -> Path:
    """Where a model's own options lie (pyhobbit.model.options_file)."""
    return base.with_name(model_stem(base) + ".toml")


def uses_path(base: Path) -> Path:
    """Where the engine keeps how often a model's experts were used."""
    return base.with_name(model_stem(base) + ".hobbit-uses")
