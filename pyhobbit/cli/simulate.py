# SPDX-License-Identifier: MIT
"""Computes hit rates and miss penalties of cache policies, from a recorded route trace.

pyhobbit chat MODEL --trace FILE records one. The penalty counts a miss by its bits; to LRU: by LRU's penalty.
"""

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyhobbit.cli.help import Parser
from pyhobbit.cli.options import add_setting_arguments, cache_config
from pyhobbit.errors import ConfigError
from pyhobbit.settings.table import KEYS, OPTIONS, Key

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pyhobbit.routing.trace import Simulation, SimulationResult, Trace

_LRU = "lru"
_RULE = {*OPTIONS["rule"][0].replaced_by} - {*KEYS["quality"]}  # the rule and its numbers
_SETTINGS = (
    *(name for name in KEYS if _RULE & {*KEYS[name]}),
    "low_share",
    "weights",
    "prefetch_bar",
    "predictor",
)

# Columns of the table: the key of a run's document, and its format.
_COLUMNS = {
    "capacity": ("capacity", ".3f"),
    "hit rate": ("hit_rate", ".4f"),
    "  high": ("share_high", ".1%"),
    "   low": ("share_low", ".1%"),
    "skipped": ("share_skipped", ".1%"),
    "misses/token": ("misses_per_token", ".2f"),
    "penalty/token": ("penalty_per_token", ".2f"),
    "to LRU": ("relative_to_lru", ".3f"),
}
_JUDGED = {"recall": ("recall", ".1%"), "precision": ("precision_on_misses", ".1%")}
_DERIVED = ("hit_rate", "misses_per_token", "penalty_per_token", "recall", "precision_on_misses")

Run = dict[str, Any]
"""One policy at one capacity, as JSON has it."""


_KEYS = {
    "bits_high": Key("number", "bits per weight in high precision (default: 16, of f16)", default=16.0),
    "bits_low": Key("number", "bits per weight in low precision (default: 4.5, of q4_0)", default=4.5),
    "floors": Key("flag", "a layer keeps its even share of a pool, as when a model runs", default=False),
    "prior": Key(
        "path",
        "trace of an earlier run, whose decoding says which experts are used, and on which paths: pools, "
        "policies and predictors begin with it, and the policy static needs it",
    ),
    "split": Key("text", "count only these decode steps; earlier ones warm the cache", "FIRST:LAST"),
}
_JUDGES = (
    "also judge this predictor, one layer ahead. recall: share of the used experts that it names; "
    "precision: share of the missing experts that it names which are then used"
)


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("--trace", type=Path, required=True, metavar="FILE", help="routing recorded by chat --trace")
    what = "cache size as a share of all experts in high precision, 0 to 1"
    add("--capacity", type=float, nargs="+", action="extend", required=True, metavar="F", help=what)
    what = "eviction policies; belady is the limit that none can beat (default: all)"
    add("--policy", nargs="+", action="extend", metavar="NAME", help=what)
    add("--json", action="store_true", help="print JSON instead of a table")
    add_setting_arguments(parser, _SETTINGS, {**_KEYS, "predictor": Key("choice", _JUDGES, "NAME")})


def run(args: argparse.Namespace) -> int:
    from pyhobbit.routing.trace import read_trace  # takes the native libraries and some time

    trace = read_trace(args.trace)
    earlier = None if args.prior is None else _earlier(args.prior, trace)
    routes = trace.routes if args.split is None else trace.split(*_parse_split(args.split))
    base = _base(trace, args, earlier)
    policies = _policies(args, base)
    runs = [run for capacity in args.capacity for run in _run_policies(routes, base, capacity, policies)]
    if args.json:
        print(json.dumps(_document(trace, args.split, base, runs), indent=2))
    else:
        print(_table(runs, judged=base.predictor is not None))
    return 0


