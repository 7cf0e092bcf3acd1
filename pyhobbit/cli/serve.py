# SPDX-License-Identifier: MIT
"""Runs llama.cpp's server, with its experts in the cache.

Every option of llama-server is passed on; llama-server's own help: pyhobbit llama server --help
"""

import argparse
import csv
import glob
import hashlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pyhobbit.cli import server_flags, several_models
from pyhobbit.cli.help import Parser
from pyhobbit.cli.options import (
    add_batch_argument,
    add_model_options,
    add_paper_argument,
    add_setting_arguments,
    cache_config,
)
from pyhobbit.cli.server_flags import SERVER, TERMINAL, any_given, known, value
from pyhobbit.errors import ConfigError
from pyhobbit.model.file_names import EXACT, model_stem, options_path
from pyhobbit.model.model_path import add_model_arguments, check_model_arguments, model_path
from pyhobbit.model.names import check_model_file
from pyhobbit.native.paths import LIB_DIR
from pyhobbit.native.programs import become
from pyhobbit.native.rpc_servers import add_rpc_servers
from pyhobbit.quality.idle import calibrate_beside
from pyhobbit.settings.config import SAMPLING_HELP, CacheConfig, EngineConfig, format_size, parse_size

if TYPE_CHECKING:
    from pyhobbit.engine.plan import MemoryPlan
    from pyhobbit.settings.config import Setting

_CONTEXT = EngineConfig.contexts[1]  # the least of a server
# Defaults of its own leave experts no room (the largest context, 8 GiB of old prompts) ...
_CHANGED = {"--ctx-size": str(_CONTEXT), "--cache-ram": "0"}
# ... or let any page ask.
_LISTENING = {"--metrics": None, "--cors-origins": "localhost"}
_CONTINUES = "{% for message in messages %}{{ message.content }}{% endfor %}"  # it would take ChatML
_CHECKPOINTS, _SLOTS = "32", 4  # its own defaults; checkpoints are those of each slot
# Shown in our help; all others are passed on as well.
_PASSED_ON = {
    "--host": ("HOST", f"address to listen on; 0.0.0.0: all (default: {server_flags.HOST})"),
    "--port": ("PORT", f"port to listen on (default: {server_flags.PORT})"),
    "--api-key": ("KEY", "key that clients must send (default: none)"),
    "--parallel": ("N", "requests computed at the same time; they share cache and context (default: 4)"),
    "--ctx": ("N", f"tokens of context, of all slots (default: {_CONTEXT} to {EngineConfig.contexts[-1]})"),
    "--threads": ("N", "for computing (default: one per core)"),
}
_MODEL_FLAGS = ("-m", "--model")
# llama-server needs no model with one of these ...
_ANSWERS = ("--version", "--usage", "--cache-list", "--completion-bash", "--list-devices")
# ... or gets it by itself, as with a flag for a model of its choice: --...-default
_MODEL_SOURCES = ("--model", "--model-url", "--docker-repo", *several_models.SOURCES)
_BATCH_FLAGS = ("--batch-size", "--ubatch-size")
# Make it hold another amount of memory than the plan knows of.
_MEMORY_FLAGS = (
    *(*_BATCH_FLAGS, "--cpu-moe", "--device", "--gpu-layers", "--kv-offload", "--kv-unified-per-slot"),
    *("--lazy-mode", "--load-mode", "--main-gpu", "--n-cpu-moe", "--override-kv", "--override-tensor"),
    *("--split-mode", "--swa-full", "--tensor-split"),
)
# Load further models, of which nobody knows before what memory they take.
_FURTHER_MODELS = ("--mmproj-url", "--model-draft", "--hf-repo-draft")
# The options in MODEL.toml that llama-server knows, by name.
_SERVER_NAMES = {
    "ctx": "--ctx-size",
    "threads": "--threads",
    "cache_type_k": "--cache-type-k",
    "cache_type_v": "--cache-type-v",
    "max_tokens": "--n-predict",
    "rpc": "--rpc",
    **{name: f"--{name.replace('_', '-')}" for name in SAMPLING_HELP},
}
_BATCH = 2048  # llama-server's own --batch-size, which several passes compute
_LEAST_CONTEXT = 256
_DRAFTS = 3  # its own default
_NGRAM_TABLE = 16 << 20  # bytes that drafts by n-grams take beside all requests
_COPIES, _PART_COPIED = 64 << 20, 24  # copies of a request in a terminal: at most so many bytes, or this part


