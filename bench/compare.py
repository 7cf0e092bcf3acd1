# SPDX-License-Identifier: MIT
"""Measures speed and memory of stock llama.cpp and of the expert cache, side by side.

    python -m bench.compare --shape qwen3-30b-a3b --layers 24 --type q4_0 --trace qwen3-30b-a3b.route.csv
    python -m bench.compare --model MODEL.gguf --arms stock ours --limits 0.25

Arms take turns, each in a process of its own under a memory limit, with an empty page cache. The arm
stock-128k sets the readahead of the disk for all programs while it runs. docs/measurements.md explains
the columns.
"""

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from bench.harness import generate, report, runner
from bench.harness.arms import BY_NAME, Arm, Tiers, with_batches
from bench.harness.carry import carry_over
from bench.harness.shapes import SHAPES
from bench.tables import option_parser
from pyhobbit.cli.main import with_options
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.model.file_names import sidecar_path
from pyhobbit.model.gguf_file import read_gguf
from pyhobbit.model.tiers import read_tiers
from pyhobbit.settings.config import EngineConfig
from pyhobbit.settings.papers import PAPERS

_TERMINATED = 143
_LIMITS = "limits as shares of the model, or none (default: 0.15 0.25 0.4 0.6)"


def add_options(
    parser: argparse.ArgumentParser, arms: Mapping[str, Arm] = BY_NAME, limits: str = _LIMITS
) -> None:
    """Declares the options of a comparison of these arms; limits: the help text of --limits."""
    parser.epilog = "arms:\n" + "\n".join(f"  {arm.name:<24} {arm.summary}" for arm in arms.values())
    _add_subject(parser)
    _add_procedure(parser, limits)
    for name in ("t1", "t2"):  # thresholds of the arms with two tiers
        what = f"threshold of the rule gate (default: {PAPERS['hobbit'].settings[name]})"
        parser.add_argument(f"--{name}", type=float, metavar="F", help=what)


def _add_subject(parser: argparse.ArgumentParser) -> None:
    """The options of what is measured: model, tiers and routing."""
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--shape", choices=SHAPES, help="make a random-weight model of this shape")
    model.add_argument("--model", type=Path, metavar="FILE", help="measure this GGUF")
    add("--layers", type=int, metavar="N", help="layers of the shape (default: as in the real model)")
    add("--type", default="q4_0", metavar="TYPE", help="type of the shape's weights (default: %(default)s)")
    add("--low", metavar="TYPE", help="also make a low tier of the experts in this type")
    folder = "folder of generated models, which are reused (default: %(default)s)"
    add("--folder", type=Path, default=Path("bench-models"), metavar="DIR", help=folder)
    trace = "replay this routing in every arm (default: the model's own)"
    add("--trace", type=Path, metavar="FILE", help=trace)
    add("--calibration", type=Path, metavar="FILE", help="apply another model's calibration to the shape")


def _add_procedure(parser: argparse.ArgumentParser, limits: str) -> None:
    """The options of how it is measured."""
    add = parser.add_argument
    add("--arms", nargs="+", metavar="NAME", help="arms to run (default: all that the files allow)")
    add("--limits", type=_limit, nargs="*", metavar="F", help=limits)
    add("--reps", type=int, metavar="N", help="repetitions (default: 5)")
    prompts = "lengths of the prompts in tokens (default: 16 128 512; with --trace: 16)"
    add("--prompts", type=int, nargs="+", metavar="N", help=prompts)
    batch = "tokens of a prompt per pass; several: each arm with each (default: stock 512, ours as chat)"
    add("--batch", type=int, nargs="+", default=(), metavar="N", help=batch)
    tokens = "most tokens to decode (default: 64; with --trace: up to 96)"
    add("--tokens", dest="n_tokens", type=int, metavar="N", help=tokens)
    warm_up = "most tokens to decode before (default: 32; with --trace: 16)"
    add("--warm-up", dest="n_warm_up", type=int, metavar="N", help=warm_up)
    add("--seconds", type=float, metavar="S", help="time limit of decoding (default: 60)")
    add("--threads", dest="n_threads", type=int, metavar="N", help="compute threads (default: one per core)")
    add("--stock", type=Path, metavar="DIR", help="libraries of make stock (default: build/stock/bin)")
    output = "folder of the results (default: a new one in bench-results)"
    add("-o", "--output", type=Path, metavar="DIR", help=output)


