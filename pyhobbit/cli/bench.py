# SPDX-License-Identifier: MIT
"""Measures how fast a model reads prompts and generates text on this machine.

The table also shows how often experts were in memory, and what was read from the disk.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from pyhobbit._tables import COUNTERS
from pyhobbit.cli.help import Parser
from pyhobbit.cli.options import add_engine_arguments, add_model_options, add_rpc_devices, engine_config
from pyhobbit.engine.stats import rates
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.model.model_path import add_model_arguments, model_path
from pyhobbit.native.threads import barrier_wait_s
from pyhobbit.settings.config import format_size
from pyhobbit.settings.table import OPTIONS, Key

# Modules that load the native libraries are imported when they are needed.
if TYPE_CHECKING:
    from pyhobbit.engine.engine import Engine
    from pyhobbit.engine.stats import Stats

_PROMPTS = (16, 128, 512)
_DECODED, _WARM_UP = 64, 32
_USUAL_CHARACTERS = 4  # a token has about so many
_SHARES = ("stall_share", "high_share", "low_share")

Figures = dict[str, float | None]
"""Figures by JSON key."""


def add_arguments(parser: Parser) -> None:
    add_model_arguments(parser)
    add = parser.add_argument
    lengths = f"about so many tokens in the prompts (default: {' '.join(map(str, _PROMPTS))})"
    add("--prompts", type=int, nargs="+", default=_PROMPTS, metavar="N", help=lengths)
    tokens = "tokens to decode (default: %(default)s)"
    add("-n", dest="tokens", type=int, default=_DECODED, metavar="N", help=tokens)
    depth = "about so many tokens of context before each prompt and before decoding (default: %(default)s)"
    add("--depth", type=int, default=0, metavar="N", help=depth)
    add("--json", action="store_true", help="print one JSON document")
    warm_up = f"tokens to decode before, which fill the cache (default: {_WARM_UP})"
    keys = {"warm_up": Key("count", warm_up, default=_WARM_UP)}
    add_engine_arguments(parser, [name for name in OPTIONS if name != "trace"], keys)


def run(args: argparse.Namespace) -> int:
    for option, least, values in (
        ("--prompts", 1, args.prompts),
        ("-n", 1, [args.tokens]),
        ("warm_up", 0, [args.warm_up]),
        ("--depth", 0, [args.depth]),
    ):
        if min(values) < least:
            raise ConfigError(f"{option} is {min(values)}; it must be at least {least}")
    add_rpc_devices(args)
    engine_config(args)  # refuses settings before a model is downloaded
    model = model_path(args)
    add_model_options(args, model)
    add_rpc_devices(args)  # machines that the model keeps
    from pyhobbit.engine.engine import Engine
    from pyhobbit.inspect.timeline import token_parts

    with Engine(model, engine_config(args)) as engine:
        info = engine.info()
        texts = _texts()
        before = _cut(engine, next(texts), args.depth) if args.depth else ""
        depth = engine.n_prompt_tokens(before) if before else 0
        if before:
            _read_prompt(engine, before)  # the context keeps it
        most = info.n_ctx - depth
        lengths = [n for n in sorted(args.prompts) if args.prompts is not _PROMPTS or n <= most]
        prompts = [_read_prompt(engine, before + _cut(engine, next(texts), n)) for n in lengths]
        steps, shares = _decode(engine, before, args.warm_up, args.tokens)
        document = {
            "model": str(model),
            "description": info.description,
            "n_ctx": info.n_ctx,
            "depth": depth,
            "n_threads": info.n_threads,
            "pool_bytes": info.pool_bytes_high + info.pool_bytes_low,
            "has_experts": info.has_experts,
            "load_s": engine.stats().load_s,
            "prompts": prompts,
            "decoding": decoding(steps, info.cached) | shares,
            "peak_rss_bytes": engine.stats().peak_rss_bytes,
        }
    if args.timeline is not None:
        document["token_parts_s"] = token_parts(args.timeline, args.tokens)
    print(json.dumps(document, indent=2) if args.json else table(document))
    return 0


# --- measuring


def _texts() -> Iterator[str]:
    """English prose without end, each text another one: the documentation of Python's language."""
    from pydoc_data.topics import topics

    names = sorted(topics, key=lambda name: -len(topics[name]))
    while True:
        yield from (topics[name] for name in names)


