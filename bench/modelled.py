# SPDX-License-Identifier: MIT
"""llama.cpp and the expert cache on a modelled device: their time on a machine that is not there.

    python bench/modelled.py --prices 4090-ddr5 --shape qwen3-30b-a3b --share 0.25 --json

Both programs run as they are, in virtual time: what they ask of the device, the link and the CPU's cores
takes what the price file says, and no weight is computed or stored. docs/modelled.md has more.
"""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

if __package__ in (None, ""):  # started by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.device import BY_NAME, PROFILE, PROFILED, STOCK_FIT, Experts, Target, experts_of
from bench.harness import generate, routing, runner
from bench.harness.carry import placed
from bench.harness.compiled import compiled
from bench.harness.shapes import SHAPES
from bench.tables import FOLDER, ROOT, markdown, number, option_parser
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.routing.trace import read_trace

SOURCES = ROOT / "tests/modelled_device"
STOCK = "stock"
ARMS = (STOCK, STOCK_FIT, "demand", "ours-gpu", "ours-cooperative", "ours-auto", "ours-twiddler")
_SEED = 1


def library() -> Path:
    """The modelled device, compiled on first use. Raises HobbitError without a compiler."""
    names = ("modelled-device", "streams", "time-face", "host-threads")
    sources = [SOURCES / f"{name}.cpp" for name in names]
    return compiled("modelled", sources, sorted(SOURCES.glob("*.h")), ["-std=c++17", "-Wl,-z,lazy"])


def price_file(name: str) -> Path:
    """A file of tests/modelled_device/prices by its name, or any by its path. Raises ConfigError."""
    path = SOURCES / "prices" / f"{name}.json"
    path = path if path.exists() else Path(name)
    bundled = {each.stem: json.loads(each.read_text()) for each in (SOURCES / "prices").glob("*.json")}
    try:
        wrong = sorted(json.loads(path.read_text(encoding="utf-8")).keys() ^ bundled["h100"].keys())
    except (OSError, ValueError, AttributeError) as e:
        names = ", ".join(sorted(bundled))
        raise ConfigError(f"--prices {name} is no price file ({e}); give a path, or one of {names}") from e
    if wrong:
        raise ConfigError(f"{path} lacks prices, or has unknown ones: {', '.join(wrong)}")
    return path.absolute()


def seeded_routing(shape: routing.MoeShape, n_tokens: int, n_further: int = 0) -> NDArray[np.int32]:
    """[tokens, layers, used]: preferred experts, of which those of the last tokens return more often.

    With 128 experts it has the reuse and the hits of LRU of a recorded trace (docs/modelled.md).
    n_further: tokens behind the others, which stay as they are without them.
    """
    rng = np.random.default_rng(_SEED)
    n = shape.n_experts
    spread = 0.7 if n <= 16 else 0.13 if n <= 128 else 0.25  # share of the experts that most choices fall on
    chosen = np.empty((n_tokens + n_further, shape.n_layers, shape.n_used), np.int32)
    liked, recent = np.empty((shape.n_layers, n)), np.zeros((shape.n_layers, n))
    for tokens in (range(n_tokens), range(n_tokens, len(chosen))):
        for layer in range(shape.n_layers):
            if tokens.start == 0:
                liked[layer] = rng.permutation(-np.arange(n) / (spread * n))
            for token in tokens:
                order = np.argsort(-(liked[layer] + 0.6 * recent[layer] + rng.gumbel(size=n)))
                chosen[token, layer] = order[: shape.n_used]
                recent[layer] *= 0.7
                recent[layer, order[: shape.n_used]] += 1
    return chosen


def write_routing(
    path: Path, model: Path, trace: Path | None, n_before: int, n_tokens: int
) -> NDArray[np.int32]:
    """First every expert once, then tokens to decode. Returns what the tokens choose that are not measured.

    Raises HobbitError where the trace has too few.
    """
    shape = routing.moe_shape(model)
    sweep = routing.sweep(shape)
    n_used = n_before + n_tokens
    if trace is None:
        experts = seeded_routing(shape, n_used, PROFILED)
        weights = np.full(experts.shape, 1 / shape.n_used, np.float32)
    else:
        laid = routing.lay_over(read_trace(trace), shape)
        experts, weights = laid.experts, laid.weights
        if len(experts) < n_used:
            raise ConfigError(f"{trace} has {len(experts)} tokens; give fewer with --tokens and --warm-up")
    np.savez(
        path,
        experts=np.concatenate((sweep.experts, experts[:n_used])),
        weights=np.concatenate((sweep.weights, weights[:n_used])),
    )
    return np.delete(experts, slice(n_before, n_used), axis=0)


