# SPDX-License-Identifier: MIT
"""A file without the high versions of the experts that low precision hurts least (EdgeMoE, III-B)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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

_Expert = tuple[int, int]  # layer, number
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


def drop_high(path: Path, share: float | None) -> Dropped:
    """Plans the two-tier file `path` without `share` of its high versions, those with the least divergence
    per byte in its calibration. None: those that static widths keep low within the calibration's limit.

    Raises HobbitError.
    """
    file = read_gguf(path)
    routed = _routed(file)
    keys = _calibration(file, routed, "--rule edgemoe" if share is None else "--per-expert")
    divergences = keys[LOW_DIVERGENCES].value()
    if share is None:
        dropped = _within_limit(file, routed, keys)
    else:
        dropped = _least_sensitive(file, routed, divergences, share)
    kept = _kept(routed, dropped)
    plan = _plan(file, routed, kept)
    own = [entry for key, entry in file.metadata.items() if not key.startswith(_OWN_KEYS)]
    groups = [
        ints_entry(group_key(part, HIGH, 0), kept[part.layer]) for part in routed if kept.get(part.layer)
    ]
    places = _places(routed)
    divergence = sum(divergences[places[expert]] for expert in dropped)
    metadata = [*own, *partial_metadata(), *groups]
    return Dropped(plan, metadata, len(places) - len(dropped), len(places), divergence)


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


def _places(routed: Mapping[Part, TensorInfo]) -> dict[_Expert, int]:
    """All experts, and where a calibration's arrays [n_layers * n_experts] have them."""
    n_experts = _experts_by_layer(routed)
    width = max(n_experts.values())
    return {
        (layer, expert): i * width + expert
        for i, layer in enumerate(n_experts)
        for expert in range(n_experts[layer])
    }


def _calibration(file: GgufFile, routed: Mapping[Part, TensorInfo], how: str) -> Mapping[str, KeyValue]:
    """What was measured expert by expert; how: to measure that with `calibrate`. Raises HobbitError."""
    path, n_experts = calibration_path(file.path), _experts_by_layer(routed)
    keys = read_gguf(path).metadata if path.exists() else {}
    command = f"pyhobbit calibrate {file.path} --text FILE {how}"
    if LOW_DIVERGENCES not in keys:
        raise HobbitError(f"--drop-high takes the experts' sensitivities from a calibration: run {command}")
    n_values = len(keys[LOW_DIVERGENCES].value())
    size = keys["hobbit.model_bytes"].value() if "hobbit.model_bytes" in keys else None
    if size != file.size or n_values != len(n_experts) * max(n_experts.values()):
        raise HobbitError(f"{path} was made for another model than {file.path}: run {command}")
    return keys


def _expert_bytes(file: GgufFile, routed: Mapping[Part, TensorInfo], tier: str) -> dict[int, int]:
    """Of one expert, by layer."""
    tensors = {tensor.name: tensor for tensor in file.tensors}
    n_bytes = dict.fromkeys(_experts_by_layer(routed), 0)
    for part, high in routed.items():
        tensor = high if tier == HIGH else tensors[tier_tensor_name(part, LOW, 0)]
        n_bytes[part.layer] += tensor.nbytes // tensor.ne[2]
    return n_bytes


def _least_sensitive(
    file: GgufFile, routed: Mapping[Part, TensorInfo], divergences: Sequence[float], share: float
) -> list[_Expert]:
    """This share of the experts, by divergence per byte. Raises HobbitError where that is none or all."""
    n_bytes, places = _expert_bytes(file, routed, HIGH), _places(routed)
    ranked = sorted(places, key=lambda expert: (divergences[places[expert]] / n_bytes[expert[0]], expert))
    n_dropped = round(share * len(ranked))
    if not 0 < n_dropped < len(ranked):
        raise HobbitError(
            f"--drop-high {share:g} drops {n_dropped} of {len(ranked)} experts: some must go, and some stay"
        )
    return ranked[:n_dropped]


def _within_limit(
    file: GgufFile, routed: Mapping[Part, TensorInfo], keys: Mapping[str, KeyValue]
) -> list[_Expert]:
    """Those that the calibrated static widths keep low, as the rule edgemoe decides. Raises HobbitError."""
    path = calibration_path(file.path)
    if "hobbit.rule" not in keys or keys["hobbit.rule"].value() != "edgemoe":
        raise HobbitError(
            f"{path} has no static widths that a limit was kept with: run pyhobbit calibrate {file.path} "
            "--text FILE --rule edgemoe, or give --drop-high a share"
        )
    places, costs = _places(routed), keys["hobbit.low_costs"].value()
    n_experts = _experts_by_layer(routed)
    low, high = (
        sum(n_experts[layer] * size for layer, size in _expert_bytes(file, routed, tier).items())
        for tier in (LOW, HIGH)
    )
    most = keys["hobbit.price"].value() * (1 - low / high)
    dropped = [expert for expert, place in places.items() if costs[place] < most]
    if not 0 < len(dropped) < len(places):
        raise HobbitError(
            f"within its limit, {path} keeps {len(dropped)} of {len(places)} experts low: some must go, and "
            "some stay; calibrate with another limit, or give --drop-high a share"
        )
    return dropped


def _kept(routed: Mapping[Part, TensorInfo], dropped: Iterable[_Expert]) -> dict[int, tuple[int, ...]]:
    """By layer the experts that keep their high version, ascending."""
    kept: dict[int, tuple[int, ...]] = {}
    for layer, expert in sorted(_places(routed).keys() - set(dropped)):
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
