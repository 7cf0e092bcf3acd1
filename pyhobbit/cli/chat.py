# SPDX-License-Identifier: MIT
"""Answers on the terminal."""

import argparse
import contextlib
import io
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pyhobbit.chat.screen import Progress, note
from pyhobbit.cli.help import Parser
from pyhobbit.cli.list import require_model
from pyhobbit.cli.options import (
    add_answer_arguments,
    add_engine_arguments,
    add_model_options,
    add_rpc_devices,
    add_sampling_arguments,
    engine_config,
    sampling_config,
)
from pyhobbit.cli.status import INTERRUPTED
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.model.file_names import options_path
from pyhobbit.model.model_path import add_model_arguments, model_path
from pyhobbit.model.names import check_model_file
from pyhobbit.native.files import decoded, read_text
from pyhobbit.settings.config import SAMPLING_HELP, CacheConfig, ChatConfig

if TYPE_CHECKING:
    from pyhobbit.chat.conversation import Conversation
    from pyhobbit.engine.stats import ModelInfo


def add_arguments(parser: Parser) -> None:
    add_model_arguments(parser)
    add = parser.add_argument
    add("-p", dest="prompt", metavar="TEXT", help="answer TEXT, also given after MODEL (default: stdin)")
    add("--file", type=Path, metavar="FILE", help="answer the text of FILE, after -p's, and exit")
    add_answer_arguments(parser)
    add("--stop", action="append", default=[], metavar="TEXT", help="end an answer before TEXT; repeatable")
    add("--format", metavar="json|SCHEMA|FILE", help="answer in JSON, without thoughts")
    add("--mmproj", type=Path, metavar="FILE", help="see pictures by this projector, in llama.cpp's terminal")
    add("--image", action="append", default=[], metavar="FILE", help="picture for the prompt; repeatable")
    add("-q", dest="quiet", action="store_true", help="show the answers, no figures and no thinking")
    drafts = "compute up to N tokens that the text suggests in one pass, while that pays (default: 0)"
    add("--drafts", type=int, default=0, metavar="N", help=drafts)
    add("--stats-json", type=Path, metavar="FILE", help="write counters and times to this file")
    add_sampling_arguments(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    config = _config(args)
    require_model(args)
    if sys.stdout is None:
        raise HobbitError("standard output is closed; open or redirect it")
    prompt = _prompt(args)
    if args.trace is not None and args.trace.is_file() and args.trace.stat().st_size > 0:
        raise ConfigError(f"--trace would replace {args.trace}; give another file, or remove that one")
    add_rpc_devices(args)
    model = model_path(args)
    if options := add_model_options(args, model):
        add_rpc_devices(args)
        config = _config(args)
        if not config.quiet:
            _say(f"{options_path(model).name} sets {', '.join(options)}")
    if args.mmproj is not None or args.image:
        _see(args, model, prompt)
    return chat(model, config, prompt)


def _see(args: argparse.Namespace, model: Path, prompt: str | None) -> NoReturn:
    """Becomes llama.cpp's terminal, whose server holds the projector. Raises HobbitError."""
    from pyhobbit.cli.serve import converse  # takes a while

    for name in ("drafts", "format", "quiet", "stats_json", "stop"):
        if getattr(args, name):
            raise ConfigError(f"--{name.replace('_', '-')} is not possible beside --mmproj; leave it out")
    if args.image and (args.mmproj is None or prompt is None):
        raise ConfigError("--image needs --mmproj FILE, the projector of the model, and a prompt by -p")
    for each in args.image:
        Path(each).open("rb").close()
    asked = [part for each in args.image for part in ("--image", f'"{each}"')]
    asked += [] if prompt is None else ["--no-escape", "--single-turn", "--prompt", prompt]
    asked += ["--system-prompt", args.system or "", *(["--verbose"] if args.verbose else [])]
    converse(args, model, asked)


def _config(args: argparse.Namespace) -> ChatConfig:
    engine = replace(engine_config(args), n_drafts=args.drafts)
    if args.drafts and args.trace is not None:
        raise ConfigError("--trace records each token once, not drafts that were wrong; leave --drafts out")
    return ChatConfig(
        engine=engine,
        sampling=sampling_config(args),
        given=[name for name in SAMPLING_HELP if getattr(args, name) is not None],
        max_tokens=args.max_tokens,
        system=args.system,
        grammar="" if args.format is None else _grammar(args.format),
        stop=args.stop,
        stats_json=args.stats_json,
        think=args.think or ("hide" if args.quiet else ChatConfig.think),
        quiet=args.quiet,
    )


def _grammar(form: str) -> str:
    from pyhobbit.native.ffi import llama  # loads the native libraries

    try:
        schema = '{"type": "object"}' if form == "json" else form if "{" in form else read_text(Path(form))
        return str(llama.llama_grammar.json_schema_to_gbnf(schema))
    except Exception as e:  # the converter has no errors of its own
        raise ConfigError(f"--format takes json, a JSON schema, or the file of one: {e}") from None


def _prompt(args: argparse.Namespace) -> str | None:
    """The text to answer, None where it is to be typed."""
    parts = [] if args.prompt is None else [args.prompt]
    if args.file is not None:
        parts.append(read_text(args.file).removesuffix("\n"))
    elif not parts and not (sys.stdin and sys.stdin.isatty()):
        parts.append(_piped_text(args.model))
    return "\n".join(parts) if parts else None


def _piped_text(model: Path | None) -> str:
    if sys.stdin is None:
        raise HobbitError("standard input is closed; give the prompt with -p")
    if model is not None:
        check_model_file(model)  # nobody should type a text in vain
    try:
        text = decoded(sys.stdin.buffer.read()).removesuffix("\n")
    except ValueError as e:
        raise HobbitError(f"standard input is not a text ({e}); give it as UTF-8") from e
    if not text:
        raise HobbitError("standard input is empty; give the prompt there, or with -p")
    return text


def chat(model: Path, config: ChatConfig, prompt: str | None = None) -> int:
    """Answers `prompt`, or what is typed on the terminal. Returns the exit status. Raises HobbitError."""
    from pyhobbit.chat.answer import interrupting  # the engine takes the native libraries and some time
    from pyhobbit.chat.conversation import Conversation
    from pyhobbit.engine.engine import Engine

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model writes what a Latin-1 terminal cannot show
    progress = Progress()
    engine = Engine(model, config.engine, partial(progress.loading, model.name))
    with contextlib.ExitStack() as stack:
        with progress, interrupting(engine):
            stack.enter_context(engine)
        conversation = Conversation(engine, config)
        if not config.quiet:
            _report_opening(model, conversation, config.engine.cache)
        if prompt is None:
            from pyhobbit.chat.session import talk  # prompt_toolkit takes some time too

            talk(conversation, config.quiet)
        status = 0 if prompt is None else _answer_once(prompt, conversation, config.quiet)
        stats = engine.stats()
        if not config.quiet:
            note(stats.summary())
        if config.stats_json is not None:
            stats.write_json(config.stats_json)
    return status


def _answer_once(prompt: str, conversation: "Conversation", quiet: bool) -> int:
    from pyhobbit.chat.answer import interrupting, print_answer

    with interrupting(conversation.engine):
        finish = print_answer(conversation, prompt, quiet=quiet)
    if finish == "context":
        info = conversation.engine.info()
        _say(f"the context is full{'' if info.n_ctx >= info.n_ctx_train else '; use a larger --ctx'}")
    return INTERRUPTED if finish == "interrupted" else 0


def _report_opening(model: Path, conversation: "Conversation", cache: CacheConfig) -> None:
    from pyhobbit.inspect.advice import gpu_text, quality_text
    from pyhobbit.native.devices import has_gpu
    from pyhobbit.quality.stored import low_tier_text

    info, placed = conversation.engine.info(), conversation.engine.placement
    if has_gpu():
        _say(f"GPU: {gpu_text(conversation.engine.devices() if info.cached else None)}")
    if placed is not None and placed.text and not placed.is_told:
        _say(f"placement: {placed.text}")
    if not info.cached:
        if placed is None or placed.n_cpu is None:
            _report_no_cache(info, cache)
    elif quality := quality_text(model, cache):
        _say(f"quality {quality}")
    elif used := low_tier_text(model, info, cache):
        _say(used)
    if not conversation.has_template:
        _say("the model has no chat template: it continues the text that you type")


def _report_no_cache(info: "ModelInfo", cache: CacheConfig) -> None:
    given = [f"--{name}" for name in ("memory", "pools", "trace") if getattr(cache, name) is not None]
    if info.has_experts:
        _say("the model fits in memory, so the expert cache is off; --memory or --pools turns it on")
    else:
        text = f"{info.model} is a dense model without experts to cache: it runs as in stock llama.cpp"
        does = "do" if given[1:] else "does"
        _say(text + (f", and {' and '.join(given)} {does} not apply to it" if given else ""))


def _say(text: str) -> None:
    note(f"pyhobbit: {text}")
