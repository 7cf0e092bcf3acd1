# SPDX-License-Identifier: MIT
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from traces import COLUMNS, Row, letters, ranked, write_trace

from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.native.ffi import ffi
from pyhobbit.routing.trace import (
    BELADY,
    ROUTE,
    Simulation,
    SimulationResult,
    policy_names,
    read_trace,
    simulate,
)
from pyhobbit.settings.table import NUMBERS, OPTIONS

# A prompt of two tokens, of which the last layer computes one, then two decoded tokens; then another turn.
PROMPT: list[Row] = [
    (0, 0, 0, 0, 0, 3, 0.75),
    (0, 0, 0, 0, 1, 1, 0.25),
    (0, 0, 1, 0, 0, 2, 0.5),
    (0, 0, 1, 0, 1, 0, 0.5),
    (0, 0, 1, 1, 0, 3, 0.5),
    (0, 0, 1, 1, 1, 2, 0.5),
]
DECODED: list[Row] = [
    (turn, 1, step, layer, slot, 2 * layer + slot, 0.5)
    for turn, step in ((0, 2), (0, 3), (1, 0))
    for layer in range(2)
    for slot in range(2)
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "t.csv", PROMPT + DECODED, n_layers=2, n_experts=4, n_used=2)


def test_the_structs_are_those_of_the_header() -> None:
    native = ffi.typeof("struct hobbit_route")
    assert ROUTE.itemsize == ffi.sizeof(native)
    assert [(name, field.offset) for name, field in native.fields] == [
        (name, ROUTE.fields[name][1]) for name in ROUTE.names
    ]
    assert {field.name for field in fields(Simulation)} - {*OPTIONS} == {
        name
        for name, _ in ffi.typeof("struct hobbit_simulation").fields
        if name not in ("settings", "n_settings", "belady", "n_costs", "n_paths", "n_used_by_layer")
    }
    assert NUMBERS == ("price", "t1", "t2")
    assert [field.name for field in fields(SimulationResult)] == [
        name for name, _ in ffi.typeof("struct hobbit_simulation_result").fields
    ]


def test_a_trace_is_read_in_the_order_of_the_run(path: Path) -> None:
    trace = read_trace(path)
    assert trace.model == "a model.gguf"
    assert (trace.n_layers, trace.n_experts, trace.n_used, trace.n_decoded) == (2, 4, 2, 3)
    assert trace.routes.dtype == ROUTE
    assert trace.routes["token"].tolist() == [0, 0, 1, 1, 1, 1] + [2] * 4 + [3] * 4 + [4] * 4
    assert trace.routes["sequence"].tolist() == [0] * 14 + [1] * 4
    assert trace.routes["counted"].tolist() == [0] * 6 + [1] * 12
    assert trace.routes["layer"].tolist() == [0, 0, 0, 0, 1, 1] + [0, 0, 1, 1] * 3
    assert trace.routes["expert"].tolist() == [3, 1, 2, 0, 3, 2] + [0, 1, 2, 3] * 3
    assert trace.routes["weight"][:2].tolist() == [0.75, 0.25]


def test_layers_may_use_different_numbers_of_experts(tmp_path: Path) -> None:
    rows = [row for row in PROMPT + DECODED if (row[3], row[4]) != (1, 1)]
    path = write_trace(tmp_path / "t.csv", rows, 2, 4, 2)
    with pytest.raises(HobbitError, match="line 11: each token has 2 rows in a layer"):
        read_trace(path)
    text = path.read_text()
    path.write_text(text.replace("=1001 dense_bytes=0", "=1001 dense_bytes=0 n_expert_used=1"))
    trace = read_trace(path)
    assert (trace.n_used, trace.n_used_by_layer) == (2, (2, 1))
    result = simulate(trace.routes, Simulation(2, 4, 2, slots_high=8))
    assert result.n_selections == 3 * trace.n_decoded


def test_steps_may_start_again_after_the_prompt(tmp_path: Path) -> None:
    rows = [(turn, phase, step - 2 * phase, *rest) for turn, phase, step, *rest in PROMPT + DECODED[:8]]
    trace = read_trace(write_trace(tmp_path / "t.csv", rows, 2, 4, 2))
    assert trace.routes["token"].tolist() == [0, 0, 1, 1, 1, 1] + [2] * 4 + [3] * 4


