# SPDX-License-Identifier: MIT
"""The vocabulary of docs/format.md: names, keys, the fingerprint, the rules for groups."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gguf.constants import GGUFValueType

from pyhobbit.model.gguf_file import (
    GgufFile,
    KeyValue,
    TensorInfo,
    array_entry,
    scalar_entry,
    string_entry,
    tensor_nbytes,
)
from pyhobbit.model.quantize import GgmlType, type_by_name

ALIGNMENT = 4096
ALIGNMENT_ENTRY = scalar_entry("general.alignment", GGUFValueType.UINT32, ALIGNMENT)
HIGH, LOW = "high", "low"
NO_TIER = "none"
_COMPLETE = ("complete", "complete")
SIDECAR_ARCHITECTURE = "hobbit-sidecar"

_PART = r"blk\.(\d+)\.(ffn_(?:gate|up|down|gate_up)_exps)"
_ROUTED = re.compile(_PART + r"\.weight")
_TIERED = re.compile(_PART + r"\.([a-z][a-z0-9_]*)\.(\d+)\.weight")
_FINGERPRINT_BYTES = 64
_LOW_TYPES = ("q4_0", "q3_k", "q2_k", "q2_0")  # by falling size; none wants an importance matrix
_ABOUT_HALF, _SMALLER = 0.65, 0.85  # shares of the high tier's bits
_K_BLOCK = 256
MOST_LOW = 0.75
"""A low tier with a larger share of the high tier's bytes saves little."""


@dataclass(frozen=True, order=True)
class Part:
    """One of the matrices of all experts of a layer, such as (0, 'ffn_up_exps')."""

    layer: int
    name: str


def routed_part(tensor_name: str) -> Part | None:
    """The part of a routed expert tensor; None for every other tensor."""
    match = _ROUTED.fullmatch(tensor_name)
    return Part(int(match[1]), match[2]) if match else None


def tiered_part(tensor_name: str) -> Part | None:
    """The part of an expert tensor of any tier; None for every other tensor."""
    match = _ROUTED.fullmatch(tensor_name) or _TIERED.fullmatch(tensor_name)
    return Part(int(match[1]), match[2]) if match else None


def tier_tensor_name(part: Part, tier: str, group: int) -> str:
    return f"blk.{part.layer}.{part.name}.{tier}.{group}.weight"


def default_low_types(
    tensors: Iterable[TensorInfo], high: GgmlType | None = None
) -> dict[str, GgmlType] | None:
    """Types of a low tier, by the names of the routed tensors: each has about half the bits of the high tier.

    Rows that the blocks of the K types do not divide take q4_0 if that is smaller, or else q2_0, and a tensor
    that no type suits keeps its own. Returns None where these save little. high: None where tensors keep
    their types.
    """
    routed = [(each, high or each.type) for each in tensors if routed_part(each.name)]
    bytes_high = sum(tensor_nbytes(own, each.ne) for each, own in routed)
    for most in (_SMALLER, _ABOUT_HALF):
        types = {each.name: _default_low_type(each, own, most) for each, own in routed}
        if sum(tensor_nbytes(types[each.name], each.ne) for each, _ in routed) <= MOST_LOW * bytes_high:
            return types
    return None


def _default_low_type(tensor: TensorInfo, high: GgmlType, most: float) -> GgmlType:
    """The low type for a high one. most: share of its bits, where the K types do not fit."""
    share = _ABOUT_HALF if tensor.ne[0] % _K_BLOCK == 0 else most
    usable = unweighted_low_types(tensor.ne[0], share * high.bits_per_weight)
    return usable[0] if usable else high


def unweighted_low_types(n_per_row: int, most_bits: float) -> list[GgmlType]:
    """Types of at most so many bits per weight that need no importance matrix, the finest first."""
    # q2_k is better than q2_0 wherever it fits.
    types = map(type_by_name, _LOW_TYPES[: None if n_per_row % _K_BLOCK else -1])
    return [each for each in types if n_per_row % each.block == 0 and each.bits_per_weight <= most_bits]


