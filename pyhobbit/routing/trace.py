# SPDX-License-Identifier: MIT
"""Route traces: which experts a run chose, token by token, and their replay through the cache's policies.

The file's format is described in ggml_ext/src/record/trace.h; `chat --trace FILE` records one.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from pyhobbit._tables import CacheSettings, SimulationCounts
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.native.ffi import check, ffi, lib
from pyhobbit.native.files import os_errors
from pyhobbit.routing.paths import chosen_of, path_table
from pyhobbit.settings.config import Setting, given_settings
from pyhobbit.settings.resolve import c_settings
from pyhobbit.settings.table import OPTIONS

_TYPES = {"int32_t": "i4", "float": "f4"}  # numpy's, by those of C
ROUTE = np.dtype([(name, _TYPES[of.type.cname]) for name, of in ffi.typeof("struct hobbit_route").fields])
"""One selection, as struct hobbit_route of hobbit.h: ordered by batch, in it by layer, token and rank."""

BELADY = "belady"
"""The policy name of the offline bound, which no policy can beat: for one pool, t1 = 1."""

NEED_PRIOR = ("static",)
"""Policies that decide by the prior of a simulation alone."""

_MAGIC = "# route_trace v1"
_COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert", "weight", "residency", "expert_bytes")
_MODEL = re.compile(r"# model=(.*) arch=\S* n_layer=(\d+) n_expert=(\d+) n_expert_used=(\d+)")
_LAYER = re.compile(r"# layer=(\d+) expert_bytes=([1-9]\d{0,9})\b(?:.* n_expert_used=(\d+))?")
_ROW = re.compile(r"(\d{1,9},){6}[-+]?(\d+(\.\d*)?(e[-+]?\d+)?|nan|inf),\d,\d{1,18}")


@dataclass(frozen=True, eq=False)
class Trace:
    """A recorded run. routes: array of ROUTE; those of decoded tokens are counted, those of prefill warm the
    cache. n_used_by_layer: experts of a token; n_used: the most of them.  n_decoded: tokens.
    expert_bytes: of one expert, by layer.
    """

    path: Path
    model: str
    n_layers: int
    n_experts: int
    n_used: int
    n_used_by_layer: tuple[int, ...]
    expert_bytes: tuple[int, ...]
    routes: NDArray[Any]
    n_decoded: int

    def prior(self) -> tuple[float, ...]:
        """Uses per decoded token of each expert, layer by layer: Simulation.prior of another trace."""
        counted = self.routes[self.routes["counted"] != 0]
        return use_rates(counted, self.n_layers, self.n_experts, self.n_decoded)

    def paths(self) -> tuple[int, ...]:
        """Paths of the decoded tokens: Simulation.paths of another trace."""
        return path_table(chosen_of(self.routes[self.routes["counted"] != 0]), self.n_experts)

    def split(self, first: int, last: int) -> NDArray[Any]:
        """The routes before the decoded token `last`; those from `first` on count. Raises ConfigError."""
        if not 0 <= first < last <= self.n_decoded:
            raise ConfigError(
                f"the range {first}:{last} does not fit; {self.path} has the decode steps 0:{self.n_decoded}"
            )
        token = self.routes["token"]
        is_decoded = np.zeros(token.max() + 1, dtype=bool)
        is_decoded[token] = self.routes["counted"] != 0
        decoded = np.flatnonzero(is_decoded)
        routes = self.routes[token < (decoded[last] if last < decoded.size else is_decoded.size)]
        routes["counted"] &= routes["token"] >= decoded[first]
        return routes


@dataclass(frozen=True)
class Simulation(CacheSettings):
    """Parameters of a replay, as struct hobbit_simulation of hobbit-simulation.h, with the engine's settings.

    policy: a name of policy_names(), or BELADY.  weights: of the policy hobbit; others ignore them.
    predictor: judged one layer ahead, without loading what it predicts.
    n_used: experts of a token, in the layer with the most; how many others use follows from their routes.
    slots_high, slots_low: experts that the pools hold.  floors: a layer keeps its even share of a pool, as in
    the engine.  low_costs, skip_costs: of the rule price, as Cache.set_costs takes them.
    bits_high, bits_low: per weight.  expert_bytes: by layer, for the sizes of slots; (): all alike.
    prior: uses per token in earlier runs, layer by layer, with which pools and policy begin; (): none.
    paths: with which a predictor begins, by paths.path_table().
    """

    n_layers: int
    n_experts: int
    n_used: int
    slots_high: int = 0
    slots_low: int = 0
    floors: bool = False
    low_costs: tuple[float, ...] = ()
    skip_costs: tuple[float, ...] = ()
    bits_high: float = 16.0
    bits_low: float = 4.5
    expert_bytes: tuple[int, ...] = ()
    prior: tuple[float, ...] = ()
    paths: tuple[int, ...] = ()

    def settings(self) -> dict[str, Setting]:
        """Settings that are given, by key."""
        policy = None if self.policy == BELADY else self.policy
        weights = self.weights if self.policy in (None, "hobbit") else None
        return given_settings(replace(self, policy=policy, weights=weights))

    def with_slots(self, capacity: float) -> "Simulation":
        """Gets pools that hold `capacity`, a share of the bytes of all experts in high precision.

        The engine divides them, so both hold at least the experts that a token uses in a layer. There is no
        low pool where the rule gives high precision alone. Raises HobbitError as simulate().
        """
        options, _kept = _c_simulation(self)
        high, low = ffi.new("uint32_t *"), ffi.new("uint32_t *")
        check(lib.hobbit_simulated_pools, options, capacity, high, low)
        return replace(self, slots_high=high[0], slots_low=low[0])


@dataclass(frozen=True)
class SimulationResult(SimulationCounts):
    """Selections of counted tokens by what became of them."""

    @property
    def n_selections(self) -> int:
        return self.hits_high + self.misses_high + self.hits_low + self.misses_low + self.skipped

    @property
    def hit_rate(self) -> float:
        """Share of what was not skipped, 0 to 1; 1 where everything was."""
        needed = self.n_selections - self.skipped
        return (self.hits_high + self.hits_low) / needed if needed else 1.0

    @property
    def recall(self) -> float | None:
        """Share of the chosen experts that were predicted, 0 to 1; None without a predictor."""
        return self.predicted_right / self.predictable if self.predictable else None

    @property
    def precision_on_misses(self) -> float | None:
        """Share of the predicted missing experts that were then chosen, 0 to 1; None if there were none."""
        return self.predicted_missing_right / self.predicted_missing if self.predicted_missing else None

    @property
    def misses_per_token(self) -> float:
        return (self.misses_high + self.misses_low) / self.n_tokens

    @property
    def penalty_per_token(self) -> float:
        return self.penalty / self.n_tokens

    @property
    def shares(self) -> tuple[float, float, float]:
        """Shares of the selections served in high precision, served in low, and skipped; they sum to 1."""
        high, low = self.hits_high + self.misses_high, self.hits_low + self.misses_low
        return high / self.n_selections, low / self.n_selections, self.skipped / self.n_selections


def use_rates(routes: NDArray[Any], n_layers: int, n_experts: int, n_tokens: int) -> tuple[float, ...]:
    """Uses per token of each expert, layer by layer, of the routes (ROUTE) of so many tokens."""
    uses = np.bincount(routes["layer"] * n_experts + routes["expert"], minlength=n_layers * n_experts)
    return tuple((uses / n_tokens).tolist())


def policy_names(has_prior: bool = True) -> list[str]:
    """The engine's eviction policies; without a prior those of NEED_PRIOR are left out."""
    known = OPTIONS["policy"][0].choices
    return [name for name in known if has_prior or name not in NEED_PRIOR]