@pytest.mark.parametrize("character", "\x85\u2028")
def test_a_name_with_a_line_end_that_only_python_knows_is_read(character: str, path: Path) -> None:
    path.write_text(path.read_text().replace("a model", f"a{character}model"), encoding="utf-8")
    assert read_trace(path).model == f"a{character}model.gguf"


def test_unknown_weights_are_read_as_nan(tmp_path: Path) -> None:
    rows = [(*row[:6], float("nan")) for row in letters("AB")]
    trace = read_trace(write_trace(tmp_path / "t.csv", rows, 1, 2, 1))
    assert np.isnan(trace.routes["weight"]).all()
    assert simulate(trace.routes, Simulation(1, 2, 1, 1)).misses_high == 2


def test_split_counts_a_range_of_decoded_tokens(path: Path) -> None:
    trace = read_trace(path)
    routes = trace.split(1, 2)
    assert routes["token"].tolist() == [0, 0, 1, 1, 1, 1] + [2] * 4 + [3] * 4
    assert routes["counted"].tolist() == [0] * 10 + [1] * 4
    assert trace.split(0, 3).tolist() == trace.routes.tolist()
    assert trace.split(2, 3)["counted"].sum() == 4
    assert trace.routes["counted"].sum() == 12  # unchanged
    n_hits = [
        simulate(trace.split(*part), Simulation(2, 4, 2, 4)).hits_high for part in ((0, 1), (1, 3), (0, 3))
    ]
    assert n_hits[0] + n_hits[1] == n_hits[2]


@pytest.mark.parametrize(("first", "last"), [(1, 1), (2, 1), (-1, 2), (0, 4)])
def test_a_split_outside_the_trace_is_refused(path: Path, first: int, last: int) -> None:
    with pytest.raises(ConfigError, match=f"range {first}:{last} .* decode steps 0:3"):
        read_trace(path).split(first, last)


def _change(line: int, old: str, new: str) -> Callable[[list[str]], str]:
    def change(lines: list[str]) -> str:
        assert old in lines[line - 1]
        lines[line - 1] = lines[line - 1].replace(old, new)
        return "\n".join(lines) + "\n"

    return change


def _keep(n_lines: int) -> Callable[[list[str]], str]:
    return lambda lines: "\n".join(lines[:n_lines]) + "\n"


# The rows begin in line 6; the sixth one, line 11, is the last one of the prompt.
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: "", "its first lines are not '# route_trace v1' and '# model=...'"),
        (lambda lines: "GGUF\0\1\2\n", "record one with --trace"),
        (_change(1, "v1", "v2"), "its first lines are not"),
        (_change(2, "n_expert=4", "n_expert=four"), "its first lines are not"),
        (_change(4, "layer=1", "layer=2"), "one '# layer=' line for each of 2 layers"),
        (_change(5, "turn,", ""), f"line 5 is not '{COLUMNS}'"),
        (_keep(4), "line 5 is not"),
        (_keep(11), "no decoded token (phase 1), so there is nothing to count"),
        (_keep(5), "no decoded token (phase 1), so there is nothing to count"),
        (lambda lines: "\n".join(lines), "ends in the middle of a line, so the recording was cut off"),
        (_keep(12), "ends within a token, so the recording was cut off"),
        (_change(9, ",0,1000", ""), "line 9 is not a row of 9 numbers: '0,0,1,0,1,0,0.5'"),
        (_change(9, "0.5", "x?"), "line 9 is not a row of 9 numbers"),
        (_change(9, "0.5", "half"), "line 9 is not a row of 9 numbers"),
        (_change(9, ",0,0.5", ",-1,0.5"), "line 9 is not a row of 9 numbers"),
        (_change(8, ",2,0.5", ",4,0.5"), "line 8: expert is 4; it must be below 4"),
        (_change(11, "0,0,1,1,1", "0,0,1,2,1"), "line 11: layer is 2; it must be below 2"),
        (_change(11, "0,0,1,1,1", "0,2,1,1,1"), "line 11: phase is 2; it must be below 2"),
        (_change(11, "0,0,1,1,1", "0,0,1,1,0"), "line 11: each token has 2 rows in a layer, slot 0 first"),
        (_change(11, "0,0,1,1,1", "0,0,2,1,1"), "line 11: each token has 2 rows in a layer, slot 0 first"),
    ],
)
def test_a_damaged_trace_is_refused_with_the_reason(
    path: Path, damage: Callable[[list[str]], str], message: str
) -> None:
    path.write_text(damage(path.read_text().splitlines()))
    with pytest.raises(HobbitError) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path} cannot be used as a trace: ")
    assert message in str(error.value)


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HobbitError, match=r"none\.csv cannot be read: No such file"):
        read_trace(tmp_path / "none.csv")


