# SPDX-License-Identifier: MIT
"""Shows the settings that chat would run with, and where each comes from."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyhobbit.cli.options import add_rpc_argument, add_rpc_devices
from pyhobbit.model.model_path import add_model_arguments, model_path
from pyhobbit.model.stored_settings import ENGINE_DEFAULTS, Stored, effective_policy, stored_settings
from pyhobbit.settings.config import (
    CacheConfig,
    EngineConfig,
    SamplingConfig,
    format_size,
    parse_size,
)

if TYPE_CHECKING:
    from pyhobbit.engine.plan import MemoryPlan

_SIZES = ("memory", "pools", "device_memory", "high_pool", "low_pool", "host_cache")


@dataclass(frozen=True)
class Row:
    """One setting. source: "flag", "calibration", "sidecar", "file", "computed" or "default".

    note: how it was computed, or which file it was read from.
    """

    group: str
    name: str
    value: Any
    source: str
    note: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the verb."""
    add_model_arguments(parser)
    add = parser.add_argument
    cache = parser.add_argument_group("as for chat")
    for name, what in (
        ("memory", "bound on the whole process, like 8G (default: by what is free)"),
        ("pools", "memory of the expert cache alone, like 512M"),
        ("device-memory", "of --device, for experts (default: what is free)"),
    ):
        cache.add_argument(f"--{name}", metavar="SIZE", help=what)
    defaults = SamplingConfig()
    for name, kind, what in (
        (
            "device",
            str,
            "that compute the experts, like Vulkan0, or several (default: where the other layers are)",
        ),
        ("mode", str, f"of --device: {', '.join(CacheConfig.modes)} (default: auto)"),
        ("t1", float, "high precision up to this sum of gate weights (default: calibrated, or 1)"),
        ("t2", float, "low precision from t1 to here, above it none (default: calibrated, or 1)"),
        ("low_share", float, "of the pools, for the low tier (default: calibrated, or by t1)"),
        ("policy", str, "which expert leaves a full cache (default: calibrated, or echo)"),
        ("prefetch", int, "layers to look ahead, 0 to 4 (default: 2)"),
        ("sidecar", Path, "file with further precisions (default: MODEL.hobbit.gguf)"),
        ("ctx", int, f"tokens of context (default: the model's, at most {EngineConfig.max_default_ctx})"),
        ("threads", int, "for computing (default: one per processor core)"),
        *(
            (name, kind, f"of the sampling (default: {_or_random(getattr(defaults, name))})")
            for name, kind in _sampling_options()
        ),
    ):
        metavar = {float: "F", int: "N", str: "NAME", Path: "FILE"}[kind]
        cache.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=what)
    add_rpc_argument(parser)
    add("--json", action="store_true", help="print JSON in place of a table")


def _or_random(default: float | None) -> str:
    return "random" if default is None else str(default)


def _sampling_options() -> list[tuple[str, type]]:
    return [(each.name, int if each.name in ("top_k", "seed") else float) for each in fields(SamplingConfig)]


