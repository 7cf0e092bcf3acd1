# SPDX-License-Identifier: MIT
"""Shows the settings that chat would run with, and where each comes from."""

import argparse
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyhobbit.cli.options import (
    add_answer_arguments,
    add_engine_arguments,
    add_model_options,
    add_projector_argument,
    add_rpc_devices,
    add_sampling_arguments,
    engine_config,
    sampling_config,
    setting_value,
)
from pyhobbit.errors import ConfigError
from pyhobbit.model.file_names import options_path
from pyhobbit.model.model_path import add_model_arguments, model_path
from pyhobbit.model.stored_settings import Stored, effective_policy, effective_rule, stored_settings
from pyhobbit.settings.config import CacheConfig, ChatConfig, EngineConfig, SamplingConfig, format_size
from pyhobbit.settings.table import OPTIONS, default, default_text

if TYPE_CHECKING:
    from pyhobbit.engine.plan import MemoryPlan

_POOLS = ("high_pool", "low_pool", "host_cache")
_SIZES = (*_POOLS, *(name for name, specs in OPTIONS.items() if specs[0].kind == "size"))
_FILES = ("sidecar", "trace")
_ANSWERS = ("max_tokens", "system", "think")
# Apart from sizes and files, and from what says where experts are computed.
_BEHAVIOUR = tuple(name for name in OPTIONS if name not in (*_SIZES, *_FILES, "device", "mode"))


@dataclass(frozen=True)
class Row:
    """One setting. source: "flag", "options", "calibration", "sidecar", "file", "computed" or "default".

    note: how it was computed, or which file it was read from; "options" is the model's own file of options.
    """

    group: str
    name: str
    value: Any
    source: str
    note: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the verb."""
    add_model_arguments(parser)
    parser.add_argument("--write", action="store_true", help="keep the given options in MODEL.toml")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_answer_arguments(parser)
    add_sampling_arguments(parser)
    add_projector_argument(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the verb with parsed options; returns the exit status. Raises HobbitError."""
    _chat_config(args)  # before a long download
    path = model_path(args) if args.model or args.hf_repo else None
    if args.write:
        _write(args, path)
    own = {} if path is None else add_model_options(args, path)
    given = {name for name, value in vars(args).items() if value is not None}
    add_rpc_devices(args)
    config = _chat_config(args)
    rows = settings(path, config.engine, config.sampling, given)
    rows += [Row("answers", name, vars(args)[name], "flag") for name in _ANSWERS if name in given]
    if path is not None:
        note = options_path(path).name
        rows = [replace(row, source="options", note=note) if row.name in own else row for row in rows]
    if args.json:
        print(json.dumps({"model": path and str(path), "settings": [asdict(row) for row in rows]}, indent=2))
    else:
        print(_table(path, rows))
    return 0


def _chat_config(args: argparse.Namespace) -> ChatConfig:
    given = {name: vars(args)[name] for name in _ANSWERS if vars(args)[name] is not None}
    return ChatConfig(engine_config(args, args.ctx), sampling_config(args), **given)


def _write(args: argparse.Namespace, model: Path | None) -> None:
    """Keeps the options that were given in the file beside the model."""
    from pyhobbit.model.options_file import KINDS, write_options

    if model is None:
        raise ConfigError("--write keeps options for a model; name it")
    given = {name: value for name, value in vars(args).items() if name in KINDS and value is not None}
    if not given:
        raise ConfigError("--write keeps the options that are given with it, such as --memory 8G; give one")
    lists = {name: setting_value(name, given[name]) for name in given if len(OPTIONS.get(name, ())) > 1}
    path = write_options(model, {**given, **lists})
    print(f"pyhobbit: {path} keeps {', '.join(given)}", file=sys.stderr)


