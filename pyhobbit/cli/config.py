# SPDX-License-Identifier: MIT
"""Shows the settings that chat would run with, and where each comes from."""

import argparse
import json
import sys
from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pyhobbit.cli.help import Parser
from pyhobbit.cli.options import (
    add_answer_arguments,
    add_engine_arguments,
    add_model_options,
    add_rpc_devices,
    add_sampling_arguments,
    engine_config,
    sampling_config,
)
from pyhobbit.errors import ConfigError
from pyhobbit.model.file_names import calibration_path, options_path, sidecar_path
from pyhobbit.model.model_path import add_model_arguments, model_path
from pyhobbit.model.names import check_model_file
from pyhobbit.settings.config import CacheConfig, ChatConfig, EngineConfig, SamplingConfig, value_text
from pyhobbit.settings.table import Resolved, default_text

if TYPE_CHECKING:
    from pyhobbit.engine.plan import MemoryPlan

_ANSWERS = ("max_tokens", "system", "think")


Groups = dict[str, list[Resolved]]
"""Settings by group. One from the file beside the model has the source "options"."""


def add_arguments(parser: Parser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--write", action="store_true", help="keep the given options in MODEL.toml")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_answer_arguments(parser)
    add_sampling_arguments(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    _chat_config(args)  # an error comes before a long download
    path = model_path(args) if args.model or args.hf_repo else None
    if args.write:
        _write(args, path)
    own = {} if path is None else add_model_options(args, path)
    given = {name for name, value in vars(args).items() if value is not None}
    add_rpc_devices(args)
    config = _chat_config(args)
    sampling = config.sampling
    if path is not None:
        from pyhobbit.model.gguf_file import read_gguf  # takes a while

        check_model_file(path)
        keys = read_gguf(path).metadata
        config = replace(config, given=given)
        sampling = config.sampling_of(lambda key: keys[key].value() if key in keys else None)
    groups = settings(path, config.engine, sampling, given)
    groups["answers"] = [Resolved(name, vars(args)[name], "flag") for name in _ANSWERS if name in given]
    if path is not None:
        source = {"source": "options", "note": options_path(path).name}
        for rows in groups.values():
            rows[:] = [replace(row, **source) if row.name in own else row for row in rows]
    if args.json:
        found = [{"group": group, **asdict(row)} for group, rows in groups.items() for row in rows]
        print(json.dumps({"model": path and str(path), "settings": found}, indent=2))
    else:
        print(_table(path, groups))
    return 0


def _chat_config(args: argparse.Namespace) -> ChatConfig:
    given = {name: vars(args)[name] for name in _ANSWERS if vars(args)[name] is not None}
    return ChatConfig(engine_config(args), sampling_config(args), **given)


def _write(args: argparse.Namespace, model: Path | None) -> None:
    """Keeps the options that were given in the file beside the model."""
    from pyhobbit.model.options_file import KINDS, write_options

    if model is None:
        raise ConfigError("--write keeps options for a model; name it")
    given = {name: value for name, value in vars(args).items() if name in KINDS and value is not None}
    if not given:
        raise ConfigError("--write keeps the options that are given with it, such as --memory 8G; give one")
    path = write_options(model, given)
    print(f"pyhobbit: {path} keeps {', '.join(given)}", file=sys.stderr)


def settings(
    path: Path | None, engine: EngineConfig, sampling: SamplingConfig, given: Collection[str]
) -> Groups:
    """The settings of a model, or without one of any. given: names of flags that were. Raises HobbitError."""
    plan = None
    if path is not None:
        from pyhobbit.engine.plan import lay_out  # takes the native libraries

        plan = lay_out(path, engine)
    return {
        "cache": list(_cache_rows(path, engine.cache, plan)),
        "engine": list(_engine_rows(engine, plan)),
        "sampling": list(_sampling_rows(sampling, given)),
    }


# --- rows


def _cache_rows(path: Path | None, cache: CacheConfig, plan: "MemoryPlan | None") -> Iterator[Resolved]:
    if plan is not None and not plan.info.cached:
        yield Resolved("memory", None, "computed", plan.memory_text)
        return
    from pyhobbit.settings.resolve import resolve  # takes the native libraries

    on_gpu = (cache.device, cache.device_memory, cache.mode, plan and plan.device) != (None,) * 4
    left_out = set() if on_gpu else {"mode", "device_memory"}
    left_out |= set() if cache.pools is None else {"memory", "device_memory"}
    files = {} if path is None else {"calibration": calibration_path(path).name}
    for each in resolve(path, cache.settings()).values():
        if each.value is not None or each.name == "low_share":
            if each.source == "flag" or each.name not in left_out:
                yield replace(each, note=each.note or files.get(each.source, ""))
        elif each.name in ("memory", "device", "device_memory") and each.name not in left_out:
            yield _planned_row(each.name, plan)
    if path is not None:
        for name, file in (("sidecar", sidecar_path(path)), ("calibration", calibration_path(path))):
            if file.exists() and getattr(cache, name, None) is None:
                yield Resolved(name, str(file), "file", "lies beside the model")


def _planned_row(name: str, plan: "MemoryPlan | None") -> Resolved:
    """A setting that is computed from memory and devices when a model is opened."""
    if name == "device":
        value = None if plan is None else plan.device or "CPU"
        return Resolved(name, value, "computed", default_text("device"))
    if name == "device_memory":
        return Resolved(name, None, "computed", "from what it has free when a model is opened")
    if plan is None:
        return Resolved(name, None, "computed", "from what is free when a model is opened")
    return Resolved(name, plan.most, "computed", plan.memory_text)


def _engine_rows(engine: EngineConfig, plan: "MemoryPlan | None") -> Iterator[Resolved]:
    context = f"{engine.contexts[0]} to {engine.contexts[-1]}, by memory"
    if plan is not None:
        of_model = f"the model was trained for {plan.info.n_ctx_train}"
        context = of_model if plan.info.n_ctx_train <= engine.contexts[0] else f"{context}; {of_model}"
    batch = f"{engine.batches[0]} to {engine.batches[-1]}, by memory"
    for name, given, planned, note in (
        ("ctx", engine.n_ctx, plan and plan.info.n_ctx, context),
        ("batch", engine.n_batch, plan and plan.n_batch, batch),
        ("threads", engine.n_threads, plan and plan.info.n_threads, "one per processor core"),
    ):
        yield Resolved(name, planned, "computed", note) if given is None else Resolved(name, given, "flag")


def _sampling_rows(sampling: SamplingConfig, given: Collection[str]) -> Iterator[Resolved]:
    default = asdict(SamplingConfig())
    for name, value in asdict(sampling).items():
        random = "random" if name == "seed" and value is None else ""
        source = "flag" if name in given else "default" if value == default[name] else "file"
        yield Resolved(name, value, source, random)


def _table(path: Path | None, groups: Groups) -> str:
    width = max(len(value_text(row.name, row.value)) for rows in groups.values() for row in rows)
    lines = [f"settings for {path or 'any model'}"]
    for group, rows in groups.items():
        lines += ["", group] if rows else []
        for row in rows:
            note = f" ({row.note})" if row.note else ""
            lines.append(f"  {row.name:<15} {value_text(row.name, row.value):<{width}}  {row.source}{note}")
    return "\n".join(lines)