def run(args: argparse.Namespace) -> int:
    """Runs the verb with parsed options; returns the exit status. Raises HobbitError."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    for name in ("memory", "pools", "device_memory"):
        if name in given:
            given[name] = parse_size(given[name])
    cache = CacheConfig(**_only(given, CacheConfig))
    engine = EngineConfig(cache=cache, n_ctx=args.ctx, n_threads=args.threads)
    sampling = SamplingConfig(**_only(given, SamplingConfig))
    path = model_path(args) if args.model or args.hf_repo else None
    add_rpc_devices(args)
    rows = settings(path, engine, sampling, given)
    if args.json:
        print(json.dumps({"model": path and str(path), "settings": [asdict(row) for row in rows]}, indent=2))
    else:
        print(_table(path, rows))
    return 0


def _only(given: Mapping[str, Any], dataclass_type: type) -> dict[str, Any]:
    names = {each.name for each in fields(dataclass_type)}
    return {name: value for name, value in given.items() if name in names}


def settings(
    path: Path | None, engine: EngineConfig, sampling: SamplingConfig, given: Mapping[str, Any]
) -> list[Row]:
    """What applies to a model, or without one what would. given: names of flags that were given.

    Raises HobbitError.
    """
    plan, stored = None, {}
    if path is not None:
        from pyhobbit.engine.plan import lay_out  # takes the native libraries

        plan = lay_out(path, engine)
        stored = stored_settings(path, engine.cache.sidecar)
    cached = plan is None or plan.info.cached
    residual = plan is not None and plan.info.high_is_residual
    return [
        *_size_rows(engine.cache, plan),
        *(_behaviour_rows(engine.cache, stored, residual) if cached else ()),
        *_engine_rows(engine, plan),
        *_sampling_rows(sampling, given),
    ]


#
# rows
#


def _size_rows(cache: CacheConfig, plan: "MemoryPlan | None") -> Iterator[Row]:
    if plan is not None and not plan.info.cached:
        note = "everything in memory" if plan.info.has_experts else "a dense model has no experts to cache"
        yield Row("cache", "memory", None, "computed", f"no cache: {note}, as in stock llama.cpp")
        return
    for name in ("memory", "pools"):
        if (value := getattr(cache, name)) is not None:
            yield Row("cache", name, value, "flag")
        elif name == "memory" and plan is not None and cache.pools is None:
            total = plan.process + plan.beside_pools + plan.host_pools
            yield Row("cache", name, total, "computed", f"{format_size(plan.available)} are free")
        elif name == "memory" and cache.pools is None:
            yield Row("cache", name, None, "computed", "from what is free when a model is opened")
    yield from _device_rows(cache, plan)
    if plan is not None:
        info = plan.info
        what = "residuals of " if info.high_is_residual else ""
        where = f" on {plan.device}" if plan.device else ""
        for name, slots, size in (
            ("high_pool", f"{what}{info.pool_slots_high}", info.pool_bytes_high),
            ("low_pool", str(info.pool_slots_low), info.pool_bytes_low),
        ):
            note = f"room for {slots} of {plan.n_all_experts} experts{where}"
            yield Row("cache", name, size, "computed", note)
        if plan.device:
            note = f"room for {info.host_slots_high} high and {info.host_slots_low} low ones in host memory"
            yield Row("cache", "host_cache", plan.host_pools, "computed", note)


def _device_rows(cache: CacheConfig, plan: "MemoryPlan | None") -> Iterator[Row]:
    if cache.device is not None:
        yield Row("cache", "device", cache.device, "flag")
    elif plan is None:
        yield Row("cache", "device", None, "computed", "where the other layers are")
    else:
        yield Row("cache", "device", plan.device or "CPU", "computed", "where the other layers are")
    is_given = (cache.device, cache.device_memory, cache.mode) != (None,) * 3
    if not is_given and (plan is None or plan.device is None):
        return
    yield Row("cache", "mode", cache.mode or "auto", "flag" if cache.mode else "default")
    if cache.device_memory is not None:
        yield Row("cache", "device_memory", cache.device_memory, "flag")
    elif cache.pools is None:
        yield Row("cache", "device_memory", None, "computed", "from what it has free when a model is opened")


def _behaviour_rows(cache: CacheConfig, stored: Mapping[str, Stored], residual: bool) -> Iterator[Row]:
    ignored = set()
    if cache.t1 is not None or cache.t2 is not None:
        ignored |= {"t1", "t2"}
    if cache.policy is not None:
        ignored.add("weights")
    policy = effective_policy(cache, stored)
    for name in ("t1", "t2", "low_share", "policy", "weights", "prefetch", "io_threads"):
        value = getattr(cache, name)
        if name == "weights" and policy != "hobbit":
            continue  # of no other policy
        if value is not None:
            yield Row("cache", name, value, "flag")
        elif name in stored and name not in ignored:
            own = stored[name]
            yield Row("cache", name, own.value, own.source, own.path.name)
        elif name == "t1" and cache.t2 is not None:
            yield Row("cache", name, min(1.0, cache.t2), "computed", "as t2 is given")
        elif name == "low_share":
            n_low = "2 - t1" if residual else "1 - t1"
            yield Row("cache", name, None, "computed", f"{n_low} slots for each of the high pool")
        else:
            yield Row("cache", name, ENGINE_DEFAULTS[name], "default")
    for name in ("sidecar", "calibration"):
        if name == "sidecar" and cache.sidecar is not None:
            yield Row("cache", name, str(cache.sidecar), "flag")
        elif name in stored:
            yield Row("cache", name, stored[name].value, "file", "lies beside the model")


def _engine_rows(engine: EngineConfig, plan: "MemoryPlan | None") -> Iterator[Row]:
    if engine.n_ctx is not None:
        yield Row("engine", "ctx", engine.n_ctx, "flag")
    elif plan is not None:
        note = f"the model knows {plan.n_ctx_train}, at most {engine.max_default_ctx} by itself"
        yield Row("engine", "ctx", plan.info.n_ctx, "computed", note)
    else:
        yield Row("engine", "ctx", None, "computed", f"the model's, at most {engine.max_default_ctx}")
    yield Row("engine", "batch", engine.n_batch, "default")
    if engine.n_threads is not None:
        yield Row("engine", "threads", engine.n_threads, "flag")
    else:
        value = None if plan is None else plan.info.n_threads
        yield Row("engine", "threads", value, "computed", "one per processor core")


def _sampling_rows(sampling: SamplingConfig, given: Mapping[str, Any]) -> Iterator[Row]:
    for name, _ in _sampling_options():
        value = getattr(sampling, name)
        random = "random" if name == "seed" and value is None else ""
        yield Row("sampling", name, value, "flag" if name in given else "default", random)


def _table(path: Path | None, rows: Sequence[Row]) -> str:
    texts = [(row, _text(row)) for row in rows]
    width = max(len(text) for _, text in texts)
    lines = [f"settings for {path or 'any model'}"]
    group = None
    for row, text in texts:
        if row.group != group:
            group = row.group
            lines += ["", group]
        note = f" ({row.note})" if row.note else ""
        lines.append(f"  {row.name:<15} {text:<{width}}  {row.source}{note}")
    return "\n".join(lines)


def _text(row: Row) -> str:
    if row.value is None:
        return "-"
    if row.name in _SIZES:
        return format_size(row.value)
    if isinstance(row.value, float):
        return f"{row.value:g}"
    return ", ".join(f"{each:g}" for each in row.value) if isinstance(row.value, tuple) else str(row.value)
