# SPDX-License-Identifier: MIT
"""Measures speed and memory of stock llama.cpp and of the expert cache, side by side.

Arms take turns, each in a process of its own under a memory limit, with an empty page cache.

The arm stock-mmap-128k sets the readahead of the disk for all programs while it runs.
"""

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyhobbit.cli.options import add_setting_arguments
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.settings.config import EngineConfig, InspectConfig

if TYPE_CHECKING:
    from pyhobbit.bench.arms import Arm, Tiers
    from pyhobbit.bench.report import Results
    from pyhobbit.bench.runner import BenchConfig

_TERMINATED = 143


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the verb."""
    from pyhobbit.bench.arms import BY_NAME

    limits = "limits as shares of the model, or none (default: 0.15 0.25 0.4 0.6)"
    add_options(parser, BY_NAME, limits)


def add_options(parser: argparse.ArgumentParser, arms: "Mapping[str, Arm]", limits: str) -> None:
    """Declares the options of a comparison of these arms; limits: what --limits is."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "arms:\n" + "\n".join(f"  {arm.name:<24} {arm.summary}" for arm in arms.values())
    _add_subject(parser)
    _add_procedure(parser, limits)
    thresholds = {"t1": str(InspectConfig.paper_t1), "t2": str(InspectConfig.paper_t2)}
    add_setting_arguments(parser, thresholds, thresholds, is_group=False)  # of the arms with two tiers


def _add_subject(parser: argparse.ArgumentParser) -> None:
    """The options of what is measured: model, tiers and routing."""
    from pyhobbit.bench.shapes import SHAPES

    add = parser.add_argument
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--shape", choices=SHAPES, help="make a random-weight model of this shape")
    model.add_argument("--model", type=Path, metavar="FILE", help="measure this GGUF")
    add("--layers", type=int, metavar="N", help="layers of the shape (default: as in the real model)")
    add("--type", default="q4_0", metavar="TYPE", help="type of the shape's weights (default: %(default)s)")
    add("--low", metavar="TYPE", help="also make a low tier of the experts in this type")
    add("--residual", metavar="TYPE", help="also make a residual on that low tier, in this type")
    add(
        "--folder",
        type=Path,
        default=Path("bench-models"),
        metavar="DIR",
        help="folder of generated models, which are reused (default: %(default)s)",
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="replay this routing in every arm (default: the model's own)",
    )
    add(
        "--predict",
        type=float,
        metavar="F",
        help="with --trace: predict this share of the next layer's experts (default: the model's routers, "
        "which know nothing of a replay)",
    )
    add(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="apply another model's calibration to the shape",
    )


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
    add("--busy", dest="n_busy", type=int, metavar="N", help="measure beside N busy processes (default: 0)")
    add(
        "--stock",
        type=Path,
        metavar="DIR",
        help="libraries of make stock (default: build/stock/bin)",
    )
    add(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="folder of the results (default: a new one in bench-results)",
    )


def _limit(text: str) -> float | None:
    try:
        return None if text == "none" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no share; give numbers such as 0.25, or none") from None


def run(args: argparse.Namespace) -> int:
    """Runs the verb with parsed options; returns the exit status. Raises HobbitError."""
    from pyhobbit.bench import report, runner
    from pyhobbit.bench.arms import BY_NAME

    config = configured(args, BY_NAME)
    path = results_path(args, config)
    with terminable():
        results = report.Results(runner.run(config, path))
    publish(results, path.parent, report.table(results))
    return 0


def results_path(args: argparse.Namespace, config: "BenchConfig") -> Path:
    """Where the lines of JSON go. Raises HobbitError."""
    folder = args.output or Path("bench-results") / f"{config.model.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = folder / "results.jsonl"
    if path.exists():
        raise HobbitError(f"{path} exists; give another folder with --output, or remove it")
    return path


