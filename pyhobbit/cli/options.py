# SPDX-License-Identifier: MIT
"""Options that several verbs share. The expert cache's own come from the engine's table of settings."""

import argparse
import sys
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pyhobbit.cli.help import METAVARS, TYPES, Parser
from pyhobbit.settings.config import SAMPLING_HELP, CacheConfig, EngineConfig, SamplingConfig, parse_size
from pyhobbit.settings.papers import PAPER_HELP, paper_text, settings_of
from pyhobbit.settings.table import NAMED, OPTIONS, Key, default_text, help_text

_RENAMED = {"ctx": "n_ctx", "batch": "n_batch", "threads": "n_threads"}  # fields of EngineConfig, by option
_SHORT = 32  # characters of choices that stand in place of NAME


def _key(name: str) -> Key:
    """The key of a setting."""
    specs = OPTIONS[name]
    words = "|".join(specs[0].choices)
    is_short = 0 < len(words) < _SHORT
    text = specs[0].help if is_short else help_text(name)
    text, note = text.removesuffix("."), default_text(name)
    note = note.lower() if specs[0].kind == "flag" else note
    start = text[0].lower() + text[1:] if text[1:2].islower() else text
    text = (f"{start} (default: {note})" if note else start).replace("%", "%%")
    kind = "list" if len(specs) > 1 else specs[0].kind
    return Key(kind, text, words if is_short else METAVARS.get(kind, "NAME"))


def add_setting_arguments(
    parser: Parser, names: Collection[str] = tuple(OPTIONS), more: Mapping[str, Key] = MappingProxyType({})
) -> None:
    """Declares settings of the cache, those of studies as keys of --set; cache_config() takes them.

    more: keys that the verb takes beside settings.
    """
    if named := [name for name in NAMED if name in names]:
        group = parser.add_argument_group("expert cache (a calibrated model has defaults of its own)")
        for name in named:
            key = _key(name)
            given = {"type": TYPES.get(key.kind, str), "metavar": key.metavar, "help": key.help}
            group.add_argument(f"--{name.replace('_', '-')}", **given)
    parser.add_keys({name: _key(name) for name in names if name not in NAMED} | dict(more))


def cache_config(args: argparse.Namespace, without: Collection[str] = ()) -> CacheConfig:
    """The settings of the cache; puts --paper's into args. without: names left out. Raises ConfigError."""
    _take_paper(args)
    named = {name: getattr(args, name, None) for name in OPTIONS if name not in without}
    given = {name: each for name, each in named.items() if each is not None}
    sizes = [name for name in given if OPTIONS[name][0].kind == "size" and isinstance(given[name], str)]
    config = CacheConfig(**{**given, **{name: parse_size(given[name]) for name in sizes}})
    if settings := config.settings():
        from pyhobbit.settings.resolve import check_settings  # takes the native libraries

        check_settings(settings)
    return config


def _take_paper(args: argparse.Namespace) -> None:
    paper, args.paper = getattr(args, "paper", None), None
    if paper is not None:
        chosen = settings_of(paper, vars(args))
        vars(args).update(chosen)
        if not getattr(args, "quiet", False):
            print(f"pyhobbit: {paper_text(paper, chosen)}", file=sys.stderr)


def add_model_options(
    args: argparse.Namespace, model: Path, names: Collection[str] | None = None
) -> dict[str, Any]:
    """Takes options of MODEL.toml that were not given; these by name. Raises ConfigError, HobbitError."""
    from pyhobbit.model.options_file import read_options  # tomlkit takes a while

    given = {name for name, value in vars(args).items() if value is not None}
    ours = vars(args) if names is None else names
    found = {name: value for name, value in read_options(model, given).items() if name in ours}
    vars(args).update(found)
    return found


def add_engine_arguments(
    parser: Parser, names: Collection[str] = tuple(OPTIONS), more: Mapping[str, Key] = MappingProxyType({})
) -> None:
    """Declares how a model is opened, for engine_config() and add_rpc_devices(). names, more: of settings."""
    least, *_, most = EngineConfig.contexts
    context = f"tokens of context (default: {least} to {most}, by memory; 0: the model's, the most)"
    parser.add_argument("--ctx", type=int, metavar="N", help=context)
    add_batch_argument(parser)
    for name, of in (("k", "keys"), ("v", "values")):
        what = f"type of the {of} in the KV cache: {', '.join(EngineConfig.kv_types)} (default: f16)"
        parser.add_argument(f"--cache-type-{name}", metavar="TYPE", help=what)
    add_thread_arguments(parser)
    what = "add other machines, which run 'pyhobbit worker', as the devices RPC0, RPC1 ..."
    parser.add_argument("--rpc", metavar="HOST:PORT,...", help=what)
    add_setting_arguments(parser, names, more)
    add_paper_argument(parser)


def add_paper_argument(parser: argparse.ArgumentParser) -> None:
    """Declares --paper, which cache_config() takes."""
    parser.add_argument("--paper", metavar="NAME", help=PAPER_HELP)


def add_batch_argument(parser: argparse._ActionsContainer) -> None:
    """Declares --batch."""
    least, *_, most = EngineConfig.batches
    what = f"tokens of a prompt per pass (default: {least} to {most}, by memory)"
    parser.add_argument("--batch", type=int, metavar="N", help=what)


def add_thread_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares --threads and --verbose."""
    add = parser.add_argument
    add("--threads", type=int, metavar="N", help="computing threads (default: one per processor core)")
    add("--verbose", action="store_true", help="show llama.cpp's log on standard error")


def engine_config(args: argparse.Namespace, without: Collection[str] = ()) -> EngineConfig:
    """The config of an engine; without: as for cache_config(). Raises ConfigError."""
    cache = cache_config(args, without)
    names = (*_RENAMED, "verbose", "cache_type_k", "cache_type_v")
    given = {name: value for name in names if (value := vars(args).get(name)) is not None}
    own = {_RENAMED.get(name, name): value for name, value in given.items()}
    return EngineConfig(cache, **own)


def add_answer_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares --system, -n and --think."""
    add = parser.add_argument
    add("--system", metavar="TEXT", help="system instructions, for a model with a chat template")
    limit = "most tokens per answer (-1: any; without template: 512)"
    add("-n", dest="max_tokens", type=int, metavar="N", help=limit)
    how = "think first; hide: show only that it does (default: on)"
    add("--think", metavar="on|off|hide", help=how)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares how the next token is drawn; sampling_config() takes the parsed arguments."""
    for field in fields(SamplingConfig):
        default = "random" if field.default is None else field.default
        kind = "number" if field.type is float else "count"
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            help=f"{SAMPLING_HELP[field.name]} (default: {default})",
            type=TYPES[kind],
            metavar=METAVARS[kind],
        )


def sampling_config(args: argparse.Namespace) -> SamplingConfig:
    """The config of sampling. Raises ConfigError."""
    given = {name: getattr(args, name) for name in SAMPLING_HELP}
    return SamplingConfig(**{name: value for name, value in given.items() if value is not None})


def add_rpc_devices(args: argparse.Namespace) -> None:
    """Adds the devices of --rpc; to be called before anything is opened. Raises ConfigError, HobbitError."""
    if args.rpc is not None:
        from pyhobbit.native.ffi import llama  # loads the native libraries
        from pyhobbit.native.rpc_servers import add_rpc_servers

        llama.llama_backend_init()
        add_rpc_servers(args.rpc)
