# SPDX-License-Identifier: MIT
"""The vocabulary of docs/format.md: names, keys, the fingerprint, the rules for groups."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gguf.constants import GGUFValueType

from pyhobbit.convert.gguf_file import (
    GgufFile,
    KeyValue,
    TensorInfo,
    scalar_entry,
    string_entry,
    strings_entry,
)
from pyhobbit.errors import HobbitError

FORMAT_VERSION = 1
ALIGNMENT = 4096
HIGH, LOW = "high", "low"
SIDECAR_ARCHITECTURE = "hobbit-sidecar"

_PART = r"blk\.(\d+)\.(ffn_(?:gate|up|down|gate_up)_exps)"
_ROUTED = re.compile(_PART + r"\.weight")
_TIERED = re.compile(_PART + r"\.([a-z][a-z0-9_]*)\.(\d+)\.weight")
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_FINGERPRINT_BYTES = 64


@dataclass(frozen=True, order=True)
class Part:
    """One of the matrices of all experts of a layer, such as (0, 'ffn_up_exps')."""

    layer: int
    name: str


def routed_part(tensor_name: str) -> Part | None:
    """The part of a routed expert tensor; None for every other tensor."""
    match = _ROUTED.fullmatch(tensor_name)
    return Part(int(match[1]), match[2]) if match else None


def tier_tensor_name(part: Part, tier: str, group: int) -> str:
    return f"blk.{part.layer}.{part.name}.{tier}.{group}.weight"


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


def tier_metadata() -> list[KeyValue]:
    return [
        scalar_entry("hobbit.version", GGUFValueType.UINT32, FORMAT_VERSION),
        strings_entry("hobbit.tiers", [HIGH, LOW]),
        *(string_entry(f"hobbit.tier.{tier}.kind", "complete") for tier in (HIGH, LOW)),
    ]


def sidecar_metadata(base: Path, base_size: int, tensors: Iterable[TensorInfo]) -> list[KeyValue]:
    return [
        scalar_entry("hobbit.sidecar", GGUFValueType.BOOL, True),
        string_entry("hobbit.sidecar.base_name", base.name),
        scalar_entry("hobbit.sidecar.base_size", GGUFValueType.UINT64, base_size),
        scalar_entry("hobbit.sidecar.base_fingerprint", GGUFValueType.UINT64, fingerprint(tensors)),
    ]


def fingerprint(tensors: Iterable[TensorInfo]) -> int:
    """64-bit FNV-1a over names, types, shapes and first bytes of the routed expert tensors."""
    state = 0xCBF29CE484222325
    routed = (tensor for tensor in tensors if routed_part(tensor.name))
    for tensor in sorted(routed, key=lambda tensor: tensor.name.encode()):
        shape = ",".join(map(str, tensor.ne))
        for byte in f"{tensor.name}|{tensor.type.name}|{shape}\n".encode() + _first_bytes(tensor):
            state = (state ^ byte) * 0x100000001B3 % 2**64
    return state


def _first_bytes(tensor: TensorInfo) -> bytes:
    with tensor.path.open("rb") as file:
        return os.pread(file.fileno(), min(_FINGERPRINT_BYTES, tensor.nbytes), tensor.offset)


def check_tiers(file: GgufFile, base: Mapping[Part, TensorInfo]) -> None:
    """Checks that every tier beyond 0 covers the routed expert tensors `base` with matching shapes.

    Raises HobbitError that names the first tensor or group at fault.
    """
    tiers = file.get("hobbit.tiers", [])
    groups: dict[tuple[str, Part], dict[int, TensorInfo]] = {}
    for tensor in file.tensors:
        if match := _TIERED.fullmatch(tensor.name):
            part = Part(int(match[1]), match[2])
            if match[3] not in tiers[1:] or part not in base:
                raise HobbitError(f"{file.path}: tensor {tensor.name!r} belongs to no tier of this model")
            groups.setdefault((match[3], part), {})[int(match[4])] = tensor
    for tier in tiers[1:]:
        for part, tensor in base.items():
            _check_groups(file, tier, part, tensor, groups.get((tier, part), {}))


def _check_groups(
    file: GgufFile, tier: str, part: Part, base: TensorInfo, groups: Mapping[int, TensorInfo]
) -> None:
    experts: list[int] = []
    for group, tensor in sorted(groups.items()):
        key = f"hobbit.tier.{tier}.blk.{part.layer}.{part.name}.{group}.experts"
        ids = file.get(key, list(range(base.ne[2])))
        shape = (*base.ne[:2], len(ids))
        if tensor.ne != shape:
            raise HobbitError(f"{file.path}: tensor {tensor.name!r} has shape {tensor.ne}, not {shape}")
        experts += ids
    if sorted(groups) != list(range(len(groups))) or sorted(experts) != list(range(base.ne[2])):
        raise HobbitError(f"{file.path}: the {tier} tier of {base.name!r} does not hold every expert once")