def settings(
    path: Path | None, engine: EngineConfig, sampling: SamplingConfig, given: Collection[str]
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
            yield Row("cache", name, plan.most, "computed", f"{format_size(plan.available)} are free")
        elif name == "memory" and cache.pools is None:
            yield Row("cache", name, None, "computed", "from what is free when a model is opened")
    yield from _device_rows(cache, plan)
    if plan is not None:
        info = plan.info
        what = "residuals of " if info.high_is_residual else ""
        where = f" on {plan.device}" if plan.device else ""
        for name, slots, n_all, size in (
            ("high_pool", f"{what}{info.pool_slots_high}", info.n_high_experts, info.pool_bytes_high),
            ("low_pool", str(info.pool_slots_low), info.n_all_experts, info.pool_bytes_low),
        ):
            note = f"room for {slots} of {n_all} experts{where}"
            yield Row("cache", name, size, "computed", note)
        if plan.device:
            note = f"room for {info.host_slots_high} high and {info.host_slots_low} low ones in host memory"
            yield Row("cache", "host_cache", plan.host_pools, "computed", note)


def _device_rows(cache: CacheConfig, plan: "MemoryPlan | None") -> Iterator[Row]:
    if cache.device is not None:
        yield Row("cache", "device", cache.device, "flag")
    elif plan is None:
        yield Row("cache", "device", None, "computed", default_text("device"))
    else:
        yield Row("cache", "device", plan.device or "CPU", "computed", default_text("device"))
    is_given = (cache.device, cache.device_memory, cache.mode) != (None,) * 3
    if not is_given and (plan is None or plan.device is None):
        return
    yield Row("cache", "mode", cache.mode or default("mode"), "flag" if cache.mode else "default")
    if cache.device_memory is not None:
        yield Row("cache", "device_memory", cache.device_memory, "flag")
    elif cache.pools is None:
        yield Row("cache", "device_memory", None, "computed", "from what it has free when a model is opened")


def _ignored(cache: CacheConfig, stored: Mapping[str, Stored]) -> set[str]:
    """Stored settings that do not apply beside what is given."""
    rule = effective_rule(cache, stored)
    ignored = {"price"} if rule in ("gate", "rank", "random") else {"t1", "t2"}
    if cache.t1 is not None or cache.t2 is not None:
        ignored |= {"t1", "t2"}
    if cache.rule == "rank":
        ignored |= {"t1", "t2", "low_share"}
    if "rule" in stored and rule != stored["rule"].value:
        ignored.add("rule")
    if cache.policy is not None:
        ignored.add("weights")
    return ignored


def _behaviour_rows(cache: CacheConfig, stored: Mapping[str, Stored], residual: bool) -> Iterator[Row]:
    ignored, rule = _ignored(cache, stored), effective_rule(cache, stored)
    policy = effective_policy(cache, stored)
    for name in _BEHAVIOUR:
        value = getattr(cache, name)
        if name == "weights" and policy != "hobbit":
            continue  # of no other policy
        if value is not None:
            yield Row("cache", name, value, "flag")
        elif name in stored and name not in ignored:
            own = stored[name]
            yield Row("cache", name, own.value, own.source, own.path.name)
        else:
            yield _computed_row(name, cache, rule, residual)
    for name in (*_FILES, "calibration"):
        if value := getattr(cache, name, None):
            yield Row("cache", name, str(value), "flag")
        elif name in stored:
            yield Row("cache", name, stored[name].value, "file", "lies beside the model")


def _computed_row(name: str, cache: CacheConfig, rule: str, residual: bool) -> Row:
    """Of a setting that neither the user nor a file gives."""
    is_half = cache.rule == "rank" and cache.t1 is None and cache.t2 is None
    if is_half and name in ("t1", "t2", "low_share"):
        value = 0.0 if name == "low_share" else 0.5
        return Row("cache", name, value, "computed", "the better half of a token's experts")
    if name == "t1" and cache.t2 is not None:
        return Row("cache", name, min(1.0, cache.t2), "computed", "as t2 is given")
    if name == "rule" and rule != default("rule"):
        return Row("cache", name, rule, "computed", "as price is given")
    if name == "low_share":
        n_low = "2 - t1" if residual else "1 - t1"
        return Row("cache", name, None, "computed", f"{n_low} slots for each of the high pool")
    return Row("cache", name, default(name), "default")


def _engine_rows(engine: EngineConfig, plan: "MemoryPlan | None") -> Iterator[Row]:
    least, *_, most = engine.contexts
    if engine.n_ctx is not None:
        yield Row("engine", "ctx", engine.n_ctx, "flag")
    elif plan is not None:
        note = f"{least} to {most}, by memory; the model was trained for {plan.info.n_ctx_train}"
        yield Row("engine", "ctx", plan.info.n_ctx, "computed", note)
    else:
        yield Row("engine", "ctx", None, "computed", f"{least} to {most}, by memory")
    if engine.n_batch is not None:
        yield Row("engine", "batch", engine.n_batch, "flag")
    else:
        value = None if plan is None else plan.n_batch
        least, *_, most = engine.batches
        yield Row("engine", "batch", value, "computed", f"{least} to {most}, by memory")
    if engine.n_threads is not None:
        yield Row("engine", "threads", engine.n_threads, "flag")
    else:
        value = None if plan is None else plan.info.n_threads
        yield Row("engine", "threads", value, "computed", "one per processor core")
    if engine.projector is not None:
        note = "" if plan is None else f"{format_size(plan.projector)} of the memory"
        yield Row("engine", "mmproj", str(engine.projector), "flag", note)


def _sampling_rows(sampling: SamplingConfig, given: Collection[str]) -> Iterator[Row]:
    for name, value in asdict(sampling).items():
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
