# SPDX-License-Identifier: MIT
"""Shows what a model holds, how it fits this machine, and what would make it faster."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyhobbit.cli.options import (
    add_engine_arguments,
    add_model_options,
    add_projector_argument,
    add_rpc_devices,
    engine_config,
)
from pyhobbit.errors import HobbitError
from pyhobbit.model.model_path import add_model_arguments, model_path
from pyhobbit.model.names import check_model_file
from pyhobbit.model.stored_settings import effective_rule, stored_settings
from pyhobbit.settings.config import InspectConfig, format_size
from pyhobbit.settings.table import OPTIONS

# What takes the native libraries is imported when it is needed.
if TYPE_CHECKING:
    from pyhobbit.engine.stats import ModelInfo
    from pyhobbit.model.model_file import ModelFile, Tier


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the verb."""
    add_model_arguments(parser)
    add = parser.add_argument
    add("--trace", type=Path, metavar="FILE", help="estimate the speed for this trace of chat --trace")
    add("--no-speed", action="store_true", help="skip the speed estimate, which loads the model")
    add("--json", action="store_true", help="print everything as one JSON document")
    add_projector_argument(parser)
    paper = {"t1": InspectConfig.paper_t1, "t2": InspectConfig.paper_t2}
    thresholds = {name: f"the model's, or {value}" for name, value in paper.items()}
    add_engine_arguments(parser, [name for name in OPTIONS if name not in ("trace", "remember")], thresholds)


def run(args: argparse.Namespace) -> int:
    """Runs the verb with parsed options; returns the exit status. Raises HobbitError."""
    config = _config(args)
    add_rpc_devices(args)
    model = model_path(args)
    if add_model_options(args, model):
        config = _config(args)
    _inspect(model, config, args.json)
    return 0


def _config(args: argparse.Namespace) -> InspectConfig:
    return InspectConfig(
        engine=engine_config(args, None, without=("t1", "t2", "trace")),
        t1=args.t1,
        t2=args.t2,
        n_ctx=args.ctx,
        trace=args.trace,
        speed=not args.no_speed,
    )


def _inspect(path: Path, config: InspectConfig, as_json: bool) -> None:
    from pyhobbit.inspect.machine import Fit
    from pyhobbit.model.model_file import opened_info, read_model_file

    check_model_file(path)
    # refuses a dense model before anything is shown
    opened_info(path, {"hobbit.enable": True, **config.engine.cache.settings()})
    model = read_model_file(path, config.engine.cache.sidecar)
    fit = Fit(model, config)
    applied = opened_info(path, {"hobbit.enable": True, **fit.cache.settings()})
    document: dict[str, Any] = {
        "model": {**model.as_dict(), "t1": applied.t1, "t2": applied.t2, "price": applied.price},
        "memory": fit.memory_dict(),
    }
    show = _nothing if as_json else print
    rule = effective_rule(fit.cache, stored_settings(path, fit.cache.sidecar))
    show(_rows_text({**_description(model), "precision": _precision_text(applied, rule)}))
    cache = config.engine.cache
    asked = (cache.memory, cache.pools, cache.device, cache.device_memory, cache.mode)
    if fit.error and any(each is not None for each in (config.n_ctx, config.engine.projector, *asked)):
        raise HobbitError(fit.error)  # what was asked for cannot be
    show(f"\n{_rows_text({**fit.gpu_rows(), **fit.memory_rows()})}", flush=True)
    if config.speed and fit.plan is not None:
        document["speed"] = fit.measure()
        show(f"\n{_rows_text(fit.speed_rows())}")
    document["advice"] = fit.advice()
    for i, sentence in enumerate(document["advice"]):
        show(f"{'' if i else 'advice':<13} - {sentence}")
    if as_json:
        print(json.dumps(document, indent=2))


def _precision_text(applied: "ModelInfo", rule: str) -> str:
    if applied.price > 0:
        return f"rule {rule}, price = {applied.price:g}"
    if applied.t1 < 1:
        return f"rule {rule}, t1 = {applied.t1:g}, t2 = {applied.t2:g}"
    return "everything in high precision"


def _nothing(_text: str, flush: bool = False) -> None:
    pass


def _description(model: "ModelFile") -> dict[str, str]:
    n_layers = model.key("block_count", len(model.blocks))
    with_experts = "all" if n_layers == len(model.blocks) else str(len(model.blocks))
    n_shared = model.key("expert_shared_count", 0)
    rows = {
        "model": f"{model.path}, {model.value('general.name', 'without a name')}",
        "architecture": f"{model.architecture}, {_count(model.n_parameters)} parameters",
        "layers": f"{n_layers}, {with_experts} with routed experts",
        "experts": f"{model.n_experts} per layer, {model.key('expert_used_count')} used per token"
        + (f", {n_shared} shared" if n_shared else ""),
        **{f"tier {tier.name}": _tier_text(tier, model) for tier in model.tiers},
        **({"unused": _unused_text(model)} if model.unused_bytes else {}),
    }
    if model.calibration is not None:
        rows["calibration"] = str(model.calibration)
    return rows


def _rows_text(rows: Mapping[str, str]) -> str:
    return "\n".join(f"{name:<13} {text}" for name, text in rows.items())


def _count(n: float) -> str:
    return f"{n / 1e9:.1f} billion" if n >= 1e9 else f"{n / 1e6:.1f} million"


def _tier_text(tier: "Tier", model: "ModelFile") -> str:
    in_model = tier.path == model.path or (tier.name == "high" and tier.residual_on is None)
    where = "" if in_model else f", in {tier.path.name}"
    size, expert_size = format_size(tier.n_bytes), format_size(tier.expert_bytes)
    types, bits = ", ".join(tier.types), tier.bits_per_weight
    if tier.residual_on is None:
        lacking = f"; {tier.n_absent} of {tier.n_experts} experts have no {tier.name} version"
        return f"{size} in {types}, {bits:.2f} bits per weight, {expert_size} per expert{where}" + (
            lacking if tier.n_absent else ""
        )
    lower = next(each for each in model.tiers if each.name == tier.residual_on)
    both = format_size(lower.expert_bytes + tier.expert_bytes)
    return (
        f"tier {lower.name} and a residual of {size} in {types}{where}: {lower.bits_per_weight:.2f} + "
        f"{bits:.2f} = {lower.bits_per_weight + bits:.2f} bits per weight, {both} per expert; "
        f"going from {lower.name} to {tier.name} reads {expert_size}"
    )


def _unused_text(model: "ModelFile") -> str:
    return f"{format_size(model.unused_bytes)} of experts in the model itself, which the tiers replace"
