# SPDX-License-Identifier: MIT
"""Options that several verbs share. Those of the expert cache come from the engine's table of settings."""

import argparse
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pyhobbit.errors import ConfigError
from pyhobbit.settings.config import SAMPLING_HELP, CacheConfig, EngineConfig, SamplingConfig, parse_size
from pyhobbit.settings.table import OPTIONS, default_text

_KINDS: Mapping[str, Mapping[str, Any]] = {
    "number": {"type": float, "metavar": "F"},
    "count": {"type": int, "metavar": "N"},
    "size": {"metavar": "SIZE"},
    "flag": {"action": argparse.BooleanOptionalAction},
    "choice": {"metavar": "NAME"},
    "text": {"metavar": "NAME"},
    "path": {"type": Path, "metavar": "FILE"},
}
_LIST = {"metavar": "F,..."}
_CACHE = "expert cache (a calibrated model has defaults of its own)"
_NO_DEFAULTS: Mapping[str, str] = {}


def add_setting_arguments(
    parser: argparse.ArgumentParser,
    names: Collection[str] = tuple(OPTIONS),
    defaults: Mapping[str, str] = _NO_DEFAULTS,
    is_group: bool = True,
) -> None:
    """Declares options of the expert cache; cache_config() takes the parsed arguments.

    defaults: texts for defaults that are the verb's own, by name.  is_group: under a title.
    """
    group = parser.add_argument_group(_CACHE) if is_group else parser
    for name in names:
        specs = OPTIONS[name]
        kind = _LIST if len(specs) > 1 else _KINDS[specs[0].kind]
        group.add_argument(f"--{name.replace('_', '-')}", help=setting_help(name, defaults.get(name)), **kind)


def setting_help(name: str, default: str | None = None) -> str:
    """The help of one setting's option, as argparse takes it. default: in place of the engine's."""
    text = OPTIONS[name][0].help.removesuffix(".")
    note = default_text(name) if default is None else default
    start = text[0].lower() + text[1:] if text[1:2].islower() else text
    return (f"{start} (default: {note})" if note else start).replace("%", "%%")


def cache_config(args: argparse.Namespace, without: Collection[str] = ()) -> CacheConfig:
    """The settings of the cache; without: names of options that are not the cache's. Raises ConfigError."""
    given = {name: getattr(args, name, None) for name in OPTIONS if name not in without}
    config = CacheConfig(
        **{name: setting_value(name, each) for name, each in given.items() if each is not None}
    )
    if settings := config.settings():
        from pyhobbit.settings.resolve import check_settings  # takes the native libraries

        check_settings(settings)
    return config


def setting_value(name: str, given: Any) -> Any:
    """An option of the cache as it is set; given: as on the command line, or a value. Raises ConfigError."""
    specs = OPTIONS[name]
    if len(specs) > 1 and isinstance(given, str):
        return numbers(given, ",", f"--{name}")
    return parse_size(given) if specs[0].kind == "size" and isinstance(given, str) else given


def add_model_options(
    args: argparse.Namespace, model: Path, names: Collection[str] | None = None
) -> dict[str, Any]:
    """Sets options that were not given to what the file beside the model says; returns these by name.

    names: of the options that mean the same to this verb; None for all. Raises ConfigError, HobbitError.
    """
    from pyhobbit.model.options_file import read_options  # tomlkit takes a while

    given = {name for name, value in vars(args).items() if value is not None}
    ours = vars(args) if names is None else names
    found = {name: value for name, value in read_options(model, given).items() if name in ours}
    vars(args).update(found)
    return found


def numbers(text: str, separator: str, option: str, kind: type = float) -> tuple[Any, ...]:
    """The numbers of a list like 1,2. Raises ConfigError."""
    try:
        return tuple(kind(part) for part in text.split(separator))
    except ValueError:
        raise ConfigError(f"{option} takes numbers with '{separator}' between them, not '{text}'") from None


def add_engine_arguments(
    parser: argparse.ArgumentParser,
    names: Collection[str] = tuple(OPTIONS),
    defaults: Mapping[str, str] = _NO_DEFAULTS,
) -> None:
    """Declares how a model is opened: context, threads, log, settings of the expert cache, further devices.

    engine_config() and add_rpc_devices() take the parsed arguments.  names, defaults: as for
    add_setting_arguments().
    """
    least, *_, most = EngineConfig.contexts
    context = f"tokens of context (default: {least} to {most}, by memory; at most the model's)"
    parser.add_argument("--ctx", type=int, metavar="N", help=context)
    add_batch_argument(parser)
    add_thread_arguments(parser)
    what = "add GPUs of other machines running ggml-rpc-server; they are named RPC0, RPC1 ..."
    parser.add_argument("--rpc", metavar="HOST:PORT,...", help=what)
    add_setting_arguments(parser, names, defaults)


def add_projector_argument(parser: argparse.ArgumentParser) -> None:
    """Declares --mmproj, which engine_config() takes."""
    what = "the model's projector, for images; its memory counts in --memory"
    parser.add_argument("--mmproj", type=Path, metavar="FILE", help=what)


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


def engine_config(args: argparse.Namespace, n_ctx: int | None, without: Collection[str] = ()) -> EngineConfig:
    """The config of an engine; without: as for cache_config(). Raises ConfigError."""
    cache = cache_config(args, without)
    n_batch = getattr(args, "batch", None)
    projector = getattr(args, "mmproj", None)
    return EngineConfig(
        cache, n_ctx, n_batch, n_threads=args.threads, projector=projector, verbose=args.verbose
    )


def add_answer_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares --system, -n and --think."""
    add = parser.add_argument
    add("--system", metavar="TEXT", help="system instructions, for a model with a chat template")
    limit = "maximum tokens per answer, -1: no limit (default without template: 512)"
    add("-n", dest="max_tokens", type=int, metavar="N", help=limit)
    how = "whether the model thinks first; hide: show only that it does (default: on)"
    add("--think", metavar="on|off|hide", help=how)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares how the next token is drawn; sampling_config() takes the parsed arguments."""
    for field in fields(SamplingConfig):
        default = "random" if field.default is None else field.default
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            help=f"{SAMPLING_HELP[field.name]} (default: {default})",
            **_KINDS["number" if field.type is float else "count"],
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