def _earlier(path: Path, of: "Trace") -> "Trace":
    from pyhobbit.routing.trace import read_trace

    trace = read_trace(path)
    if (trace.n_layers, trace.n_experts) != (of.n_layers, of.n_experts):
        raise ConfigError(
            f"prior: {path} is a trace of another model than {of.path}; record one of this model"
        )
    return trace


def _base(trace: "Trace", args: argparse.Namespace, earlier: "Trace | None") -> "Simulation":
    """Parameters that all runs share."""
    from pyhobbit.routing.trace import Simulation

    return Simulation(
        trace.n_layers,
        trace.n_experts,
        trace.n_used,
        floors=args.floors,
        bits_high=args.bits_high,
        bits_low=args.bits_low,
        expert_bytes=trace.expert_bytes,
        prior=() if earlier is None else earlier.prior(),
        paths=() if earlier is None else earlier.paths(),
        **vars(cache_config(args, without=("policy", "trace"))),
    )


def _policies(args: argparse.Namespace, base: "Simulation") -> list[str]:
    from pyhobbit.routing.trace import BELADY, policy_names

    known = [*policy_names(bool(base.prior)), BELADY]
    is_one_pool = base.with_slots(1.0).slots_low == 0
    return args.policy or (known if is_one_pool and not base.prior else known[:-1])


def _run_policies(
    routes: "NDArray[Any]", base: "Simulation", capacity: float, policies: Sequence[str]
) -> Iterator[Run]:
    from pyhobbit.routing.trace import simulate

    base = base.with_slots(capacity)
    results = {
        name: simulate(routes, replace(base, policy=name)) for name in dict.fromkeys([_LRU, *policies])
    }
    lru = results[_LRU].penalty
    for name in policies:
        relative = results[name].penalty / lru if lru else None
        slots = {"slots_high": base.slots_high, "slots_low": base.slots_low}
        own = {"policy": name, "capacity": capacity, **slots}
        yield {**own, "relative_to_lru": relative, **_figures(results[name], base)}


def _figures(result: "SimulationResult", base: "Simulation") -> dict[str, Any]:
    """Figures of a replay. bits_per_token: loaded bits of one weight in each expert."""
    bits = result.misses_high * base.bits_high + result.misses_low * base.bits_low
    return {
        **asdict(result),
        **{name: getattr(result, name) for name in _DERIVED},
        **dict(zip(("share_high", "share_low", "share_skipped"), result.shares, strict=True)),
        "bits_per_token": bits / result.n_tokens,
    }


def _parse_split(text: str) -> tuple[int, int]:
    steps = re.fullmatch(r"(\d+):(\d+)", text)
    if steps is None:
        raise ConfigError(f"split takes two decode steps like 0:64, not '{text}'")
    return int(steps[1]), int(steps[2])


def _table(runs: Sequence[Run], judged: bool) -> str:
    columns = _COLUMNS | (_JUDGED if judged else {})
    width = max(len("policy"), *(len(run["policy"]) for run in runs))
    lines = ["  ".join(["policy".ljust(width), *columns])]
    for run in runs:
        cells = [run["policy"].ljust(width)]
        for title, (key, how) in columns.items():
            cells.append(("-" if run[key] is None else format(run[key], how)).rjust(len(title)))
        lines.append("  ".join(cells))
    return "\n".join(lines)


def _document(trace: "Trace", split: str | None, base: "Simulation", runs: Sequence[Run]) -> dict[str, Any]:
    from pyhobbit.settings.resolve import resolve

    # the others belong to one run each, or are long
    sizes = ("n_layers", "n_experts", "n_used", "floors", "bits_high", "bits_low")
    given = replace(base, policy="hobbit").settings()  # the one with weights
    return {
        "trace": str(trace.path),
        "model": trace.model,
        "split": split,
        **{name: getattr(base, name) for name in sizes},
        **{each.name: each.value for each in resolve(None, given).values() if each.name in _SETTINGS},
        "predictor": base.predictor,
        "n_used_by_layer": trace.n_used_by_layer,
        "runs": list(runs),
    }
