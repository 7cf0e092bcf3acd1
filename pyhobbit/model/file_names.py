# SPDX-License-Identifier: MIT
"""How a model's files are named: splits, sidecar, calibration, options, and files that are no model.

Imports nothing large.
"""

import re
from pathlib import Path

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_QUANT = r"(?:I?Q\d\w*|TQ\d\w*|(?:MX|NV)FP\d\w*|BF16|FP?16|FP?32)(?![^\W_])"
QUANT = re.compile(rf"(?<![^\W_])(?:(?:UD|i1?)-)?{_QUANT}", re.IGNORECASE)
"""A quantisation in a name, with the marks that makers put before it."""

EXACT = "-exact"
"""Ends a model's second name, under which a server answers in high precision alone."""

# The place of a mark decides: "M-imatrix-Q4_K_M" and "M-mtp-Q6_K" are models.
_DRAFT = r"(?:mtp|eagle3?|dflash|dspark|draft)(?![^\W_]).*"
_PROJECTOR = rf"mmproj(?![^\W_]).*|.*(?<![^\W_])mmproj(?:[-_.](?:model|{_QUANT}))*"
_MATRIX = rf"imatrix(?![^\W_]).*|.*\.imatrix|(?!.*{QUANT.pattern}).*[-_]imatrix"
# Values of general.type and general.architecture, which stand at a header's start.
HEADER_BYTES = 1 << 16
_OTHER_TYPES = (b"mmproj", b"clip", b"imatrix", b"adapter", b"eagle3", b"dflash")
_OTHERS = b"|".join(bytes([len(each)]) + bytes(7) + each for each in _OTHER_TYPES)
OTHER_HEADER = re.compile(rb"general\.(?:type|architecture)\x08\0{3}(?:%b)" % _OTHERS)


def split_name(path: Path) -> tuple[str, int, int] | None:
    """Prefix, number (from 1) and count of a file named like a split of a model; None for other names."""
    match = _SPLIT.fullmatch(path.name)
    return (match[1], int(match[2]), int(match[3])) if match else None


def model_stem(model: Path) -> str:
    """The name of a model's file without .gguf and without the number of a split."""
    split = split_name(model)
    return split[0] if split else model.name.removesuffix(".gguf")


def is_model_name(name: str) -> bool:
    """False for the name of a draft, projector or importance matrix in GGUF."""
    return not re.fullmatch(f"{_DRAFT}|{_PROJECTOR}|{_MATRIX}", model_stem(Path(name)), re.IGNORECASE)


def is_model_file(path: Path) -> bool:
    """The same by the header where it tells; that of a draft is like its model's. Raises OSError."""
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    if b"general.architecture" not in head:
        return not OTHER_HEADER.search(head) and is_model_name(path.name)
    return not (OTHER_HEADER.search(head) or re.fullmatch(_DRAFT, model_stem(path), re.IGNORECASE))


def sidecar_path(base: Path) -> Path:
    """The path at which the engine looks for the sidecar of a model."""
    return base.with_name(model_stem(base) + ".hobbit.gguf")


def calibration_path(base: Path) -> Path:
    """The path at which the engine looks for the calibration of a model."""
    return base.with_name(model_stem(base) + ".calibration.gguf")


def options_path(base: Path) -> Path:
    """The file of a model's own options (pyhobbit.model.options_file)."""
    return base.with_name(model_stem(base) + ".toml")
