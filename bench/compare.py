# SPDX-License-Identifier: MIT
"""Measures speed and memory of stock llama.cpp and of the expert cache, side by side.

    python -m bench.compare --shape qwen3-30b-a3b --layers 24 --type Q4_K_M
    python -m bench.compare --model MODEL.gguf --arms stock ours --limits 0.25
    python -m bench.compare --device CUDA0 --stock build/stock-cuda/bin --shape mixtral-8x7b --layers 8
    python -m bench.compare --prices 4090-ddr5 --shape qwen3-30b-a3b --limits 0.25

Arms take turns, each in a process of its own. A limit bounds its memory, with an empty page cache; with
--device it is the device's memory for experts, and with --prices that of a machine that is modelled. The arm
stock-128k sets the readahead of the disk for all programs while it runs. docs/measurements.md explains the
columns, docs/modelled.md those of a modelled machine. NAME@N is an arm with N tokens of a prompt per pass.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import files, runner
from bench.harness.arms import BY_NAME, DEVICE_ARMS, choose_arms
from bench.harness.devices import Device, Modelled
from bench.harness.runner import BenchConfig, Host
from bench.harness.system import ROOT, option_parser
from bench.harness.table import Results, table
from pyhobbit.cli.main import ended
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.model.file_names import sidecar_path
from pyhobbit.model.gguf_file import read_gguf
from pyhobbit.model.tiers import read_tiers


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options of a comparison."""
    parser.epilog = "\n\n".join(
        "\n".join([f"{title}:", *(f"  {arm.name:<24} {arm.summary}" for arm in arms.values())])
        for title, arms in (("arms", BY_NAME), ("arms on a device", DEVICE_ARMS))
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--shape", choices=files.SHAPES, help="make a random-weight model of this shape")
    model.add_argument("--model", type=Path, metavar="FILE", help="measure this GGUF")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--device", metavar="NAME", help="run on this device, as ggml names it, like CUDA0")
    prices = "run on a modelled machine: a name of tests/modelled_device/prices, or a path"
    place.add_argument("--prices", metavar="NAME", help=prices)
    add = parser.add_argument
    add("--layers", type=int, help="layers of the shape (default: as in the real model)")
    add("--type", default="q4_0", help="weights: q4_0, or Q4_K_M as llama-quantize (default: %(default)s)")
    add("--low", help="also make a low tier of the experts in this type")
    add("--folder", type=Path, help="folder of generated models, which are reused (default: bench-models)")
    add("--rpc", help="ggml-rpc-server that offers the device, HOST:PORT")
    add("--arms", nargs="+", help="arms to run (default: all that the files allow)")
    add("-o", "--output", type=Path, help="folder of the results (default: a new one in bench-results)")
    for name, option in BenchConfig.options().items():
        add(f"--{option['name']}", dest=name, **option["given"])


def target_of(args: argparse.Namespace) -> Host:
    """The place where the arms run. Raises HobbitError."""
    if args.prices is not None:
        return Modelled.of(args.prices)
    if args.device is None:
        return Host()
    target = Device(args.device, args.rpc)
    target.describe()  # before a model is made
    return target


def configured(args: argparse.Namespace, target: Host) -> BenchConfig:
    """The run that the options ask for; makes the model of a shape. Raises HobbitError."""
    given: dict[str, Any] = dict(target.usual) | {
        name: tuple(one for one in value if one is not None) if isinstance(value, list) else value
        for name in ("arms", *BenchConfig.options())
        if (value := getattr(args, name)) is not None
    }
    is_modelled = isinstance(target, Modelled)
    if args.model is not None:
        if args.low or args.layers or is_modelled:
            raise ConfigError(
                "--low, --layers and --prices are for a --shape; pyhobbit convert --sidecar adds a low tier"
            )
        model, given["low"] = args.model, own_low_tier(args.model)
    else:
        shape = files.SHAPES[args.shape].scaled(args.layers)
        folder = args.folder or (ROOT / "build/bench/models" if is_modelled else Path("bench-models"))
        model = files.model_path(folder, args.shape, shape, args.type, holes=is_modelled)
        given["low"] = files.low_path(model, args.low) if args.low else None
    given["arms"] = choose_arms(given.get("arms"), given["low"] is not None, target.arms)
    config = BenchConfig(model, **given)  # refused before anything is made
    if args.shape is not None:
        files.write_model(folder, args.shape, shape, args.type, holes=is_modelled)
    if args.low:
        files.write_low_tier(model, shape, args.low, holes=is_modelled)
    return config


def own_low_tier(model: Path) -> Path | None:
    """The sidecar of the user's model, None without one. Raises HobbitError."""
    file = read_gguf(model)
    if len(read_tiers(file).names) > 1 and not file.get("hobbit.sidecar", False):
        raise ConfigError(
            f"{model} has two tiers in itself, which stock llama.cpp refuses: see convert --split, --sidecar"
        )
    sidecar = sidecar_path(model)
    return sidecar if sidecar.exists() else None


def compared(args: argparse.Namespace) -> int:
    """Runs, and writes the table beside the lines of JSON. Raises HobbitError, also if runs failed."""
    target = target_of(args)
    config = configured(args, target)
    folder = args.output or Path("bench-results", f"{config.model.stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    path = folder / "results.jsonl"
    if path.exists():
        raise HobbitError(f"{path} exists; give another folder with --output, or remove it")

    records = []
    for record in runner.run(config, target):
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            print(json.dumps(record), file=file)
        records.append(record)
    results = Results(records)
    text = table(results)
    (folder / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    print(f"\n{folder} contains this run: results.jsonl and table.md", file=sys.stderr)
    if errors := results.errors():
        raise HobbitError("some runs failed: " + "; ".join(errors))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison; returns the exit status."""
    parser = option_parser(__doc__)
    add_options(parser)
    args = parser.parse_args(arguments)
    return ended(lambda: compared(args))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # puts the disk's readahead back
    sys.exit(main())
