# SPDX-License-Identifier: MIT
import functools
import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models import ROOT
from traces import letters, ranked, write_recorded, write_trace

from pyhobbit import CacheConfig, Engine, EngineConfig, SamplingConfig
from pyhobbit.cli.main import main
from pyhobbit.routing.trace import BELADY, Simulation, Trace, policy_names, read_trace, simulate


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "t.csv", letters("abABACBA"), n_layers=1, n_experts=4, n_used=1)


def _error(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    status = main(["simulate", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert out == ""
    return status, err


def _json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["simulate", "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_table_has_a_row_for_each_capacity_and_policy(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["simulate", "--trace", str(path), "--capacity", "0.5", "1", "--policy", "belady", "lru"]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    # counted are A B A C B A, with two slots that hold a and b: lru misses C, B and A, belady only C
    assert [line.split() for line in lines] == [
        [
            "policy",
            "capacity",
            "hit",
            "rate",
            "high",
            "low",
            "skipped",
            "misses/token",
            "penalty/token",
            "to",
            "LRU",
        ],
        ["belady", "0.500", "0.8333", "100.0%", "0.0%", "0.0%", "0.17", "0.17", "0.333"],
        ["lru", "0.500", "0.5000", "100.0%", "0.0%", "0.0%", "0.50", "0.50", "1.000"],
        ["belady", "1.000", "0.8333", "100.0%", "0.0%", "0.0%", "0.17", "0.17", "1.000"],
        ["lru", "1.000", "0.8333", "100.0%", "0.0%", "0.0%", "0.17", "0.17", "1.000"],
    ]
    assert len({len(line) for line in lines}) == 1


def test_json_has_what_was_counted(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = _json(
        capsys, "--trace", path, "--capacity", 0.5, "--policy", "lfu", "--set", "weights=0.1,0.2,0.3,0.4"
    )
    assert document["trace"] == str(path)
    assert document["model"] == "a model.gguf"
    assert (document["n_layers"], document["n_experts"], document["n_used"]) == (1, 4, 1)
    assert document["weights"] == [0.1, 0.2, 0.3, 0.4]
    (run,) = document["runs"]
    # a and b have one use each; A B A make it 3 and 2, C takes B's place, B (3 uses) that of C
    assert run == {
        "policy": "lfu",
        "capacity": 0.5,
        "slots_high": 2,
        "slots_low": 0,
        "hits_high": 4,
        "misses_high": 2,
        "hits_low": 0,
        "misses_low": 0,
        "skipped": 0,
        "n_tokens": 6,
        "penalty": 2.0,
        "hit_rate": pytest.approx(4 / 6),
        "share_high": 1.0,
        "share_low": 0.0,
        "share_skipped": 0.0,
        "misses_per_token": pytest.approx(2 / 6),
        "penalty_per_token": pytest.approx(2 / 6),
        "bits_per_token": pytest.approx(2 * 16 / 6),
        "relative_to_lru": pytest.approx(2 / 3),
        "predictable": 0,
        "predicted_right": 0,
        "predicted_missing": 0,
        "predicted_missing_right": 0,
        "recall": None,
        "precision_on_misses": None,
    }


def test_a_predictor_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        (0, 1, step, layer, 0, expert, 1.0)
        for step, experts in enumerate(((0, 0), (0, 0), (0, 1), (0, 0)))
        for layer, expert in enumerate(experts)
    ]
    path = write_trace(tmp_path / "t.csv", rows, n_layers=2, n_experts=4, n_used=1)
    judged = ("--trace", path, "--policy", "lru", "--set", "predictor=repeat", "--capacity")
    # layer 1 chooses 0 0 1 0 and is predicted - 0 0 1; one slot has layer 0's expert then, so all are missing
    (run,) = _json(capsys, *judged, 0.125)["runs"]
    assert (run["predictable"], run["predicted_right"], run["recall"]) == (4, 1, 0.25)
    assert (run["predicted_missing"], run["predicted_missing_right"]) == (3, 1)
    assert run["precision_on_misses"] == pytest.approx(1 / 3)
    # with a slot for each expert nothing that was used before is missing
    (run,) = _json(capsys, *judged, 1)["runs"]
    assert (run["recall"], run["precision_on_misses"]) == (0.25, None)

    assert main(["simulate", *map(str, judged), "0.125", "1"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[-2:] == ["recall", "precision"]
    assert [line.split()[-2:] for line in lines] == [["25.0%", "33.3%"], ["25.0%", "-"]]

    _, error = _error(capsys, "--trace", path, "--capacity", 1, "--set", "predictor=router")
    assert re.search(r"choose one of .*repeat", error)


def test_two_pools_share_the_capacity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "t.csv", ranked((0, 1, 2), (1, 0, 2)), n_layers=1, n_experts=8, n_used=3)
    mixed = ("--trace", path, "--policy", "lru", "--set", "t1=0.4", "--set", "t2=0.7", "--set", "bits_low=4")
    (run,) = _json(capsys, *mixed, "--capacity", 0.75, "--set", "low_share=0.25")["runs"]
    assert (run["slots_high"], run["slots_low"]) == (4, 6)  # 6 high ones: 4.5, and 1.5 at a quarter each
    assert (run["hits_high"], run["misses_high"], run["misses_low"], run["skipped"]) == (1, 2, 1, 2)
    assert run["penalty_per_token"] == 2.25 / 2
    assert (run["share_high"], run["share_low"]) == (pytest.approx(3 / 6), pytest.approx(1 / 6))

    # without a share: 0.6 slots of a quarter in the low pool for each one in the high pool
    document = _json(capsys, *mixed, "--capacity", 0.5)
    assert document["low_share"] is None
    # but 3 at least, of which a token may use all
    assert (document["runs"][0]["slots_high"], document["runs"][0]["slots_low"]) == (3, 3)


def test_without_names_every_policy_runs(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = _json(capsys, "--trace", path, "--capacity", 0.5)["runs"]
    assert [run["policy"] for run in runs] == [*policy_names(has_prior=False), BELADY]
    assert all(run["penalty"] >= runs[-1]["penalty"] for run in runs)
    # the bound is for one pool
    two = write_trace(tmp_path / "two.csv", ranked((0, 1, 2)), n_layers=1, n_experts=8, n_used=3)
    runs = _json(capsys, "--trace", two, "--capacity", 0.5, "--set", "t1=0.4")["runs"]
    assert [run["policy"] for run in runs] == policy_names(has_prior=False)


def test_split_counts_what_lies_in_its_range(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run,) = _json(capsys, "--trace", path, "--capacity", 0.5, "--policy", "lru", "--set", "split=2:5")[
        "runs"
    ]
    assert (run["n_tokens"], run["hits_high"], run["misses_high"]) == (3, 1, 2)


def test_without_misses_there_is_nothing_to_compare(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--trace", path, "--capacity", 0.5, "--policy", "lru", "--set", "split=0:3")
    (run,) = _json(capsys, *arguments)["runs"]
    assert run["penalty"] == 0
    assert run["relative_to_lru"] is None
    assert main(["simulate", *map(str, arguments)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[-1] == "-"


def test_floors_are_those_of_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # three layers in turn, four slots: lru never hits
    rows = [
        (0, 1, step, layer, slot, slot, 0.5) for step in range(9) for layer in range(3) for slot in range(2)
    ]
    path = write_trace(tmp_path / "t.csv", rows, n_layers=3, n_experts=4, n_used=2)
    arguments = ("--trace", path, "--capacity", 0.34, "--policy", "lru")
    assert _json(capsys, *arguments)["runs"][0]["hit_rate"] == 0
    assert _json(capsys, *arguments, "--set", "floors=true")["runs"][0]["hit_rate"] > 0


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (("--policy", "best"), 1, "--policy is 'best': choose one of "),
        (("--policy", "belady", "--set", "t1=0.5"), 1, "belady is the bound for one pool"),
        (("--set", "t1=0.9", "--set", "t2=0.5"), 2, "t1 (0.9) must not be above t2 (0.5)"),
        (("--set", "t1=1.5"), 2, "t1 is 1.5; it must lie between 0 and 1"),
        (("--set", "low_share=2"), 2, "low_share is 2.0; it must lie between 0 and 1"),
        (("--set", "weights=0.5,0.5,0.5,0"), 2, "sum to 1"),
        (("--set", "weights=1,0,0"), 2, "give 4: w_lru, w_lfu, w_lhu, w_fld"),
        (("--set", "weights=1.5,-0.5,0,0"), 2, "weights is 1.5; it must lie between 0 and 1"),
        (("--set", "weights=a,b"), 2, "--set weights needs a value F,..., as in weights=F,..., not 'a,b'"),
        (("--capacity", "1.5"), 1, "the capacity is 1.5: make it 0 to 1"),
        (("--capacity", "nan"), 1, "the capacity is nan: make it 0 to 1"),
        (("--set", "bits_low=0"), 1, "make 0 < low <= high"),
        (("--set", "bits_high=2"), 1, "make 0 < low <= high"),
        (("--set", "bits_high=0"), 1, "make 0 < low <= high"),
        (("--policy", "belady", "--set", "t1=0.4"), 1, "belady is the bound for one pool"),
        (("--set", "split=4"), 2, "split takes two decode steps like 0:64, not '4'"),
        (("--set", "split=a:b"), 2, "split takes two decode steps like 0:64, not 'a:b'"),
        (("--set", "split=3:9"), 2, "decode steps 0:6"),
        (("--trace", "nowhere.csv"), 1, "the trace nowhere.csv cannot be read: No such file"),
    ],
)
def test_wrong_options_are_explained(
    path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    status: int,
    message: str,
) -> None:
    got, err = _error(capsys, "--trace", path, "--capacity", 0.5, *options)
    assert got == status
    assert err.startswith("pyhobbit: error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("policy", "t1", "t2"), [("lru", 1.0, 1.0), ("random", 0.7, 1.0), ("hobbit", 0.4, 0.8)]
)
def test_a_replay_counts_what_the_engine_counted(
    tiny_gguf: Path, tmp_path: Path, policy: str, t1: float, t2: float
) -> None:
    trace_file = tmp_path / "t.csv"
    cache = CacheConfig(pools=4 << 20, t1=t1, t2=t2, policy=policy, prefetch=0, trace=trace_file)
    with Engine(tiny_gguf, EngineConfig(cache=cache)) as engine:
        pieces = engine.generate("def read_file(path):", max_tokens=16, sampling=SamplingConfig(temp=0))
        next(pieces)
        prompt = engine.stats().cache
        assert sum(1 for _ in pieces) == 15
        total, info = engine.stats().cache, engine.info()

    trace = read_trace(trace_file)
    assert trace.n_decoded == 15
    model = (info.n_layers, info.n_experts, info.n_experts_used)
    assert (trace.n_layers, trace.n_experts, trace.n_used) == model
    slots = info.pool_slots_high, info.pool_slots_low
    replay = Simulation(*model, *slots, policy=policy, floors=True, t1=t1, t2=t2)
    result = simulate(trace.routes, replay)
    for name in ("hits_high", "misses_high", "hits_low", "misses_low"):
        assert getattr(result, name) == getattr(total, name) - getattr(prompt, name), name
    assert result.skipped == total.selections_skipped - prompt.selections_skipped
    assert result.misses_high > 0
    assert result.hits_high > 0


TABLE = (ROOT / "docs/policies.md").read_text("utf-8").split("## Results")[1].split("With two pools")[0]
# Decode hit rates of other simulators: Belady, LRU, LFU.
REFERENCE = [
    ("qwen3-30b-a3b", 0.10, (0.756, 0.500, 0.510)),
    ("qwen3-30b-a3b", 0.20, (0.900, 0.741, 0.726)),
    ("qwen3-30b-a3b", 0.40, (0.971, 0.939, 0.936)),
    ("gpt-oss-120b", 0.05, (0.679, 0.441, 0.323)),
    ("gpt-oss-120b", 0.10, (0.809, 0.588, 0.484)),
    ("gpt-oss-120b", 0.20, (0.891, 0.740, 0.689)),
]


@functools.cache
def _recorded(name: str) -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        return read_trace(write_recorded(name, Path(folder)))


def _simulation(trace: Trace, capacity: float, **settings: Any) -> Simulation:
    return Simulation(trace.n_layers, trace.n_experts, trace.n_used, **settings).with_slots(capacity)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "capacity", "expected"), REFERENCE)
def test_recorded_traces_give_the_reference_hit_rates_and_nothing_beats_the_bound(
    name: str, capacity: float, expected: tuple[float, float, float]
) -> None:
    trace = _recorded(name)
    base = _simulation(trace, capacity)
    rates = {
        policy: simulate(trace.routes, replace(base, policy=policy)).hit_rate
        for policy in [*policy_names(has_prior=False), BELADY]
    }
    assert [rates[BELADY], rates["lru"], rates["lfu"]] == pytest.approx(expected, abs=0.005)
    assert rates[BELADY] == max(rates.values())


@pytest.mark.parametrize("policy", ["lru", "lfu", "hobbit", "echo"])
def test_loads_per_token_are_those_of_the_page(policy: str) -> None:
    """The first table of docs/policies.md, to 1 %."""
    (row,) = re.findall(rf"^\| `{policy}`.*?\| (.*) \|$", TABLE, re.MULTILINE)
    told = [float(cell.split()[0]) for cell in row.split(" | ")]
    assert len(told) == len(REFERENCE)
    for (name, capacity, _), loads in zip(REFERENCE, told, strict=True):
        trace = _recorded(name)
        result = simulate(trace.routes, _simulation(trace, capacity, policy=policy, floors=True))
        assert result.misses_high / trace.n_decoded == pytest.approx(loads, rel=0.01)
