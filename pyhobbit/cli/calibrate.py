# SPDX-License-Identifier: MIT
"""Fits thresholds and cache to a model, on a text; chat and llama-server then apply the result."""

import argparse
import json
import sys
from pathlib import Path

from pyhobbit.cli.options import add_model_options, add_setting_arguments, add_thread_arguments, engine_config
from pyhobbit.model.file_names import calibration_path, options_path
from pyhobbit.settings.config import CalibrationConfig, EvaluationConfig

# The others are what calibration finds, or do not change what is measured.
_SETTINGS = ("memory", "pools", "io_threads", "sidecar")
# Options of the file beside the model; its context is that of a conversation.
_OWN = ("memory", "pools", "io_threads", "threads")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the verb."""
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="GGUF file; of a split model its first file")
    add("--text", type=Path, required=True, metavar="FILE", help="a text of the kind that you ask about")
    what = "limit on the increase of perplexity (default: 1, without --max-kl)"
    add("--max-ppl-increase", type=float, metavar="PERCENT", help=what)
    what = "limit on the mean KL divergence from the predictions in high precision"
    add("--max-kl", type=float, metavar="NATS", help=what)
    default, least = CalibrationConfig.default_chunks, CalibrationConfig.min_checked
    what = f"most parts of the text, half of which check the limit (default: {default}; --minutes: {least})"
    add("--chunks", type=int, metavar="N", help=what)
    what = "fit the rule price in about M minutes: costs come from one run, from more while time is left"
    add("--minutes", type=float, metavar="M", help=what)
    what = "precision rule to fit (default: gate and price; the one that reads less is stored)"
    add("--rule", choices=CalibrationConfig.all_rules, help=what)
    default = CalibrationConfig.default_cost_chunks
    what = f"parts of the text for the costs of low precision (default: {default}; with --minutes 1)"
    add("--cost-chunks", type=int, metavar="N", help=what)
    add("--per-expert", action="store_true", help="measure these costs for each expert, one run per expert")
    what = f"tokens per part (default: {EvaluationConfig.default_n_ctx})"
    add("--ctx", type=int, metavar="N", help=what)
    add("--json", action="store_true", help="print all results as JSON")
    add_thread_arguments(parser)
    add_setting_arguments(parser, _SETTINGS)


def run(args: argparse.Namespace) -> int:
    """Runs the verb with parsed options; returns the exit status. Raises HobbitError."""
    if options := add_model_options(args, args.model, _OWN):
        print(f"pyhobbit: {options_path(args.model).name} sets {', '.join(options)}", file=sys.stderr)
    config = CalibrationConfig(
        engine=engine_config(args, args.ctx),
        max_ppl_increase=None if args.max_ppl_increase is None else args.max_ppl_increase / 100,
        max_kl=args.max_kl,
        max_chunks=args.chunks,
        rule=args.rule,
        cost_chunks=args.cost_chunks,
        per_expert=args.per_expert,
        minutes=args.minutes,
    )
    from pyhobbit.quality.calibration import calibrate  # takes some time to import
    from pyhobbit.quality.progress import Measurements

    try:
        report = calibrate(args.model, args.text, config)
    except KeyboardInterrupt:
        kept = Measurements.path_of(args.model)
        state = f"{kept} keeps what was measured, start again to go on"
        if not kept.exists():
            state = "nothing was measured yet"
        print(f"\npyhobbit: stopped; {state}", file=sys.stderr)
        raise
    if args.json:
        print(json.dumps({**report.as_dict(), "file": str(calibration_path(args.model))}, indent=2))
    else:
        print(report.summary())
    path = report.calibration.write(args.model, report.lookahead)
    if not args.json:
        print(f"stored in {path}; it applies automatically from now on")
    return 0