def add_arguments(parser: Parser) -> None:
    """Declares the options of the verb; parse() takes llama-server's as well."""
    add_model_arguments(parser, "GGUF file (default: all of pyhobbit list, by name)")
    add_batch_argument(parser)
    add_setting_arguments(parser)  # llama-server's own --device is -dev
    add_paper_argument(parser)
    what = "while idle, calibrate on this text; uses a quarter of --memory"
    parser.add_argument("--calibrate-idle", type=Path, metavar="FILE", help=what)
    what = "keep what the slots hold in files of so much beside the model while the server is stopped"
    parser.add_argument("--keep-slots", metavar="SIZE", help=what)
    what = "time that answers have to end after SIGTERM, while /health is 503 (default: 0)"
    parser.add_argument("--drain", type=int, metavar="SECONDS", help=what)
    group = parser.add_argument_group("llama-server, among others")
    for flag, (metavar, what) in _PASSED_ON.items():
        group.add_argument(flag, metavar=metavar, help=what)


def parse(parser: Parser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parses our options; `passed_on` holds llama-server's. Raises ConfigError, HobbitError, SystemExit."""
    flags = server_flags.known()
    own = {name: n for name, n in parser.options().items() if name not in _PASSED_ON}
    ours: list[str] = []
    theirs: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, *given = server_flags.normal(argument)
        if name in _MODEL_FLAGS:
            ours += given or server_flags.take(rest, 1)
        elif name == "--hf-repo":
            ours += ["-hf", *(given or server_flags.take(rest, 1))]
        elif argument.partition("=")[0] in own:
            n_values = 0 if "=" in argument else own[argument.partition("=")[0]]
            ours += [argument, *server_flags.take(rest, n_values)]
        elif name in flags:
            theirs += [name, *(given or server_flags.take(rest, flags[name].n_values))]
        elif argument.startswith("-"):
            raise ConfigError(server_flags.unknown(argument, [*own, *_PASSED_ON]))
        else:
            ours.append(argument)
    args, unknown = parser.parse_known_args(ours)
    if unknown:
        raise ConfigError(f"'{unknown[0]}' is one argument too many: give one model, or --models-dir FOLDER")
    args.passed_on = theirs
    return args


def run(args: argparse.Namespace) -> int:
    """Becomes llama-server, which gets all signals and whose exit status is ours. Raises HobbitError."""
    cache = cache_config(args)  # refuses settings before a model is downloaded
    if any_given(_ANSWERS, args.passed_on):
        become([str(SERVER), *args.passed_on])
    without_model = args.model is None and args.hf_repo is None
    if without_model and not _names_model(args.passed_on):
        args.passed_on += several_models.all_downloads()
    elif not without_model and not set(several_models.SOURCES).isdisjoint(args.passed_on):
        raise ConfigError("one model, or a folder by --models-dir: give one of them")
    if not without_model or not _names_model(args.passed_on):
        check_model_arguments(args)
    _check_batch(args.batch, args.passed_on)  # an error comes before a download
    _check_drafts(args.passed_on)
    if args.drain is not None:
        if args.drain < 0:
            raise ConfigError(f"--drain is {args.drain}; it must be a number of seconds from 0")
        os.environ["HOBBIT_DRAIN"] = str(args.drain)
    server_flags.check_address(args.passed_on)
    arguments = _arguments_without_model(args, cache) if without_model else _arguments_of_model(args)
    become([str(SERVER), *arguments])


def converse(args: argparse.Namespace, model: Path, asked: Sequence[str]) -> NoReturn:
    """Becomes llama.cpp's terminal, with a server inside. args: of chat.  asked: its own."""
    flags = {**_SERVER_NAMES, "mmproj": "--mmproj", "think": "--reasoning"}
    given = [(flag, str(found)) for name, flag in flags.items() if (found := getattr(args, name)) is not None]
    args.model, args.hf_repo, args.keep_slots, args.calibrate_idle = model, None, None, None
    args.passed_on = ["--parallel", "1", *(each for pair in given for each in pair)]
    become([str(TERMINAL), *_arguments_of_model(args, listens=False), *asked])


def _arguments_without_model(args: argparse.Namespace, cache: CacheConfig) -> list[str]:
    """Arguments of a llama-server that finds its models itself. Raises ConfigError."""
    from pyhobbit.engine.plan import check_limit  # loads the libraries

    for name, given in (("--calibrate-idle", args.calibrate_idle), ("--keep-slots", args.keep_slots)):
        if given is not None:
            raise ConfigError(f"{name} is for one model; serve it alone")
    check_limit(cache.memory)
    each, passed_on = several_models.shared(cache, args.passed_on)
    rows = several_models.rows(cache.memory, each.memory, passed_on)
    passed_on = several_models.listed(passed_on)  # an error stands alone
    _print_rows({**rows, "address": _address(passed_on) if rows else ""})
    own = _of_model(each, passed_on)
    return [*_no_warmup(passed_on), *server_arguments(own.settings(), args.batch, passed_on)]


def _arguments_of_model(args: argparse.Namespace, listens: bool = True) -> list[str]:
    """Arguments for one model, which is downloaded where needed. Raises HobbitError."""
    # these take a while
    from pyhobbit.engine.placement import Placed, choose
    from pyhobbit.model.gguf_file import read_gguf

    model = model_path(args)
    check_model_file(model)
    own = _add_model_options(args, model)
    if (machines := value("--rpc", args.passed_on)) is not None:
        add_rpc_servers(machines)
    context = str(value("--ctx-size", args.passed_on))
    embeds = any_given(("--embeddings",), args.passed_on) and not any_given(_BATCH_FLAGS, args.passed_on)
    if embeds and args.batch is None and context.isdecimal():  # a pass takes the whole of a text
        args.batch = min(int(context), EngineConfig.max_batch) or None
    cache = cache_config(args)
    if args.keep_slots is not None:
        _keep_slots(model, cache, args)
    images, of_model = _beside_images(model, _of_model(cache, args.passed_on), args)
    if not listens and of_model.memory is not None:
        of_model = replace(of_model, memory=of_model.memory - min(_COPIES, of_model.memory // _PART_COPIED))
    config = _server_config(of_model, args.batch, args.passed_on)
    placed = Placed(of_model, None) if config is None else choose(model, config)
    idle, of_model = calibrate_beside(model, args.calibrate_idle, placed.cache)
    plan = _check_memory(model, of_model, args)
    if plan is not None and plan.chose_context:
        args.passed_on += ["--ctx-size", str(plan.info.n_ctx)]
    options = f"{options_path(model).name} sets {', '.join(own)}" if own else ""
    if unused := [name for name in own if name in ("system", "think")]:
        options += f"; {' and '.join(unused)} are for chat, and a client's requests have their own"
    args.passed_on += placed.server_arguments
    n_slots, shares = _slots(args.passed_on)
    slots = f"{n_slots}{', which share the context' if shares else ''}"
    others = {"placement": placed.text, **images, **idle, "options": options}
    has_own = any_given(("--chat-template", "--chat-template-file"), args.passed_on)
    if not has_own and "tokenizer.chat_template" not in read_gguf(model).metadata:
        args.passed_on += ["--chat-template", _CONTINUES]
        others["template"] = "none in the file: the model continues the text of the messages"
    if listens:
        others |= {"address": _address(args.passed_on), "slots": slots}
    _report(model, plan, cache, others)
    cached = plan is not None and plan.info.cached
    arguments = ["-m", str(model)]
    if listens and value("--alias", args.passed_on) is None:
        arguments += ["--alias", f"{model_stem(model)},{model_stem(model)}{EXACT}"]
    if plan is None or cached:
        arguments += _no_warmup(args.passed_on)
    n_batch = plan.n_batch if plan is not None and cached else args.batch
    is_bound = cached and of_model.memory is not None  # its pools are those of the first lines
    process = {"hobbit.process": plan.process} if plan and is_bound and not plan.info.on_device else {}
    settings = {**of_model.settings(), **process}
    if plan is not None and plan.head:
        settings["hobbit.further"] = plan.head
        args.passed_on += ["--batch-size", str(n_batch)]  # the head takes memory for each token of it
    return [*arguments, *server_arguments(settings, n_batch, args.passed_on, listens)]


def _no_warmup(passed_on: Sequence[str]) -> list[str]:
    """llama-server would begin with an empty run of all experts, which reads more than the cache holds."""
    return ["--no-warmup"] if value("--warmup", passed_on) is None else []


def _add_model_options(args: argparse.Namespace, model: Path) -> list[str]:
    """Takes what was not given from the file beside the model; returns the names of these options."""
    vars(args).update({name: value(flag, args.passed_on) for name, flag in _SERVER_NAMES.items()})
    found = add_model_options(args, model, {*vars(args), "system", "think"})
    for name in found:
        if name in _SERVER_NAMES:
            args.passed_on += [_SERVER_NAMES[name], str(found[name])]
    return list(found)


def _report(model: Path, plan: "MemoryPlan | None", cache: CacheConfig, others: Mapping[str, str]) -> None:
    """Prints what is served, before llama-server's log."""
    # loads the libraries
    from pyhobbit.inspect.advice import quality_text, serving_rows
    from pyhobbit.quality.stored import low_tier_text

    rows = {"model": model.name} if plan is None else serving_rows(plan)
    _print_rows({**rows, "quality": quality_text(model, cache) or "", **others})
    if plan is not None and (used := low_tier_text(model, plan.info, cache)):
        print(f"pyhobbit: {used}", file=sys.stderr)


def _print_rows(rows: Mapping[str, str]) -> None:
    for name, text in rows.items():
        if text:
            print(f"pyhobbit: {name:10}{text}", file=sys.stderr)


def _address(passed_on: Sequence[str]) -> str:
    host, port = server_flags.listens_at(passed_on)
    if host.endswith(".sock"):
        return f"the socket {host}"
    if port == "0":
        return f"{host}, a free port that the log names"
    scheme = "http" if value("--ssl-cert-file", passed_on) is None else "https"
    prefix = value("--api-prefix", passed_on, "")
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{prefix}"
    has_page = server_flags.has_web_page() and not {"--no-ui", "--no-webui"}.intersection(passed_on)
    page = " with the web page" if has_page else ""
    return f"{url}{page}, the cache at {url}/panel, OpenAI's API at {url}/v1"


def _of_model(cache: CacheConfig, passed_on: Sequence[str]) -> CacheConfig:
    """The model's part of the process that --memory limits, without old prompts. Raises ConfigError."""
    if cache.memory is None:
        return cache
    for name in _FURTHER_MODELS:
        if value(name, passed_on) is not None:
            raise ConfigError(f"--memory limits all, and what {name} takes is not known before; give --pools")
    prompts = str(value("--cache-ram", passed_on, "0"))
    if not prompts.isdecimal():
        raise ConfigError(f"--cache-ram {prompts} sets no limit, beside --memory; give a number of MiB")
    left = cache.memory - (int(prompts) << 20)
    if left <= 0:
        raise ConfigError(f"--cache-ram {prompts} leaves nothing of --memory for the model; lower it")
    return replace(cache, memory=left)


def _check_batch(n_batch: int | None, passed_on: Sequence[str]) -> None:
    EngineConfig(n_batch=n_batch)
    if n_batch is not None and any_given(_BATCH_FLAGS, passed_on):
        raise ConfigError(f"--batch sets {' and '.join(_BATCH_FLAGS)}; give it, or these")


def _check_drafts(passed_on: Sequence[str]) -> None:
    for kind in str(value("--spec-type", passed_on, "")).split(","):
        of_model = kind.startswith("draft-") and kind != "draft-mtp"
        if of_model and not any_given(("--model-draft", "--hf-repo-draft"), passed_on):
            raise ConfigError(f"--spec-type {kind} drafts by another model: give --spec-draft-model FILE")


def _names_model(passed_on: Sequence[str]) -> bool:
    sources = {*_MODEL_SOURCES, *(name for name in known() if name.endswith("-default"))} - {"--spec-default"}
    return any_given(sources, passed_on)


def server_arguments(
    settings: "Mapping[str, Setting]", n_batch: int | None, passed_on: Sequence[str], listens: bool = True
) -> list[str]:
    """All arguments but the model: settings, defaults, and what was passed on. n_batch: None is theirs."""
    if value("--ctx-checkpoints", passed_on) is not None:
        settings = {**settings, "hobbit.least_snapshots": _checkpoints(passed_on)[1]}
    passed_on, given = server_flags.without("--override-kv", passed_on)
    overrides = [*_overrides(settings, given), *given]
    arguments = ["--override-kv", ",".join(overrides)] if overrides else []
    for name, default in (_CHANGED | _LISTENING if listens else _CHANGED).items():
        if value(name, passed_on) is None:
            arguments += [name] if default is None else [name, default]
    if n_batch is not None:
        arguments += ["--batch-size", str(max(n_batch, _BATCH)), "--ubatch-size", str(n_batch)]
    return [*arguments, *passed_on]


def _overrides(settings: "Mapping[str, Setting]", given: Sequence[str]) -> list[str]:
    """KEY=TYPE:VALUE,..., quoted as llama.cpp reads it: like CSV; none for what is `given` in that way."""
    keys = {each.partition("=")[0] for row in csv.reader(given) for each in row}
    row = io.StringIO()
    values = [
        f"{key}={type(value).__name__}:{str(value).lower() if isinstance(value, bool) else value}"
        for key, value in settings.items()
        if key not in keys
    ]
    csv.writer(row, lineterminator="").writerow(values)
    return [row.getvalue()] if values else []


# --- before the model is loaded


def _keep_slots(model: Path, cache: CacheConfig, args: argparse.Namespace) -> None:
    """Tells llama-server where to keep slots, by all that their states come from. Raises ConfigError."""
    n_bytes = parse_size(args.keep_slots)
    if any_given(("--rpc", "--spec-type"), args.passed_on):
        raise ConfigError("--keep-slots keeps no state beside --rpc or --spec-type; leave one of them out")
    if not os.access(model.parent, os.W_OK):
        raise ConfigError(f"--keep-slots writes beside the model, and {model.parent} is read-only")
    stem, folder = glob.escape(model_stem(model)), model.parent
    beside = [*folder.glob(f"{stem}*.gguf"), *folder.glob(f"{stem}.toml")]
    files = [each for each in (*beside, SERVER, *LIB_DIR.iterdir()) if each.exists()]  # builds round apart
    stats = sorted((each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files)
    rest = server_flags.without("--port", server_flags.without("--host", args.passed_on)[0])[0]
    given = sorted(each for each in os.environ.items() if each[0].startswith("LLAMA_ARG_"))
    source = repr((stats, os.uname().nodename, sorted(cache.settings().items()), args.batch, rest, given))
    kept = model.with_name(f"{model_stem(model)}.slots-{hashlib.sha256(source.encode()).hexdigest()[:16]}")
    for each in folder.glob(f"{stem}.slots-{'[0-9a-f]' * 16}-[0-9]*"):
        if not each.name.startswith(kept.name):
            each.unlink()
    os.environ["HOBBIT_KEEP_SLOTS"] = f"{n_bytes}:{kept.absolute()}"


def _beside_images(
    model: Path, cache: CacheConfig, args: argparse.Namespace
) -> tuple[dict[str, str], CacheConfig]:
    """Rows about --mmproj, and settings of the cache that leave its memory free. Raises HobbitError."""
    given = value("--mmproj", args.passed_on)
    if given is None:
        return {}, cache
    from pyhobbit.engine.plan import beside_projector  # loads the libraries

    cache, taken = beside_projector(model, Path(given), cache, lambda each: _check_memory(model, each, args))
    return {"images": f"{Path(given).name}, {format_size(taken)} more"}, cache


def _slots(passed_on: Sequence[str]) -> tuple[int, bool]:
    """The number of slots, and true if they share the context's cells."""
    given = str(value("--parallel", passed_on, "-1"))
    names = [each for each in passed_on if each in known()["--kv-unified"].names]
    if not given.isdecimal() or int(given) == 0:
        return _SLOTS, True
    return int(given), bool(names) and "no-" not in names[-1]


def _checkpoints(passed_on: Sequence[str]) -> tuple[int, int]:
    """The most and the least checkpoints of all slots: what fits, unless their number is given."""
    n_slots, _ = _slots(passed_on)
    given = value("--ctx-checkpoints", passed_on)
    n = n_slots * int(given or _CHECKPOINTS) if (given or _CHECKPOINTS).isdecimal() else 0
    n_drafts = 0 if value("--spec-type", passed_on) is None else n_slots
    return n + n_drafts, n_drafts + (0 if given is None else n)


def _head(passed_on: Sequence[str]) -> dict[str, Any]:
    """Fields of the config for the draft head in the model's own file, where one is asked for."""
    is_asked = "draft-mtp" in str(value("--spec-type", passed_on)).split(",")
    if not is_asked or value("--model-draft", passed_on) is not None:
        return {}
    given = str(value("--spec-draft-n-max", passed_on, ""))
    n = int(given) if given.isdecimal() else _DRAFTS
    return {"draft_head": True, "n_drafts": min(max(n, 1), EngineConfig.max_drafts)}


def _server_config(cache: CacheConfig, n_batch: int | None, passed_on: Sequence[str]) -> EngineConfig | None:
    """The config for the plan; None where other flags decide about the model's memory."""
    context = value("--ctx-size", passed_on)
    unknown = any_given(_MEMORY_FLAGS, passed_on)
    if unknown or not (context is None or context.isdecimal()):
        return None
    n_ctx = None if context is None else int(context) and max(int(context), _LEAST_CONTEXT)
    n_slots, shares = _slots(passed_on)
    types: dict[str, Any] = {
        name: value(_SERVER_NAMES[name], passed_on) or "f16" for name in ("cache_type_k", "cache_type_v")
    }
    head = _head(passed_on)
    return EngineConfig(cache, n_ctx, n_batch, n_slots, shares_context=shares, serves=True, **types, **head)


def _check_memory(model: Path, cache: CacheConfig, args: argparse.Namespace) -> "MemoryPlan | None":
    """How it will be opened; None where flags decide about memory. Raises HobbitError if it does not fit."""
    from pyhobbit.engine.plan import ShortOfMemory, check_limit, lay_out  # loads the libraries
    from pyhobbit.native.ffi import lib

    check_limit(cache.memory)
    config = _server_config(cache, args.batch, args.passed_on)
    if config is None:
        return None
    most, least = _checkpoints(args.passed_on)
    sees = value("--mmproj", args.passed_on) is not None
    tables = "ngram-mod" in str(value("--spec-type", args.passed_on)).split(",")
    memory = cache.memory or 0
    while True:
        requests = lib.hobbit_request_bytes(config.n_ctx or 0, memory, sees) + tables * _NGRAM_TABLE
        beside = {"snapshots": most, "least_snapshots": least, "requests": requests}
        overrides = {f"hobbit.{name}": n for name, n in beside.items()}
        try:
            return lay_out(model, replace(config, overrides=overrides))
        except ShortOfMemory as e:
            if e.least <= memory:
                raise
            memory = e.least  # with so much, requests may take more
