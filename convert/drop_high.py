# SPDX-License-Identifier: MIT
"""A file without the high versions of the experts that low precision hurts least (EdgeMoE, III-B)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pyhobbit.convert.plan import RESIDENT, Plan, PlannedTensor
from pyhobbit.errors import HobbitError
from pyhobbit.model.file_names import calibration_path
from pyhobbit.model.gguf_file import GgufFile, KeyValue, TensorInfo, align, ints_entry, read_gguf
from pyhobbit.model.tiers import (
    ALIGNMENT,
    HIGH,
    LOW,
    LOW_DIVERGENCES,
    Part,
    check_tiers,
    group_key,
    partial_metadata,
    read_tiers,
    routed_part,
    tier_tensor_name,
)

_OWN_KEYS = ("hobbit.version", "hobbit.tiers", "hobbit.base_tier", "hobbit.tier.")


@dataclass(frozen=True)
class Dropped:
    """What is written: the plan and the metadata, and how many experts of all keep their high version.

    divergence: sum of those of the others, in nats; about what the file diverges by at its best.
    """

    plan: Plan
    metadata: list[KeyValue]
    n_kept: int
    n_experts: int
    divergence: float


def drop_high(path: Path, share: float) -> Dropped:
    """Plans the two-tier file `path` without `share` of its high versions, those with the least divergence
    per byte in its calibration. Raises HobbitError.
    """
    file = read_gguf(path)
    routed = _routed(file)
    divergences = _divergences(file, routed)
    kept = _kept(routed, divergences, share)
    plan = _plan(file, routed, kept)
    own = [entry for key, entry in file.metadata.items() if not key.startswith(_OWN_KEYS)]
    groups = [
        ints_entry(group_key(part, HIGH, 0), kept[part.layer]) for part in routed if kept.get(part.layer)
    ]
    n_kept = sum(map(len, kept.values()))
    n_experts, width = _experts_by_layer(routed), max(_experts_by_layer(routed).values())
    divergence = sum(
        divergences[i * width + expert]
        for i, layer in enumerate(n_experts)
        for expert in set(range(n_experts[layer])) - set(kept.get(layer, ()))
    )
    metadata = [*own, *partial_metadata(), *groups]
    return Dropped(plan, metadata, n_kept, sum(n_experts.values()), divergence)


def _routed(file: GgufFile) -> dict[Part, TensorInfo]:
    """The high tensors, by layer. Raises HobbitError unless the file has two complete tiers."""
    path, tiers = file.path, read_tiers(file)
    if file.get("split.count", 0) > 1 or LOW not in tiers.names or file.get("hobbit.sidecar", False):
        raise HobbitError(
            f"--drop-high needs one file with two tiers, and {path} is none: make it with "
            f"pyhobbit convert --low TYPE MODEL"
        )
    if tiers.residual_on or tiers.partial:
        kind = "residuals" if tiers.residual_on else "some experts"
        raise HobbitError(
            f"the high tier of {path} has {kind} alone: --drop-high needs a file with two complete tiers"
        )
    routed = {part: tensor for tensor in file.tensors if (part := routed_part(tensor.name))}
    routed = dict(sorted(routed.items(), key=lambda item: item[0].layer))
    check_tiers(file, routed)
    names = {tensor.name for tensor in file.tensors}
    if any(tier_tensor_name(part, LOW, 1) in names for part in routed):
        raise HobbitError(
            f"--drop-high cannot keep the low tier of {path}, which has several types per tensor"
        )
    return routed


def _experts_by_layer(routed: Mapping[Part, TensorInfo]) -> dict[int, int]:
    return {part.layer: tensor.ne[2] for part, tensor in routed.items()}


def _divergences(file: GgufFile, routed: Mapping[Part, TensorInfo]) -> Sequence[float]:
    """[n_layers * n_experts], layer by layer, as the calibration has them. Raises HobbitError."""
    path, n_experts = calibration_path(file.path), _experts_by_layer(routed)
    keys = read_gguf(path).metadata if path.exists() else {}
    command = f"pyhobbit calibrate {file.path} --text FILE --per-expert"
    if LOW_DIVERGENCES not in keys:
        raise HobbitError(f"--drop-high takes the experts' sensitivities from a calibration: run {command}")
    values = keys[LOW_DIVERGENCES].value()
    size = keys["hobbit.model_bytes"].value() if "hobbit.model_bytes" in keys else None
    if size != file.size or len(values) != len(n_experts) * max(n_experts.values()):
        raise HobbitError(f"{path} was made for another model than {file.path}: run {command}")
    return values


def _kept(
    routed: Mapping[Part, TensorInfo], divergences: Sequence[float], share: float
) -> dict[int, tuple[int, ...]]:
    """By layer the experts that keep their high version, ascending."""
    n_experts = _experts_by_layer(routed)
    width = max(n_experts.values())
    n_bytes = dict.fromkeys(n_experts, 0)  # of an expert
    for part, tensor in routed.items():
        n_bytes[part.layer] += tensor.nbytes // tensor.ne[2]
    ranked = sorted(
        (divergences[i * width + expert] / n_bytes[layer], layer, expert)
        for i, layer in enumerate(n_experts)
        for expert in range(n_experts[layer])
    )
    n_dropped = round(share * len(ranked))
    if not 0 < n_dropped < len(ranked):
        raise HobbitError(
            f"--drop-high {share:g} drops {n_dropped} of {len(ranked)} experts: some must go, and some stay"
        )
    kept: dict[int, tuple[int, ...]] = {}
    for _, layer, expert in sorted(ranked[n_dropped:], key=lambda item: item[1:]):
        kept[layer] = (*kept.get(layer, ()), expert)
    return kept


def _plan(file: GgufFile, routed: Mapping[Part, TensorInfo], kept: Mapping[int, tuple[int, ...]]) -> Plan:
    """The low tier gets llama.cpp's own names: it is what every expert has."""
    by_name = {tensor.name: tensor for tensor in file.tensors}
    low = {part: by_name[tier_tensor_name(part, LOW, 0)] for part in routed}
    experts = {*routed.values(), *low.values()}
    wanted = [_copy(tensor, tensor.name, RESIDENT) for tensor in file.tensors if tensor not in experts]
    wanted += [_copy(low[part], routed[part].name, LOW) for part in routed]
    for part, tensor in routed.items():
        if ids := kept.get(part.layer):
            high = _copy(tensor, tier_tensor_name(part, HIGH, 0), HIGH)
            wanted.append(replace(high, ne=(*tensor.ne[:2], len(ids)), experts=ids))
    placed, offset = [], 0
    for tensor in wanted:
        placed.append(replace(tensor, offset=offset))
        offset = align(offset + tensor.nbytes, ALIGNMENT)
    return Plan(tuple(placed))


def _copy(source: TensorInfo, name: str, tier: str) -> PlannedTensor:
    return PlannedTensor(name, source.type, source.ne, tier, source, 0)