def publish(results: "Results", folder: Path, text: str) -> None:
    """Writes the table `text` beside the lines of JSON, and with matplotlib a plot.

    Raises HobbitError, also where runs failed.
    """
    from pyhobbit.bench import report

    (folder / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    files = "results.jsonl and table.md"
    try:
        report.plot(results, folder / "speed.png")
        files = "results.jsonl, table.md and speed.png"
    except HobbitError as e:
        print(f"\npyhobbit: {e}", file=sys.stderr)
    print(f"\n{folder} contains this run: {files}", file=sys.stderr)
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


def configured(args: argparse.Namespace, arms: "Mapping[str, Arm]") -> "BenchConfig":
    """What the options say; a model that is wanted is made. Raises HobbitError."""
    from pyhobbit.bench import runner
    from pyhobbit.bench.arms import with_batches

    for n_batch in args.batch:
        EngineConfig(n_batch=n_batch)
    given: dict[str, Any] = {
        field.name: tuple(each for each in value if each is not None) if isinstance(value, list) else value
        for field in fields(runner.BenchConfig)
        if field.default is not MISSING and (value := getattr(args, field.name, None)) is not None
    }
    if args.trace is not None:
        given = runner.trace_windows(args.trace, given)
    kinds: tuple[Tiers, ...] = ("low", "residual")
    wanted: dict[Tiers, Path] = {tier: Path() for tier in kinds if given.pop(tier, None)}  # types so far
    if args.model is not None:
        model, tiers = _own_files(args)
    else:  # nothing is made for a run that cannot be
        priced = _check_calibration(args)
        chosen = runner.choose_arms(args.arms, ("high", *wanted, *priced), arms)
        low, residual = wanted.get("low"), wanted.get("residual")
        runner.BenchConfig(Path(), chosen, low=low, residual=residual, has_costs=bool(priced), **given)
        model, tiers = _made_files(args)
    if has_costs := args.calibration is not None:
        from pyhobbit.bench.carry import carry_over

        t1, t2 = carry_over(args.calibration, model, tiers["low"])
        given = {"t1": t1, "t2": t2, **given}
    given["has_costs"] = has_costs
    kinds = ("high", *tiers, "priced") if has_costs else ("high", *tiers)
    chosen = runner.choose_arms(args.arms, kinds, arms)
    if args.model is not None and "residual" in tiers:
        chosen = _beside_residual(chosen, tiers["residual"], named=args.arms is not None)
    chosen = with_batches(chosen, args.batch)
    low, residual = tiers.get("low"), tiers.get("residual")
    return runner.resolved(runner.BenchConfig(model, chosen, low=low, residual=residual, **given))


def _beside_residual(chosen: "tuple[Arm, ...]", sidecar: Path, *, named: bool) -> "tuple[Arm, ...]":
    """The arms that mean what they say where the cache finds a residual by itself."""
    wrong = [arm for arm in chosen if arm.build == "ours" and arm.tiers == "high"]
    if wrong and named:
        raise ConfigError(
            f"{sidecar} makes high precision a low version and a residual, also in {wrong[0].name}; leave "
            "this arm out, or move the file away"
        )
    return tuple(arm for arm in chosen if arm not in wrong)


def _check_calibration(args: argparse.Namespace) -> "tuple[Tiers, ...]":
    """The kind of arms that a calibration allows. Raises ConfigError."""
    if args.calibration is None:
        return ()
    if not args.low:
        raise ConfigError("--calibration decides between two tiers; add the low one with --low TYPE")
    return ("priced",)


def _own_files(args: argparse.Namespace) -> "tuple[Path, dict[Tiers, Path]]":
    """The user's model, and the file with its further tiers by their kind."""
    from pyhobbit.bench import runner
    from pyhobbit.model.file_names import sidecar_path
    from pyhobbit.model.gguf_file import read_gguf
    from pyhobbit.model.tiers import read_tiers

    if args.low or args.residual or args.layers or args.calibration:
        raise ConfigError(
            "--low, --residual, --layers and --calibration are for a --shape; pyhobbit convert --sidecar "
            "adds tiers"
        )
    runner.require_file(args.model)
    file = read_gguf(args.model)
    if len(read_tiers(file).names) > 1 and not file.get("hobbit.sidecar", False):
        raise ConfigError(
            f"{args.model} has two tiers in itself, and cannot be compared with stock llama.cpp; give a "
            "plain GGUF with its low tier in a sidecar (pyhobbit convert --low TYPE --sidecar)"
        )
    sidecar = sidecar_path(args.model)
    if not sidecar.exists():
        return args.model, {}
    return args.model, {"residual" if read_tiers(read_gguf(sidecar)).residual_on else "low": sidecar}


def _made_files(args: argparse.Namespace) -> "tuple[Path, dict[Tiers, Path]]":
    """A model of a shape, and files with its further tiers."""
    from pyhobbit.bench import generate
    from pyhobbit.bench.shapes import SHAPES

    if args.layers is not None and args.layers < 1:
        raise ConfigError(f"--layers is {args.layers}; it must be positive")
    shape = SHAPES[args.shape].scaled(args.layers)
    if args.residual and not args.low:
        raise ConfigError("--residual is added to a low tier; name its type with --low")
    model = generate.write_model(args.folder, args.shape, shape, args.type)
    tiers: dict[Tiers, Path] = {}
    if args.low:
        tiers["low"] = generate.write_low_tier(model, shape, args.low)
    if args.residual:
        tiers["residual"] = generate.write_residual(model, shape, args.low, args.residual)
    return model, tiers
