# SPDX-License-Identifier: MIT
"""Shows what a model holds, how it fits this machine, and what would make it faster.

For USER/NAME it downloads nothing, and shows which QUANT to take.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyhobbit.cli.help import Parser
from pyhobbit.cli.list import require_model
from pyhobbit.cli.options import add_engine_arguments, add_model_options, add_rpc_devices, engine_config
from pyhobbit.errors import ConfigError, HobbitError, LoadError
from pyhobbit.model.file_names import is_model_file
from pyhobbit.model.model_path import add_model_arguments, model_path
from pyhobbit.model.names import check_model_file, parse_repository
from pyhobbit.model.other_programs import moe_form
from pyhobbit.settings.config import EngineConfig, format_size, parse_size
from pyhobbit.settings.table import NUMBERS, OPTIONS, Key

# Modules that load the native libraries are imported when they are needed.
if TYPE_CHECKING:
    from pyhobbit.engine.plan import MemoryPlan
    from pyhobbit.model.model_file import ModelFile, Tier


def add_arguments(parser: Parser) -> None:
    add_model_arguments(parser)
    add = parser.add_argument
    add("--no-speed", action="store_true", help="skip the speed estimate, which loads the model")
    add("--json", action="store_true", help="print everything as one JSON document")
    what = "bytes per second of the disk, in place of measuring; for USER/NAME"
    names = [name for name in OPTIONS if name not in ("trace", "timeline")]
    add_engine_arguments(parser, names, {"disk_speed": Key("size", what)})


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    require_model(args)
    if args.hf_repo is not None:
        repository, quant = parse_repository(args.hf_repo)
        if quant is None:
            _recommend(repository, config.cache.memory, args)
            return 0
    if args.disk_speed is not None:
        raise ConfigError("disk_speed is for USER/NAME without a QUANT; leave it out")
    add_rpc_devices(args)
    model = model_path(args)
    add_model_options(args, model)
    add_rpc_devices(args)  # machines that the model keeps
    _inspect(model, engine_config(args), args)
    return 0


def _recommend(name: str, memory: int | None, args: argparse.Namespace) -> None:
    """Shows which quantisation of a repository to take."""
    from pyhobbit.model import recommend  # huggingface_hub takes half a second to import

    repo = recommend.Repo(name)
    files = repo.sizes()
    machine = recommend.this_machine(memory, args.disk_speed and parse_size(args.disk_speed))
    found = recommend.choices(repo, files, machine)
    if args.json:
        rows, chosen = [asdict(each) for each in found], recommend.best(found).label
        print(json.dumps({"machine": asdict(machine), "choices": rows, "chosen": chosen}, indent=2))
        return
    marked = recommend.best(found) if any(each.speed for each in found) else None
    width = max(len(each.label) for each in found)
    print(f"  {'QUANT':{width}}  {'SIZE':>10}  EXPERTS IN MEMORY  TOKEN/S")
    for each in found:
        mark, speed = ">" if each is marked else " ", f"{each.speed:.4g}" if each.speed else "no room"
        print(f"{mark} {each.label:{width}}  {format_size(each.size):>10}  {each.share:17.0%}  {speed:>7}")
    print(recommend.reason(found, machine))


def _inspect(path: Path, config: EngineConfig, args: argparse.Namespace) -> None:
    from pyhobbit.engine.placement import choose
    from pyhobbit.inspect import advice, forecast
    from pyhobbit.inspect.speed import measure
    from pyhobbit.model.model_file import opened_info, read_model_file
    from pyhobbit.model.tiers import default_low_types
    from pyhobbit.native.ffi import ffi
    from pyhobbit.settings.resolve import resolve

    check_model_file(path)
    if is_model_file(path) and moe_form(path) is None:
        _inspect_dense(path, config, args.json)
        return
    cache = config.cache
    info = opened_info(path, {"hobbit.enable": True, **cache.settings()})  # refuses a dense model
    applied = {name: each.value for name, each in resolve(path, cache.settings()).items()}
    model = read_model_file(path, cache.sidecar)
    plan, error = _plan(path, config)
    document: dict[str, Any] = {
        "model": {**model.as_dict(), **{name: applied[name] for name in NUMBERS}},
        "memory": {"error": error} if plan is None else asdict(plan),
    }
    show: Any = (lambda *_, **__: None) if args.json else print
    precision = ffi.string(info.precision).decode()
    numbers = ", ".join(" = ".join(each.split()) for each in precision.split(", "))
    best = "the best that each expert has" if model.tiers[0].n_absent else "everything in high precision"
    rows = {
        **_description(model),
        "precision": f"rule {applied['rule']}, {numbers}" if numbers else best,
    }
    if len(model.tiers) > 1 and not model.tiers[-1].n_absent:
        rows["quality"] = advice.qualities(path, cache)
    show(_rows_text(rows))
    asked = (cache.memory, cache.pools, cache.device, cache.device_memory, cache.mode)
    if plan is None and any(each is not None for each in (config.n_ctx, *asked)):
        raise HobbitError(error)  # the options cannot be met
    rows = {"memory": error}
    if plan is not None:
        rows = {"GPU": advice.planned_gpu_text(plan), **advice.memory_rows(plan)}
    show(f"\n{_rows_text(rows)}", flush=True)
    speed = None
    if plan is not None and not args.no_speed:
        speed = measure(model, config, plan)
        document["placement"] = choose(path, config).text
        document["speed"] = {**asdict(speed), "tokens_per_second": speed.tokens_per_second}
        rows = advice.speed_rows(plan, speed)
        show(f"\n{_rows_text({**rows, 'placement': text} if (text := document['placement']) else rows)}")
        if (found := forecast.forecast(model, config, plan, speed)) is not None:
            document["forecast"] = asdict(found)
            show("\n" + "\n".join(forecast.lines(found)) + "\n")
    document["advice"] = []
    if plan is not None:
        may_add_low = default_low_types(model.routed_tensors()) is not None
        document["advice"] = advice.advice(plan, speed, cache, model.calibration is not None, may_add_low)
    for i, sentence in enumerate(document["advice"]):
        show(f"{'' if i else 'advice':<13} - {sentence}")
    if args.json:
        print(json.dumps(document, indent=2))


def _inspect_dense(path: Path, config: EngineConfig, as_json: bool) -> None:
    """Shows whether a model without routed experts fits."""
    from pyhobbit.engine.plan import lay_out
    from pyhobbit.inspect.advice import memory_rows

    plan = lay_out(path, config)
    needed, free = plan.process + plan.beside_pools, plan.available
    fits = f"{'yes' if needed <= free else 'no'}: it takes {format_size(needed)} of {format_size(free)}"
    rows = {"model": f"{path}, {plan.info.description}", **memory_rows(plan), "fits": fits}
    print(json.dumps({"memory": asdict(plan)}, indent=2) if as_json else _rows_text(rows))


def _plan(path: Path, config: EngineConfig) -> "tuple[MemoryPlan | None, str]":
    """How chat would open the model; None where it does not fit, and why not."""
    from pyhobbit.engine.plan import lay_out

    try:
        return lay_out(path, config), ""
    except LoadError:
        raise
    except HobbitError as e:
        return None, str(e)


def _description(model: "ModelFile") -> dict[str, str]:
    from pyhobbit.model.model_file import holds_head

    n_layers = model.key("block_count", len(model.blocks))
    drafts = ", a draft block (MTP) among them" if holds_head(model.tensors) else ""
    n = model.n_parameters
    size = f"{n / 1e9:.1f} billion" if n >= 1e9 else f"{n / 1e6:.1f} million"
    with_experts = "all" if n_layers == len(model.blocks) else str(len(model.blocks))
    rows = {
        "model": f"{model.path}, {model.value('general.name', 'without a name')}",
        "architecture": f"{model.architecture}, {size} parameters",
        "layers": f"{n_layers}{drafts}, {with_experts} with routed experts",
        "experts": f"{model.n_experts} per layer, {_used_text(model)}"
        + (f", {model.n_shared} shared" if model.n_shared else ""),
        **{f"tier {tier.name}": _tier_text(tier, model) for tier in model.tiers},
    }
    if model.calibration is not None:
        rows["calibration"] = str(model.calibration)
    return rows


def _used_text(model: "ModelFile") -> str:
    """Experts of a token, from the least of a layer to the most."""
    least, most = min(model.n_used.values()), max(model.n_used.values())
    return f"{least} used per token" if least == most else f"{least} to {most} used per token"


def _rows_text(rows: Mapping[str, str]) -> str:
    return "\n".join(f"{name:<13} {text}" for name, text in rows.items())


def _tier_text(tier: "Tier", model: "ModelFile") -> str:
    in_model = tier.path == model.path or tier.name == "high"
    rest = "" if in_model else f", in {tier.path.name}"
    if tier.n_absent:
        rest += f"; {tier.n_absent} of {tier.n_experts} experts have no {tier.name} version"
    size, expert_size = format_size(tier.n_bytes), format_size(tier.expert_bytes)
    types, bits = ", ".join(tier.types), tier.bits_per_weight
    return f"{size} in {types}, {bits:.2f} bits per weight, {expert_size} per expert{rest}"
