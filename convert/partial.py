# SPDX-License-Identifier: MIT
"""A file without the high versions of the experts that low precision hurts least (EdgeMoE, III-B).

No other module knows the versions of the format in which a tier is partial.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from gguf.constants import GGUFValueType

from pyhobbit.convert.options import Options
from pyhobbit.convert.plan import RESIDENT, Plan, PlannedTensor, placed
from pyhobbit.errors import HobbitError
from pyhobbit.model.file_names import calibration_path
from pyhobbit.model.gguf_file import GgufFile, KeyValue, array_entry, read_gguf, string_entry
from pyhobbit.model.model_file import opened_info
from pyhobbit.model.tiers import HIGH, LOW, NO_TIER, read_tiers, routed_part, tier_metadata, tier_tensor_name

SUFFIX = "-partial"  # end of the name of the output
_VERSION, _ONCE = 3, 4
_KIND = "partial"
_Expert = tuple[int, int]  # layer, number
_OWN_KEYS = ("hobbit.version", "hobbit.tiers", "hobbit.base_tier", "hobbit.tier.")


def check_drop_high(options: Options) -> None:
    """Raises HobbitError for what it cannot be combined with."""
    if options.drop_high is None:
        if options.once:
            raise HobbitError("once goes with drop_high, which says whose high versions stay: give both")
        return
    given = {"--low": options.low, "--high": options.high}
    given |= {"--imatrix": options.imatrix, "--sidecar": options.sidecar}
    given |= {"t1": options.t1 is not None, "t2": options.t2 is not None}
    if names := [name for name, value in given.items() if value]:
        raise HobbitError(f"drop_high leaves types and thresholds as they are: drop {names[0]}")
    if isinstance(options.drop_high, float) and not 0 < options.drop_high < 1:
        raise HobbitError(f"drop_high {options.drop_high:g}: give a share above 0 and below 1")
    if options.model.is_dir():
        raise HobbitError("drop_high needs a file with two tiers, but MODEL is a folder: convert it first")


def drop_high(path: Path, share: float | str, once: bool = False) -> tuple[Plan, list[KeyValue], str]:
    """Plans the two-tier file `path` without `share` of its high versions, those with the least divergence
    in its calibration. A text: those that static widths keep low within the calibration's limit.
    once: without the low versions of all others, too.

    Returns the plan, the metadata and, for people, what is lost. Raises HobbitError.
    """
    model = _Experts(read_gguf(path))
    divergences, price = _calibration(model)
    if isinstance(share, str):
        dropped = _within_limit(model, divergences, price)
    else:
        dropped = _least_sensitive(model, divergences, share)
    divergence = sum(divergences[model.places[expert]] for expert in dropped)
    kept: dict[int, list[int]] = {}
    for layer, expert in sorted(model.places.keys() - set(dropped)):
        kept.setdefault(layer, []).append(expert)
    left_out = _OWN_KEYS + (("hobbit.t1", "hobbit.t2") if once else ())  # one version leaves no choice
    own = [entry for key, entry in model.file.metadata.items() if not key.startswith(left_out)]
    base = string_entry("hobbit.base_tier", NO_TIER if once else LOW)
    kinds = (_KIND, _KIND if once else "complete")
    own += tier_metadata(_ONCE if once else _VERSION, kinds, base)
    plan = _plan(model, kept, once)
    for tensor in plan.tensors:
        if tensor.experts is not None:
            stem = tensor.name.removesuffix(f".{tensor.tier}.0.weight")
            key = f"hobbit.tier.{tensor.tier}.{stem}.0.experts"
            own.append(array_entry(key, GGUFValueType.INT32, tensor.experts))
    loss = (
        f"{len(model.places) - len(dropped)} of {len(model.places)} experts have a high version; the "
        f"divergences of the others add up to {divergence:.2g} nats"
    )
    return plan, own, loss


class _Experts:
    """The experts of a file with two complete tiers. Raises HobbitError for any other file.

    high, low: their tensors, by layer.  n_experts: by layer.  places: all experts, and where a calibration's
    arrays [n_layers * n_experts] have them.
    """

    def __init__(self, file: GgufFile) -> None:
        path, tiers = file.path, read_tiers(file)
        if file.get("split.count", 0) > 1 or LOW not in tiers.names or file.get("hobbit.sidecar", False):
            raise HobbitError(
                f"drop_high needs one file with two tiers, and {path} is none: make it with "
                f"pyhobbit convert --low TYPE MODEL"
            )
        if tiers.plain != HIGH:
            raise HobbitError(f"{path} has some experts alone in high: drop_high needs two complete tiers")
        routed = {part: tensor for tensor in file.tensors if (part := routed_part(tensor.name))}
        opened_info(path, {"hobbit.enable": True, "hobbit.calibrated": False})  # refuses damaged tiers
        tensors = {tensor.name: tensor for tensor in file.tensors}
        self.file = file
        self.high = dict(sorted(routed.items(), key=lambda item: item[0].layer))
        self.low = {part: low for part in self.high if (low := tensors.get(tier_tensor_name(part, LOW, 0)))}
        if [tensor.ne for tensor in self.low.values()] != [tensor.ne for tensor in self.high.values()]:
            raise HobbitError(
                f"drop_high cannot keep the low tier of {path}, which has several types per tensor"
            )
        self.n_experts = {part.layer: tensor.ne[2] for part, tensor in self.high.items()}
        width = max(self.n_experts.values())
        self.places: dict[_Expert, int] = {
            (layer, expert): i * width + expert
            for i, (layer, n) in enumerate(self.n_experts.items())
            for expert in range(n)
        }


def _calibration(model: _Experts) -> tuple[Sequence[float], float]:
    """Divergences and price of a calibration by static widths. Raises HobbitError."""
    path = calibration_path(model.file.path)
    keys = read_gguf(path).metadata if path.exists() else {}
    command = f"pyhobbit calibrate {model.file.path} --text FILE --set rule=edgemoe"
    if "hobbit.rule" not in keys or keys["hobbit.rule"].value() != "edgemoe":
        raise HobbitError(f"drop_high takes the experts' sensitivities from a calibration: run {command}")
    divergences = keys["hobbit.low_costs"].value()
    size = keys["hobbit.model_bytes"].value() if "hobbit.model_bytes" in keys else None
    if size != model.file.size or len(divergences) != len(model.n_experts) * max(model.n_experts.values()):
        raise HobbitError(f"{path} was made for another model than {model.file.path}: run {command}")
    return divergences, keys["hobbit.price"].value()


def _least_sensitive(model: _Experts, divergences: Sequence[float], share: float) -> list[_Expert]:
    """This share of the experts, by divergence. Raises HobbitError where that is none or all."""
    ranked = sorted(model.places, key=lambda expert: (divergences[model.places[expert]], expert))
    n_dropped = round(share * len(ranked))
    if not 0 < n_dropped < len(ranked):
        raise HobbitError(
            f"drop_high {share:g} drops {n_dropped} of {len(ranked)} experts: some must go, and some stay"
        )
    return ranked[:n_dropped]


def _within_limit(model: _Experts, divergences: Sequence[float], price: float) -> list[_Expert]:
    """Experts that the calibrated static widths keep low, as the rule edgemoe decides. Raises HobbitError."""
    low, high = (sum(tensor.nbytes for tensor in tier.values()) for tier in (model.low, model.high))
    most = price * (1 - low / high)
    dropped = [expert for expert, place in model.places.items() if divergences[place] < most]
    if not 0 < len(dropped) < len(model.places):
        raise HobbitError(
            f"within its limit, {calibration_path(model.file.path)} keeps {len(dropped)} of "
            f"{len(model.places)} experts low: some must go, and some stay; calibrate with another limit, or "
            "give drop_high a share"
        )
    return dropped


def _plan(model: _Experts, kept: Mapping[int, Sequence[int]], once: bool) -> Plan:
    """Plans the file. kept: high experts by layer, ascending.

    A low tier of all experts gets llama.cpp's own names. Otherwise nothing has them: what does not know tiers
    must not take some experts for all.
    """
    experts = {*model.high.values(), *model.low.values()}
    others = [tensor for tensor in model.file.tensors if tensor not in experts]
    wanted = [PlannedTensor(tensor.name, tensor.type, RESIDENT, tensor) for tensor in others]
    for part, tensor in model.low.items():
        high = kept.get(part.layer, ())
        name = tier_tensor_name(part, LOW, 0) if once else model.high[part].name
        ids = tuple(i for i in range(tensor.ne[2]) if i not in high) if once else None
        if ids != ():
            wanted.append(PlannedTensor(name, tensor.type, LOW, tensor, experts=ids))
    for part, tensor in model.high.items():
        if part.layer in kept:
            name, ids = tier_tensor_name(part, HIGH, 0), tuple(kept[part.layer])
            wanted.append(PlannedTensor(name, tensor.type, HIGH, tensor, experts=ids))
    return placed(wanted)