def _cut(engine: "Engine", text: str, n_tokens: int) -> str:
    """The beginning of a text, repeated where it is short, that has about n tokens."""
    length = _USUAL_CHARACTERS * n_tokens
    size = engine.n_prompt_tokens(_repeated(text, length))
    return _repeated(text, max(1, length * n_tokens // max(1, size)))


def _read_prompt(engine: "Engine", text: str) -> Figures:
    """Tokens that were not in the context, seconds to the first answer, bytes read. Raises HobbitError."""
    before = engine.stats()
    for _ in engine.generate(text, 1):
        pass
    step = engine.stats().since(before)
    if step.time_to_first_token_s is None:
        raise HobbitError("the model ended its answer after a prompt; give another length with --prompts")
    n, seconds = step.prompt_tokens_evaluated, step.time_to_first_token_s
    return {"n_tokens": n, "seconds": seconds, "bytes_read": step.cache.bytes_read}


def _repeated(text: str, length: int) -> str:
    return (text * (length // len(text) + 1))[:length]


def _decode(engine: "Engine", text: str, n_warm_up: int, n_tokens: int) -> "tuple[list[Stats], Figures]":
    """Counters of each of n_tokens after the warm-up, which come after the text, and what the threads did."""
    steps = _steps(engine, text)
    for _ in islice(steps, n_warm_up):
        pass
    before = _times()
    counted = list(islice(steps, n_tokens))
    elapsed, on_cores, waited = (b - a for a, b in zip(before, _times(), strict=True))
    all_threads = elapsed * engine.info().n_threads
    return counted, {"busy_cores": on_cores / elapsed, "barrier_share": waited / all_threads}


def _steps(engine: "Engine", text: str) -> "Iterator[Stats]":
    """Counters of each decoded token after the text; the first token of an answer belongs to its prompt."""
    from pyhobbit.inspect.speed import decode_texts

    before = engine.stats()
    for _ in decode_texts(engine, text):
        after = engine.stats()
        step, before = after.since(before), after
        if step.decoded_tokens == 1:
            yield step


def _times() -> tuple[float, float, float]:
    """Seconds so far: of the clock, of all threads on cores, and of waits for each other."""
    return time.perf_counter(), time.process_time(), barrier_wait_s()


def decoding(steps: "Sequence[Stats]", cached: bool) -> Figures:
    """The figures of single tokens' counters. cached: without a cache of experts its figures are None."""
    n, seconds = len(steps), sum(step.decode_s for step in steps)
    found: Figures = {"n_tokens": n, "tokens_per_second": n / seconds}
    if not cached:
        return found | dict.fromkeys(("hit_rate", "bytes_read_per_token", *_SHARES))
    total = {each.name: sum(getattr(step.cache, each.name) for step in steps) for each in COUNTERS}
    shares = rates({}, total, seconds, 0)
    return found | {
        "hit_rate": 1.0 if shares.hit_rate is None else shares.hit_rate,
        "bytes_read_per_token": total["bytes_read"] / n,
        **{name: getattr(shares, name) for name in _SHARES},
    }


# --- showing


def table(document: dict[str, Any]) -> str:
    """The document for people."""
    experts = f"{format_size(document['pool_bytes'])} for experts"
    rows = {
        "model": f"{document['model']}, {document['description']}",
        "set up": f"{document['n_threads']} threads, {document['n_ctx']} tokens of context, "
        f"{experts if document['has_experts'] else 'a dense model'}, loaded in {document['load_s']:.1f} s",
    }
    if document["depth"]:
        rows["depth"] = f"{document['depth']} tokens of context before each prompt and before decoding"
    for prompt in document["prompts"]:
        rows[f"prompt {prompt['n_tokens']:g}"] = (
            f"{prompt['n_tokens'] / prompt['seconds']:.1f} token/s: first token after "
            f"{prompt['seconds']:.2f} s, {format_size(round(prompt['bytes_read']))} read"
        )
    found = document["decoding"]
    rows["decoding"] = f"{found['tokens_per_second']:.2f} token/s over {found['n_tokens']:g} tokens"
    waits = f"threads wait {found['barrier_share']:.0%} of the time for each other"
    rows["processors"] = f"{found['busy_cores']:.2f} cores busy; computing {waits}"
    if found["hit_rate"] is not None:
        read = format_size(found["bytes_read_per_token"])
        rows["hits"] = f"{found['hit_rate']:.1%} of the experts, {read} read per token"
        rows["waiting"] = f"{found['stall_share']:.0%} of the time for the disk"
    if "token_parts_s" in document:
        parts = document["token_parts_s"]
        each = ", ".join(f"{name} {1000 * seconds:.2f}" for name, seconds in parts.items())
        rows["a token"] = f"{1000 * sum(parts.values()):.2f} ms: {each}"
    rows["peak memory"] = format_size(document["peak_rss_bytes"])
    return "\n".join(f"{name:<13} {text}" for name, text in rows.items())