def simulate(routes: NDArray[Any], simulation: Simulation) -> SimulationResult:
    """Replays an array of ROUTE, of which at least one is counted. Raises HobbitError for what cannot be."""
    if routes.dtype != ROUTE or not np.any(routes["counted"]):
        raise HobbitError("there are no counted routes to simulate")
    options, _kept = _c_simulation(simulation, _n_used_by_layer(routes, simulation))
    result = ffi.new("struct hobbit_simulation_result *")
    buffer = ffi.from_buffer("struct hobbit_route[]", np.ascontiguousarray(routes))
    check(lib.hobbit_simulate, buffer, routes.size, options, result)
    return SimulationResult(**{name: getattr(result, name) for name in SimulationResult.__dataclass_fields__})


def _c_simulation(simulation: Simulation, n_used_by_layer: Sequence[int] = ()) -> tuple[Any, dict[str, Any]]:
    """A struct hobbit_simulation, and the arrays that it points to: the caller keeps them."""
    own = {name: value for name, value in vars(simulation).items() if name not in OPTIONS}
    types = {"paths": "int32_t[]", "n_used_by_layer": "uint32_t[]", "expert_bytes": "uint64_t[]"}
    arrays = {
        name: ffi.new(types.get(name, "float[]"), value) if value else ffi.NULL
        for name, value in {**own, "n_used_by_layer": n_used_by_layer}.items()
        if isinstance(value, Sequence)
    }
    arrays["settings"] = c_settings(simulation.settings())
    given = {**own, **arrays, "n_settings": len(arrays["settings"]), "belady": simulation.policy == BELADY}
    given |= {"n_costs": len(simulation.low_costs), "n_paths": len(simulation.paths)}
    return ffi.new("struct hobbit_simulation *", given), arrays


def _n_used_by_layer(routes: NDArray[Any], simulation: Simulation) -> list[int]:
    """Routes of a token in each layer; n_used in a layer that does not run."""
    place = np.stack([routes[name] for name in ("sequence", "token", "layer")])
    begins = np.r_[True, np.any(place[:, 1:] != place[:, :-1], axis=0)]
    layers = np.clip(place[2], 0, simulation.n_layers)  # the engine refuses others
    n_tokens = np.bincount(layers[begins], minlength=simulation.n_layers)[: simulation.n_layers]
    n_routes = np.bincount(layers, minlength=simulation.n_layers)[: simulation.n_layers]
    n_used = n_routes // np.maximum(n_tokens, 1)
    return np.where((n_used < 1) | (n_used > simulation.n_used), simulation.n_used, n_used).tolist()


