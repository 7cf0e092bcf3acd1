# SPDX-License-Identifier: MIT
"""Measures speed and memory of stock llama.cpp and of the expert cache, side by side.

    python -m bench.compare --shape qwen3-30b-a3b --layers 24 --type q4_0 --trace qwen3-30b-a3b.route.csv
    python -m bench.compare --model MODEL.gguf --arms stock ours --limits 0.25
    python -m bench.compare --device CUDA0 --stock build/stock-cuda/bin --shape mixtral-8x7b --layers 8
    python -m bench.compare --prices 4090-ddr5 --shape qwen3-30b-a3b --limits 0.25

Arms take turns, each in a process of its own. A limit bounds its memory, with an empty page cache; with
--device it is the device's memory for experts, and with --prices that of a machine that is modelled. The arm
stock-128k sets the readahead of the disk for all programs while it runs. docs/measurements.md explains the
columns, docs/modelled.md those of a modelled machine. NAME@N is an arm with N tokens of a prompt per pass.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from bench.harness import files, runner
from bench.harness.arms import BY_NAME, DEVICE_ARMS, MODELLED, Arm, choose_arms
from bench.harness.devices import Device, Modelled, experts_of
from bench.harness.runner import BenchConfig, Host
from bench.harness.system import FOLDER, Output, add_output, option_parser, terminable
from bench.harness.table import Results, table
from pyhobbit.cli.main import with_options
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.model.file_names import sidecar_path
from pyhobbit.model.gguf_file import read_gguf
from pyhobbit.model.tiers import read_tiers

_ON_DEVICE: dict[str, Any] = {"limits": (0.2, 0.3, 0.5)}
_ON_MODELLED: dict[str, Any] = {"limits": (0.25,), "reps": 1, "n_warm_up": 64}


def _limit(text: str) -> float | None:
    try:
        return None if text == "none" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no share; give numbers such as 0.25, or none") from None


_OPTIONS: tuple[tuple[str, Mapping[str, Any], str], ...] = (
    ("layers N", {"type": int}, "layers of the shape (default: as in the real model)"),
    ("type TYPE", {"default": "q4_0"}, "type of the shape's weights (default: %(default)s)"),
    ("low TYPE", {}, "also make a low tier of the experts in this type"),
    ("folder DIR", {"type": Path}, "folder of generated models, which are reused (default: bench-models)"),
    ("trace FILE", {"type": Path}, "replay this routing (default: the model's own; seeded with --prices)"),
    ("rpc HOST:PORT", {}, "ggml-rpc-server that offers the device"),
    ("arms NAME", {"nargs": "+"}, "arms to run (default: all that the files allow)"),
    (
        "limits F",
        {"type": _limit, "nargs": "*"},
        "shares of the model, or of the experts on a device; or none",
    ),
    ("reps N", {"type": int}, "repetitions (default: 5)"),
    ("prompts N", {"type": int, "nargs": "+"}, "tokens of prompts (default: 16 128 512; with --trace: 16)"),
    (
        "tokens N",
        {"type": int, "dest": "n_tokens"},
        "most tokens to decode (default: 64; of a trace up to 96)",
    ),
    ("warm-up N", {"type": int, "dest": "n_warm_up"}, "most tokens before (default: 32; of a trace 16)"),
    ("seconds S", {"type": float}, "time limit of decoding (default: 60)"),
    ("threads N", {"type": int, "dest": "n_threads"}, "compute threads (default: one per core)"),
    ("stock DIR", {"type": Path}, "libraries of make stock (default: build/stock/bin)"),
    ("t1 F", {"type": float}, "threshold of the rule gate (default: 0.6, HOBBIT's)"),
    ("t2 F", {"type": float}, "the other threshold (default: 0.9)"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options of a comparison."""
    lists = {"arms": BY_NAME, "arms on a device": DEVICE_ARMS}
    parser.epilog = "\n\n".join(
        "\n".join([f"{title}:", *(f"  {arm.name:<24} {arm.summary}" for arm in arms.values())])
        for title, arms in lists.items()
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--shape", choices=files.SHAPES, help="make a random-weight model of this shape")
    model.add_argument("--model", type=Path, metavar="FILE", help="measure this GGUF")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--device", metavar="NAME", help="run on this device, as ggml names it, like CUDA0")
    prices = "run on a modelled machine: a name of tests/modelled_device/prices, or a path"
    place.add_argument("--prices", metavar="NAME", help=prices)
    for option, given, what in _OPTIONS:
        name, metavar = option.split()
        parser.add_argument(f"--{name}", metavar=metavar, help=what, **given)
    add_output(parser)


def target_of(args: argparse.Namespace) -> Host:
    """The place where the arms run. Raises HobbitError."""
    if args.prices is not None:
        return Modelled.of(args.prices)
    if args.device is None:
        return Host()
    target = Device(args.device, args.rpc)
    target.describe(None)  # before a model is made
    return target


def configured(args: argparse.Namespace, target: Host) -> BenchConfig:
    """The run that the options ask for; makes the model of a shape. Raises HobbitError."""
    given: dict[str, Any] = {
        field.name: tuple(each for each in value if each is not None) if isinstance(value, list) else value
        for field in fields(BenchConfig)
        if field.default is not MISSING and (value := getattr(args, field.name, None)) is not None
    }
    is_modelled = isinstance(target, Modelled)
    given = {**(_ON_MODELLED if is_modelled else _ON_DEVICE if isinstance(target, Device) else {}), **given}
    if args.trace is not None:
        given = runner.trace_windows(args.trace, given)
    if args.model is not None:
        if args.low or args.layers or is_modelled:
            raise ConfigError(
                "--low, --layers and --prices are for a --shape; pyhobbit convert --sidecar adds a low tier"
            )
        model, given["low"] = args.model, own_low_tier(args.model)
        return BenchConfig(model, _arms(args, target, given), **given)
    shape = files.SHAPES[args.shape].scaled(args.layers)
    folder = args.folder or (FOLDER / "models" if is_modelled else Path("bench-models"))
    model = files.model_path(folder, args.shape, shape, args.type, holes=is_modelled)
    given["low"] = files.low_path(model, args.low) if args.low else None
    config = BenchConfig(model, _arms(args, target, given), **given)  # refused before anything is made
    files.write_model(folder, args.shape, shape, args.type, holes=is_modelled)
    if config.low is not None:
        files.write_low_tier(model, shape, args.low, holes=is_modelled)
    return config


def _arms(args: argparse.Namespace, target: Host, given: Mapping[str, Any]) -> tuple[Arm, ...]:
    has_low = given["low"] is not None
    if not isinstance(target, Device):
        return choose_arms(args.arms, has_low)
    names = list(MODELLED) if isinstance(target, Modelled) and args.arms is None else args.arms
    return choose_arms(names, has_low, DEVICE_ARMS)


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


def compared(args: argparse.Namespace) -> None:
    """Runs, and writes the table beside the lines of JSON. Raises HobbitError, also if runs failed."""
    target = target_of(args)
    config = configured(args, target)
    for share in config.limits if isinstance(target, Device) else ():
        experts_of(config.model).budget(share)
    out = Output(args.output, config.model.stem)
    with terminable():
        results = Results(runner.run(config, out.line, target))
    out.table(table(results))
    if errors := results.errors():
        raise HobbitError("some runs failed: " + "; ".join(errors))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison; returns the exit status."""
    parser = option_parser(__doc__)
    add_options(parser)
    try:
        compared(parser.parse_args(arguments))
    except HobbitError as e:
        print(f"compare: {with_options(str(e))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
