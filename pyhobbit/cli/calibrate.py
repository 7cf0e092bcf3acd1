# SPDX-License-Identifier: MIT
"""Fits thresholds and cache to a model, on a text; chat and llama-server then use what was found."""

import argparse
import json
from pathlib import Path

from pyhobbit.settings.config import (
    CacheConfig,
    CalibrationConfig,
    EngineConfig,
    EvaluationConfig,
    parse_size,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the verb."""
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="GGUF file; of a split model its first file")
    add("--text", type=Path, required=True, metavar="FILE", help="text like that of your use of the model")
    add(
        "--max-ppl-increase",
        type=float,
        metavar="PERCENT",
        help="limit on the increase of perplexity (default: 1, without --max-kl)",
    )
    add(
        "--max-kl",
        type=float,
        metavar="NATS",
        help="limit on the mean KL divergence from the predictions in high precision",
    )
    add(
        "--chunks",
        type=int,
        default=CalibrationConfig.max_chunks,
        metavar="N",
        help="maximum number of parts of the text to use (default: %(default)s)",
    )
    add(
        "--ctx",
        type=int,
        metavar="N",
        help=f"tokens per part (default: {EvaluationConfig.default_n_ctx})",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--memory", metavar="SIZE", help="bound on the model, like 8G (default: by what is free)"
    )
    size.add_argument("--pools", metavar="SIZE", help="memory of the expert cache alone, like 512M")
    add("--sidecar", type=Path, metavar="FILE", help="file with the low tier (default: MODEL.hobbit.gguf)")
    add("--threads", type=int, metavar="N", help="for computing (default: one per processor core)")
    add("--json", action="store_true", help="print all results as JSON")
    add("--verbose", action="store_true", help="show llama.cpp's log on standard error")


def run(args: argparse.Namespace) -> int:
    """Runs the verb with parsed options; returns the exit status. Raises HobbitError."""
    config = CalibrationConfig(
        engine=EngineConfig(
            cache=CacheConfig(
                memory=None if args.memory is None else parse_size(args.memory),
                pools=None if args.pools is None else parse_size(args.pools),
                sidecar=args.sidecar,
            ),
            n_ctx=args.ctx,
            n_threads=args.threads,
            verbose=args.verbose,
        ),
        max_ppl_increase=None if args.max_ppl_increase is None else args.max_ppl_increase / 100,
        max_kl=args.max_kl,
        max_chunks=args.chunks,
    )
    from pyhobbit.model.tiers import calibration_path  # both take some time to import
    from pyhobbit.quality.calibration import calibrate

    report = calibrate(args.model, args.text, config)
    if args.json:
        print(json.dumps({**report.as_dict(), "file": str(calibration_path(args.model))}, indent=2))
    else:
        print(report.summary())
    path = report.calibration.write(args.model)
    if not args.json:
        print(f"stored in {path}; it applies automatically from now on")
    return 0