# --- reading


def read_trace(path: Path) -> Trace:
    """Reads a trace, its rows by batch, layer and token. Raises HobbitError for another or damaged file."""
    with os_errors(f"the trace {path} cannot be read"):
        text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.removesuffix("\n").split("\n")  # a model's name may have other line ends
    n_header = sum(1 for _ in takewhile(lambda line: line.startswith("#"), lines))
    header = lines[:n_header]
    model = next(filter(None, map(_MODEL.fullmatch, header)), None)
    if header[:1] != [_MAGIC] or model is None:
        _fail(path, f"its first lines are not '{_MAGIC}' and '# model=...'; record one with --trace")
    if lines[n_header : n_header + 1] != [",".join(_COLUMNS)]:
        _fail(path, f"line {n_header + 1} is not '{','.join(_COLUMNS)}'")
    if not text.endswith("\n"):
        _fail(path, "it ends in the middle of a line, so the recording was cut off; record it again")

    n_layers, n_experts, n_used = map(int, model.groups()[1:])
    if min(n_layers, n_experts, n_used) < 1:
        _fail(path, "its model has no layers or no experts")
    layers = _layers(path, header, n_layers)
    n_used_by_layer = tuple(int(match[3] or n_used) for match in layers)
    rows = _read_rows(path, lines, n_header + 1)
    limits = {"phase": 2, "layer": n_layers, "expert": n_experts}
    _check_rows(path, rows, n_header + 2, limits, np.array(n_used_by_layer))
    routes = _routes(rows)
    n_decoded = np.unique(routes["token"][routes["counted"] != 0]).size
    if n_decoded == 0:
        _fail(
            path, "it holds no decoded token (phase 1), so there is nothing to count; record a longer answer"
        )
    return Trace(
        path=path,
        model=model[1],
        n_layers=n_layers,
        n_experts=n_experts,
        n_used=n_used,
        n_used_by_layer=n_used_by_layer,
        expert_bytes=tuple(int(match[2]) for match in layers),
        routes=routes,
        n_decoded=n_decoded,
    )


def _fail(path: Path, why: str) -> NoReturn:
    raise HobbitError(f"{path} cannot be used as a trace: {why}")


def _layers(path: Path, header: list[str], n_layers: int) -> list[re.Match[str]]:
    found = {int(match[1]): match for match in map(_LAYER.match, header) if match}
    if sorted(found) != list(range(n_layers)):
        _fail(path, f"its header must have one '# layer=' line for each of {n_layers} layers")
    return [found[layer] for layer in range(n_layers)]


def _read_rows(path: Path, lines: list[str], first: int) -> NDArray[Any]:
    for number, line in enumerate(lines[first:], start=first + 1):
        if not _ROW.fullmatch(line):
            _fail(path, f"line {number} is not a row of {len(_COLUMNS)} numbers: '{line[:80]}'")
    dtype = [(name, "f4" if name == "weight" else "i8") for name in _COLUMNS]
    if not lines[first:]:
        return np.empty(0, dtype)
    return np.loadtxt(lines[first:], delimiter=",", dtype=dtype, ndmin=1)


def _check_rows(
    path: Path, rows: NDArray[Any], first_line: int, limits: dict[str, int], n_used: NDArray[Any]
) -> None:
    for name, limit in limits.items():
        wrong = np.flatnonzero(rows[name] >= limit)
        if wrong.size:
            value = rows[name][wrong[0]]
            _fail(path, f"line {first_line + wrong[0]}: {name} is {value}; it must be below {limit}")
    # the rows of a token and layer lie together, by rank
    place, slot = np.stack([rows[name] for name in ("turn", "phase", "step", "layer")]), rows["slot"]
    goes_on = slot + 1 < n_used[rows["layer"]]
    expected = np.r_[0, np.where(goes_on, slot + 1, 0)][:-1]
    leaves = np.r_[False, goes_on[:-1] & np.any(place[:, 1:] != place[:, :-1], axis=0)][: rows.size]
    wrong = np.flatnonzero((slot != expected) | leaves)
    if wrong.size:
        n = n_used[rows["layer"][wrong[0]]]
        _fail(path, f"line {first_line + wrong[0]}: each token has {n} rows in a layer, slot 0 first")
    if goes_on[-1:].any():
        _fail(path, "it ends within a token, so the recording was cut off; record it again")


def _routes(rows: NDArray[Any]) -> NDArray[Any]:
    """Tokens get numbers from 0 in the order of their first rows."""
    key = (rows["turn"] * 2 + rows["phase"]) << 32 | rows["step"]
    _, start, inverse = np.unique(key, return_index=True, return_inverse=True)
    rank = np.empty(start.size, dtype=np.int32)
    rank[np.argsort(start)] = np.arange(start.size)

    routes = np.empty(rows.size, dtype=ROUTE)
    routes["sequence"] = rows["turn"]
    routes["token"] = rank[inverse]
    routes["counted"] = rows["phase"]
    for name in ("layer", "expert", "weight"):
        routes[name] = rows[name]
    return routes
