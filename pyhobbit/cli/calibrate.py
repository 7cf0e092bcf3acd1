# SPDX-License-Identifier: MIT
"""Fits thresholds and cache to a model, on a text; chat and llama-server then apply the result."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pyhobbit.cli.help import Parser
from pyhobbit.cli.options import (
    add_model_options,
    add_setting_arguments,
    add_thread_arguments,
    engine_config,
)
from pyhobbit.errors import HobbitError
from pyhobbit.model.file_names import calibration_path, options_path
from pyhobbit.settings.config import CalibrationConfig, EngineConfig
from pyhobbit.settings.table import Key

if TYPE_CHECKING:
    from pyhobbit.quality.calibration import CalibrationReport

# The others are what calibration finds, or do not change what is measured.
_SETTINGS = ("memory", "pools", "io_threads", "sidecar")
_KEYS = {
    "rule": Key(
        "choice",
        f"precision rule to fit (default: {CalibrationConfig.rule})",
        "|".join(CalibrationConfig.all_rules),
        CalibrationConfig.rule,
    ),
    "cost_chunks": Key(
        "count",
        f"parts of the text for the costs of low precision (default: {CalibrationConfig.cost_chunks})",
        default=CalibrationConfig.cost_chunks,
    ),
}
_SAMPLE_SECONDS = 2.0
# Options of the file beside the model; its context is that of a conversation.
_OWN = ("memory", "pools", "io_threads", "threads")
_PRECISION = {"quality", "rule", "price", "t1", "t2"}


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="GGUF file; of a split model its first file")
    add("--text", type=Path, required=True, metavar="FILE", help="a text of the kind that you ask about")
    what = "limit on the mean KL divergence from the predictions in high precision "
    what += f"(default: {CalibrationConfig.default_max_kl})"
    add("--max-kl", type=float, metavar="NATS", help=what)
    what = "most parts of the text, half of which check the limit (default: %(default)s)"
    add("--chunks", type=int, default=CalibrationConfig.max_chunks, metavar="N", help=what)
    what = f"tokens per part (default: {CalibrationConfig.default_n_ctx})"
    add("--ctx", type=int, metavar="N", help=what)
    add("--json", action="store_true", help="print all results as JSON")
    add_thread_arguments(parser)
    add_setting_arguments(parser, _SETTINGS, _KEYS)


def run(args: argparse.Namespace) -> int:
    if options := add_model_options(args, args.model, _OWN):
        print(f"pyhobbit: {options_path(args.model).name} sets {', '.join(options)}", file=sys.stderr)
    config = CalibrationConfig(
        engine=engine_config(args, without=("rule",)),
        max_kl=args.max_kl,
        max_chunks=args.chunks,
        rule=args.rule,
        cost_chunks=args.cost_chunks,
    )
    # these take some time to import
    from pyhobbit.model.options_file import read_options, write_options
    from pyhobbit.quality.calibration import calibrate
    from pyhobbit.quality.stored import Measurements

    try:
        report = calibrate(args.model, args.text, config)
    except KeyboardInterrupt:
        kept = Measurements.path_of(args.model)
        keeps = f"{kept} keeps what was measured, start again to go on"
        state = keeps if kept.exists() else "nothing was measured yet"
        print(f"\npyhobbit: stopped; {state}", file=sys.stderr)
        raise
    if args.json:
        print(json.dumps({**report.as_dict(), "file": str(calibration_path(args.model))}, indent=2))
        report.calibration.write(args.model)
        return 0
    path = report.calibration.write(args.model)
    text, is_faster = _in_short(args.model, config.engine, report)
    print(f"In short: {text}")
    applies = "it applies automatically from now on"
    if not is_faster and _PRECISION.isdisjoint(read_options(args.model)):
        own = write_options(args.model, {"quality": "lossless"}).name
        applies = f"it would not be faster: {own} keeps quality = lossless, and --quality small-loss takes it"
    print(f"stored in {path}; {applies}")
    return 0


def _in_short(model: Path, engine: EngineConfig, report: "CalibrationReport") -> tuple[str, bool]:
    """The result in one sentence, with the speed measured before and after; False if it is not faster."""
    if not report.has_low_tier:
        without = "the file has no low tier, which pyhobbit convert --sidecar would add"
        return f"{without}: the cache alone was fitted", True
    from pyhobbit.engine.plan import lay_out
    from pyhobbit.inspect.speed import estimate, measure_sample

    def speed(quality: str) -> float:
        config = replace(engine, cache=replace(engine.cache, quality=quality), n_ctx=None)
        sample = measure_sample(model, config, _SAMPLE_SECONDS)
        return estimate(lay_out(model, config), sample, None).tokens_per_second

    quality = report.quality
    share = quality.bytes_per_token / report.high_bytes_per_token
    found = f"{share:.0%} of the bytes per token, {1 - quality.same_top1:.0%} of the next tokens change, "
    found += f"total variation {quality.total_variation:.2g}"
    n_checked = CalibrationConfig.min_checked
    found += "" if report.check else f" (not checked on other text, which takes {n_checked} parts)"
    try:
        before, after = speed("lossless"), speed("small-loss")
    except HobbitError as e:  # a model that ends every answer
        return f"{found}; the speed cannot be measured: {e}", True
    return f"{found}, about {after:.4g} token/s in place of {before:.4g}", after > before