def test_simulation_by_hand(tmp_path: Path) -> None:
    routes = read_trace(write_trace(tmp_path / "t.csv", letters("abABC"), 1, 3, 1)).routes
    result = simulate(routes, Simulation(n_layers=1, n_experts=3, n_used=1, slots_high=2))
    assert result == SimulationResult(
        hits_high=2,
        misses_high=1,
        hits_low=0,
        misses_low=0,
        skipped=0,
        n_tokens=3,
        penalty=1.0,
    )
    assert result.n_selections == 3
    assert result.hit_rate == pytest.approx(2 / 3)
    assert result.misses_per_token == result.penalty_per_token == pytest.approx(1 / 3)
    assert result.shares == (1.0, 0.0, 0.0)


def test_two_pools_by_hand(tmp_path: Path) -> None:
    rows = ranked((0, 1, 2), (1, 0, 2))
    routes = read_trace(write_trace(tmp_path / "t.csv", rows, 1, 4, 3)).routes
    options = Simulation(1, 4, 3, slots_high=4, slots_low=4, t1=0.4, t2=0.7, bits_high=16, bits_low=4)
    result = simulate(routes, options)
    # the second token finds 0 in high precision and 1 only in low, where it is worth high
    assert result == SimulationResult(
        hits_high=1,
        misses_high=2,
        hits_low=0,
        misses_low=1,
        skipped=2,
        n_tokens=2,
        penalty=2.25,
    )
    assert result.hit_rate == 0.25
    assert result.shares == pytest.approx((3 / 6, 1 / 6, 2 / 6))


def test_policies_are_those_of_the_engine() -> None:
    names = policy_names()
    assert {"lru", "lfu", "lhu", "fld", "random", "hobbit"} <= set(names)
    assert BELADY not in names
    assert set(names) >= set(policy_names(has_prior=False))


def test_what_cannot_be_simulated_is_an_error(path: Path) -> None:
    routes = read_trace(path).routes
    options = Simulation(2, 4, 2, slots_high=2)
    with pytest.raises(HobbitError, match=r"hobbit.policy is 'best': choose one of .* lru "):
        simulate(routes, replace(options, policy="best"))
    with pytest.raises(HobbitError, match=r"hobbit.t1 .* must not be above hobbit.t2"):
        simulate(routes, replace(options, t1=0.9, t2=0.5))
    with pytest.raises(HobbitError, match="one pool of equal experts"):
        simulate(routes, replace(options, policy=BELADY, t1=0.5))
    with pytest.raises(HobbitError, match=r"route 4 .*: the model has 1 layers"):
        simulate(routes, replace(options, n_layers=1))
    with pytest.raises(HobbitError, match="goes backwards"):
        simulate(routes[::-1], options)
    with pytest.raises(HobbitError, match="no counted routes"):
        simulate(routes[:6], options)
    with pytest.raises(HobbitError, match="no counted routes"):
        simulate(np.zeros(4), options)


def _slots(n_experts: int, capacity: float, n_used: int = 1, **settings: float) -> tuple[int, int]:
    simulation = Simulation(1, n_experts, n_used, bits_high=16, bits_low=4, **settings)
    pools = simulation.with_slots(capacity)
    return pools.slots_high, pools.slots_low


def test_pools_are_divided_as_in_the_engine() -> None:
    assert _slots(100, 0.29) == (29, 0)
    assert _slots(100, 0.29, low_share=0.5) == (29, 0)  # nothing is low
    assert _slots(100, 0.3, low_share=0.5, t1=0.5) == (15, 60)
    assert _slots(100, 0.3, t1=0.0) == (24, 24)
    assert _slots(100, 1.0, low_share=0.5, t1=0.5) == (75, 100)  # no more low ones than experts
    assert _slots(100, 0.0, n_used=2, low_share=0.5, t1=0.5) == (2, 2)  # the smallest that work
    assert _slots(100, 0.3, rule="price", price=0.1) == (24, 24)
    for capacity in (-0.1, 1.5, float("nan")):
        with pytest.raises(HobbitError, match="make it 0 to 1"):
            _slots(100, capacity)
    with pytest.raises(HobbitError, match=r"hobbit\.t1 is 2"):
        _slots(100, 0.3, t1=2.0)