def _limit(text: str) -> float | None:
    try:
        return None if text == "none" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no share; give numbers such as 0.25, or none") from None


def results_path(args: argparse.Namespace, config: runner.BenchConfig) -> Path:
    """The file for the lines of JSON. Raises HobbitError."""
    folder = args.output or Path("bench-results") / f"{config.model.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = folder / "results.jsonl"
    if path.exists():
        raise HobbitError(f"{path} exists; give another folder with --output, or remove it")
    return path


def publish(results: report.Results, folder: Path, text: str) -> None:
    """Writes the table `text` beside the lines of JSON. Raises HobbitError if runs failed."""
    (folder / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    print(f"\n{folder} contains this run: results.jsonl and table.md", file=sys.stderr)
    if errors := results.errors():
        raise HobbitError("some runs failed: " + "; ".join(errors))


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM ends what runs in order, so that the disk's readahead is put back."""
    before = signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(_TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def configured(args: argparse.Namespace, arms: Mapping[str, Arm] = BY_NAME) -> runner.BenchConfig:
    """The run that the options ask for; makes the model of a shape. Raises HobbitError."""
    for n_batch in args.batch:
        EngineConfig(n_batch=n_batch)
    given: dict[str, Any] = {
        field.name: tuple(each for each in value if each is not None) if isinstance(value, list) else value
        for field in fields(runner.BenchConfig)
        if field.default is not MISSING and (value := getattr(args, field.name, None)) is not None
    }
    if args.trace is not None:
        given = runner.trace_windows(args.trace, given)
    given.pop("low", None)  # the type so far
    has_costs = args.calibration is not None
    if args.model is not None:
        if args.low or args.layers or args.calibration:
            raise ConfigError(
                "--low, --layers and --calibration are for a --shape; pyhobbit convert --sidecar adds a "
                "low tier"
            )
        model, low = args.model, own_low_tier(args.model)
    else:  # nothing is made for a run that cannot be
        if has_costs and not args.low:
            raise ConfigError("--calibration decides between two tiers; add the low one with --low TYPE")
        placeholder = Path() if args.low else None
        chosen = runner.choose_arms(args.arms, _kinds(placeholder, has_costs), arms)
        runner.BenchConfig(Path(), chosen, low=placeholder, has_costs=has_costs, **given)
        model, low = _made_files(args)
    if has_costs and low is not None:
        t1, t2 = carry_over(args.calibration, model, low)
        given = {"t1": t1, "t2": t2, **given}
    chosen = with_batches(runner.choose_arms(args.arms, _kinds(low, has_costs), arms), args.batch)
    return runner.resolved(runner.BenchConfig(model, chosen, low=low, has_costs=has_costs, **given))


def _kinds(low: Path | None, has_costs: bool) -> tuple[Tiers, ...]:
    """The kinds of arms that the files allow."""
    low_tier: tuple[Tiers, ...] = ("low",) if low is not None else ()
    return ("high", *low_tier, "priced") if has_costs else ("high", *low_tier)


def own_low_tier(model: Path) -> Path | None:
    """The sidecar of the user's model, None without one. Raises HobbitError."""
    runner.require_file(model)
    file = read_gguf(model)
    if len(read_tiers(file).names) > 1 and not file.get("hobbit.sidecar", False):
        raise ConfigError(
            f"{model} has two tiers in itself, and cannot be compared with stock llama.cpp; give a "
            "plain GGUF with its low tier in a sidecar (pyhobbit convert --low TYPE --sidecar)"
        )
    sidecar = sidecar_path(model)
    return sidecar if sidecar.exists() else None


def _made_files(args: argparse.Namespace) -> tuple[Path, Path | None]:
    """A model of a shape, and the file with its low tier."""
    if args.layers is not None and args.layers < 1:
        raise ConfigError(f"--layers is {args.layers}; it must be positive")
    shape = SHAPES[args.shape].scaled(args.layers)
    model = generate.write_model(args.folder, args.shape, shape, args.type)
    return model, generate.write_low_tier(model, shape, args.low) if args.low else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison; returns the exit status."""
    parser = option_parser(__doc__)
    add_options(parser)
    args = parser.parse_args(arguments)
    try:
        config = configured(args)
        path = results_path(args, config)
        with terminable():
            results = report.Results(runner.run(config, path))
        publish(results, path.parent, report.table(results))
    except HobbitError as e:
        print(f"compare: {with_options(str(e))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