def low_type_like(wanted: GgmlType, tensor: TensorInfo, high: GgmlType) -> GgmlType:
    """The type in place of `wanted` where a tensor cannot have that: the next finer one, or else a coarser
    one, or else that of the high tier."""
    usable = unweighted_low_types(tensor.ne[0], _SMALLER * high.bits_per_weight)
    finer = [each for each in usable if each.bits_per_weight >= wanted.bits_per_weight]
    return (finer[-1:] or usable[:1] or [high])[0]


def tier_metadata(version: int = 1, kinds: Sequence[str] = _COMPLETE, *own: KeyValue) -> list[KeyValue]:
    """Keys of a file with both tiers or of a sidecar, but for groups. kinds: of both.  own: the version's."""
    return [
        scalar_entry("hobbit.version", GGUFValueType.UINT32, version),
        array_entry("hobbit.tiers", GGUFValueType.STRING, [HIGH, LOW]),
        *own,
        *(string_entry(f"hobbit.tier.{name}.kind", kinds[i]) for i, name in enumerate((HIGH, LOW))),
    ]


@dataclass(frozen=True)
class Tiers:
    """A model's tiers, the best first. plain: named as llama.cpp does; NO_TIER where none is."""

    names: tuple[str, ...]
    plain: str

    def of(self, tensor_name: str) -> str | None:
        """The tier that a tensor belongs to; None for resident ones, and for experts that no tier uses."""
        match = _TIERED.fullmatch(tensor_name)
        if match and match[3] in self.names and match[3] != self.plain:
            return match[3]
        return self.plain if routed_part(tensor_name) else None


def under_own_names(tensors: Iterable[TensorInfo], tiers: Tiers) -> dict[str, TensorInfo]:
    """Tensors by the names that llama.cpp knows; where it knows none, one type stands for all experts."""
    found: dict[str, TensorInfo] = {}
    for tensor in tensors:
        if tiers.of(tensor.name) in (None, tiers.plain):
            found[tensor.name] = tensor
        elif tiers.plain == NO_TIER and (part := tiered_part(tensor.name)):
            name = f"blk.{part.layer}.{part.name}.weight"
            n = tensor.ne[2] + (found[name].ne[2] if name in found else 0)
            found[name] = replace(tensor, name=name, ne=(*tensor.ne[:2], n))
    return found


def read_tiers(file: GgufFile) -> Tiers:
    """Reads the tiers of a model's first file or sidecar. The engine refuses a file that declares others."""
    return Tiers(tuple(file.get("hobbit.tiers", [HIGH])), file.get("hobbit.base_tier", HIGH))


def sidecar_metadata(base: GgufFile) -> list[KeyValue]:
    """All keys of a model's sidecar."""
    return [
        string_entry("general.architecture", SIDECAR_ARCHITECTURE),
        ALIGNMENT_ENTRY,
        *tier_metadata(),
        scalar_entry("hobbit.sidecar", GGUFValueType.BOOL, True),
        string_entry("hobbit.sidecar.base_name", base.path.name.encode(errors="replace").decode()),
        scalar_entry("hobbit.sidecar.base_size", GGUFValueType.UINT64, base.size),
        scalar_entry("hobbit.sidecar.base_fingerprint", GGUFValueType.UINT64, fingerprint(base.tensors)),
    ]


def fingerprint(tensors: Iterable[TensorInfo]) -> int:
    """64-bit FNV-1a over names, types, shapes and first bytes of the routed expert tensors."""
    state = 0xCBF29CE484222325
    routed = (tensor for tensor in tensors if routed_part(tensor.name))
    for tensor in sorted(routed, key=lambda tensor: tensor.name.encode()):
        shape = ",".join(map(str, tensor.ne))
        with tensor.path.open("rb") as file:
            first = os.pread(file.fileno(), min(_FINGERPRINT_BYTES, tensor.nbytes), tensor.offset)
        for byte in f"{tensor.name}|{tensor.type.name}|{shape}\n".encode() + first:
            state = (state ^ byte) * 0x100000001B3 % 2**64
    return state
