# SPDX-License-Identifier: MIT
"""Shows what a model holds, how it fits this machine and, given a text, how that uses its experts."""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from pyhobbit.cli.options import (
    add_engine_arguments,
    add_model_options,
    add_projector_argument,
    add_rpc_devices,
    engine_config,
)
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.model.model_path import add_model_arguments, model_path
from pyhobbit.model.names import check_model_file
from pyhobbit.model.stored_settings import effective_rule, stored_settings
from pyhobbit.native.files import read_text
from pyhobbit.settings.config import EvaluationConfig, InspectConfig, format_size
from pyhobbit.settings.table import OPTIONS

# What takes the native libraries is imported when it is needed.
if TYPE_CHECKING:
    from pyhobbit.engine.stats import ModelInfo
    from pyhobbit.inspect.findings import Cost, Findings
    from pyhobbit.model.model_file import ModelFile, Tier
    from pyhobbit.quality.evaluate import Chunk, Evaluator, Progress
    from pyhobbit.routing.observe import Observations

_MAX_INPUT_BYTES = 256 << 20  # of routers' inputs
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)  # of selections, replaced or skipped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the verb."""
    add_model_arguments(parser)
    add = parser.add_argument
    add("--text", type=Path, metavar="FILE", help="run the model on this text and analyse its routing")
    add("--plots", type=Path, metavar="DIR", help="write a PNG for each analysis into this folder")
    add(
        "--chunks",
        type=int,
        default=InspectConfig.max_chunks,
        metavar="N",
        help=f"parts of {EvaluationConfig.default_n_ctx} tokens to use at most, evenly spaced "
        "(default: %(default)s)",
    )
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
    if args.text is None and args.plots is not None:
        raise ConfigError("--plots needs a text; give one with --text FILE")
    text = None if args.text is None else read_text(args.text)
    if config.plots is not None:
        from pyhobbit.inspect import plots

        plots.check_folder(config.plots)
    add_rpc_devices(args)
    model = model_path(args)
    if add_model_options(args, model):
        config = _config(args)
    _inspect(model, text, config, args.json)
    return 0


def _config(args: argparse.Namespace) -> InspectConfig:
    return InspectConfig(
        engine=engine_config(args, None, without=("t1", "t2", "trace")),
        t1=args.t1,
        t2=args.t2,
        max_chunks=args.chunks,
        plots=args.plots,
        n_ctx=args.ctx,
        trace=args.trace,
        speed=not args.no_speed,
    )


def _inspect(path: Path, text: str | None, config: InspectConfig, as_json: bool) -> None:
    from pyhobbit.inspect.findings import tables
    from pyhobbit.inspect.machine import Fit
    from pyhobbit.model.model_file import opened_info, read_model_file

    check_model_file(path)
    info = opened_info(path, {"hobbit.enable": True, **config.engine.cache.settings()})
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
    seen = None
    if text is not None:
        thresholds = choose_thresholds(config, info.t1, info.t2)
        found, seen = analyse(model, text, *thresholds, config)
        document["analysis"] = found.as_dict()
        show(f"\n{tables(found)}")
        if config.plots is not None:
            from pyhobbit.inspect import plots

            paths = plots.write(found, seen, config.plots)
            document["plots"] = [str(path) for path in paths]
    if config.speed and fit.plan is not None:
        document["speed"] = fit.measure(seen)
        show(f"\n{_rows_text(fit.speed_rows())}")
        if config.plots is not None and (curve := fit.curve(seen)) is not None:
            from pyhobbit.inspect import plots

            document["plots"] += map(str, plots.write_speed(curve, config.plots))
    if config.plots is not None:
        print(f"{len(document['plots'])} plots in {config.plots}", file=sys.stderr)
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


def choose_thresholds(config: InspectConfig, t1: float, t2: float) -> tuple[float, float]:
    """The thresholds to show; t1, t2: the model's own."""
    if t1 >= 1:
        t1, t2 = InspectConfig.paper_t1, InspectConfig.paper_t2
    if config.t1 is not None:
        return config.t1, max(config.t1, t2) if config.t2 is None else config.t2
    return (t1, t2) if config.t2 is None else (min(t1, config.t2), config.t2)


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


def analyse(
    model: "ModelFile", text: str, t1: float, t2: float, config: InspectConfig
) -> "tuple[Findings, Observations]":
    """Runs the model on the text in high precision, then with low precision and skipping.

    t1, t2: thresholds to show. Raises HobbitError when the text is too short.
    """
    from pyhobbit.inspect import findings
    from pyhobbit.quality import evaluate
    from pyhobbit.routing.observe import Recorder

    with evaluate.Evaluator(model.path, EvaluationConfig(engine=config.engine)) as evaluator:
        chunks, n_in_text = _chunks(evaluator, text, config.max_chunks)
        n_tokens = len(chunks) * evaluator.n_ctx
        recorder = Recorder(len(chunks), evaluator.n_ctx, evaluator.info.n_layers, _MAX_INPUT_BYTES)
        with _progress("observing", n_tokens) as advance, evaluator.observing(recorder):
            reference = evaluator.reference(chunks, advance)
        seen = recorder.observations()
        blocks = [model.blocks[layer] for layer in seen.layers]
        found = findings.find(seen, model.routers(blocks), model.n_experts, t1, t2)
        cost = []
        if found.gates is not None:
            cost = _measure_cost(evaluator, chunks, reference, found.gates.scores)
        measured: dict[str, Any] = {
            "perplexity": evaluate.perplexity(reference, chunks),
            "confident": evaluate.confident_share(reference, findings.CONFIDENT),
        }
    return replace(found, blocks=blocks, n_in_text=n_in_text, cost=cost, **measured), seen


def _chunks(evaluator: "Evaluator", text: str, at_most: int) -> "tuple[list[Chunk], int]":
    """Chunks evenly spaced over the text, and how many it has."""
    chunks = evaluator.chunks(text)
    if not chunks:
        raise HobbitError(f"the text has fewer than {evaluator.n_ctx} tokens; give a longer one")
    n = min(len(chunks), at_most)
    return [chunks[i * len(chunks) // n] for i in range(n)], len(chunks)


def _measure_cost(
    evaluator: "Evaluator", chunks: "list[Chunk]", reference: np.ndarray, scores: np.ndarray
) -> "list[Cost]":
    """Perplexity with the least important experts in low precision, where there is one, and skipped."""
    from pyhobbit.inspect.findings import Cost
    from pyhobbit.routing.analysis import threshold_for_share

    # The best expert of a token is always in high precision.
    shares = [share for share in _SHARES if share <= 1 - 1 / scores.shape[2]]
    n_passes = len(shares) * (2 if evaluator.has_low_tier else 1)
    cost: list[Cost] = []
    with _progress("skipping and replacing", n_passes * sum(map(len, chunks))) as advance:
        for share in shares:
            t = threshold_for_share(scores, share)
            replaced = evaluator.measure(chunks, t, 1, reference, advance) if evaluator.has_low_tier else None
            cost.append(Cost(share, t, replaced, evaluator.measure(chunks, t, t, reference, advance)))
    return cost


@contextlib.contextmanager
def _progress(what: str, n_tokens: int) -> "Iterator[Progress]":
    interval = 0.1 if sys.stderr.isatty() else 5  # seconds; a log file gets few lines
    with tqdm(desc=what, total=n_tokens, unit="token", unit_scale=True, mininterval=interval) as bar:
        yield bar.update