def run_arm(
    config: runner.BenchConfig, experts: Experts, arm: str, prices: Path, routes: Path
) -> dict[str, Any]:
    """The result of decode.py in a process of its own, or an error."""
    turn = runner.Turn(BY_NAME[arm], None if BY_NAME[arm].fits else config.limits[0], 0)
    settings = json.loads(prices.read_text(encoding="utf-8"))["device"]
    name = dict(word.split("=") for word in settings.split())["name"]
    job = replace(Target(f"{name}0", None).job(config, experts, turn, routes), mmap=True, n_threads=1)
    environment = {"PYTHONPATH": str(ROOT), "LD_PRELOAD": str(library())}
    environment |= {"MODELLED_PRICES": str(prices), "MODELLED_DEVICE": settings}
    done = runner.start(job, None, (str(SOURCES / "decode.py"),), environment)
    return {"error": runner.reason(done)} if done.returncode else json.loads(done.stdout)


def lines(args: Namespace) -> list[dict[str, Any]]:
    """A line for each arm. Raises HobbitError."""
    prices = price_file(args.prices)
    if args.layers is not None and args.layers < 1:
        raise ConfigError(f"--layers is {args.layers}; it must be positive")
    shape = SHAPES[args.shape].scaled(args.layers)
    model = generate.write_model(args.folder, args.shape, shape, args.type, holes=True)
    arms = tuple(BY_NAME[name] for name in args.arms)
    config = runner.BenchConfig(
        model.absolute(), arms, (args.share,), stock=args.stock, n_tokens=args.tokens, n_warm_up=args.warm_up
    )
    experts = experts_of(model)
    head = {"modelled": True, "prices": args.prices, "shape": args.shape, "layers": shape.n_layer}
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        routes = Path(folder) / "routing.npz"
        others = write_routing(routes, model, args.trace, args.warm_up, args.tokens)
        profiled = replace(config, model=placed(config.model, routes.with_name(model.name), others))
        for name in args.arms:
            own = profiled if PROFILE in BY_NAME[name].settings else config
            line = run_arm(own, experts, name, prices, routes)
            if "error" in line:
                raise HobbitError(f"the arm {name} cannot be modelled: {line['error']}")
            stock = next((each["token_ms"] for each in found if each["arm"] == STOCK), None)
            ratio = stock / line["token_ms"] if stock else 1.0 if name == STOCK else None
            found.append({**head, "share": args.share, "arm": name, "to_stock": ratio, **line})
            if args.json:
                print(json.dumps(found[-1]), flush=True)
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """The results as a table for people."""
    title = "modelled: {prices}, {shape}, {layers} layers, share {share:g}".format_map(found[0])
    rows = []
    for line in found:
        cells = {"arm": line["arm"], "token, ms": number(line["token_ms"], ".2f")}
        cells |= {"to stock": number(line["to_stock"], ".2f"), "hits": number(line["hits"], ".0%")}
        cells |= {
            "by the CPU": number(line["by_cpu"], ".0%"),
            "evicted": str(line["counters"].get("evictions", "-")),
        }
        cells["beside, us/layer"] = number(line["layer_beside_us"], ".0f")
        cells |= {f"{name}/layer": f"{value:.1f}" for name, value in line["per_layer"].items()}
        cells |= {f"{name}, us": f"{value:.0f}" for name, value in line["per_layer_us"].items()}
        cells |= {f"{name} idle, us": f"{value:.0f}" for name, value in line["idle_us"].items()}
        rows.append(cells)
    ratios = {line["arm"]: line["to_stock"] for line in found}
    if (ratio := ratios.get("ours-auto")) is not None:
        faster = "the cache" if ratio >= 1 else "llama.cpp's layers"
        title += f"; measured placement: {faster}, {max(1.0, ratio):.2f} of stock"
    return "\n".join([title, "", *markdown(rows)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = option_parser(__doc__)
    add = parser.add_argument
    machine = "machine: a name of tests/modelled_device/prices, or a path"
    add("--prices", required=True, metavar="NAME", help=machine)
    add("--shape", choices=sorted(SHAPES), default="qwen3-30b-a3b", help="model (default: %(default)s)")
    add("--layers", type=int, metavar="N", help="fewer layers than the model's")
    add("--type", default="q4_0", help="type of its matrices (default: %(default)s)")
    share = "share of the experts in device memory (default: %(default)s)"
    add("--share", type=float, default=0.25, metavar="F", help=share)
    add("--arms", nargs="+", choices=list(BY_NAME), default=list(ARMS), metavar="NAME")
    add("--trace", type=Path, metavar="FILE", help="routing to replay (default: a seeded one)")
    add("--tokens", type=int, default=64, metavar="N", help="measured tokens (default: %(default)s)")
    add("--warm-up", type=int, default=64, metavar="N", help="tokens before (default: %(default)s)")
    add("--folder", type=Path, default=FOLDER / "models", metavar="DIR", help="for model files without data")
    add("--stock", type=Path, default=ROOT / "build/stock/bin", metavar="DIR", help="unpatched llama.cpp")
    add("--json", action="store_true", help="a line of JSON for each arm")
    args = parser.parse_args(arguments)
    try:
        found = lines(args)
    except HobbitError as e:
        print(f"modelled: {str(e).replace('--limits', '--share')}", file=sys.stderr)
        return 1
    if not args.json:
        print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
