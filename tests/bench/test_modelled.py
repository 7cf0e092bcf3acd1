# SPDX-License-Identifier: MIT
"""bench.compare on a modelled machine: what it says of a tiny model on machines that are made up."""

import json
import re
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from numpy.typing import NDArray

from bench import compare
from bench.harness import devices, trace
from bench.harness.arms import MODELLED
from bench.harness.trace import MoeShape, seeded_routing
from pyhobbit.errors import ConfigError

PRICES = sorted((devices.SOURCES / "prices").glob("*.json"))


@pytest.mark.parametrize("path", PRICES, ids=lambda path: path.stem)
def test_each_machine_has_all_prices(path: Path) -> None:
    prices, own = devices.read_prices(path.stem), json.loads(path.read_text())
    fields = re.findall(r"  PRICE\((\w+), [\d.]+, ", (devices.SOURCES / "virtual-clock.h").read_text())
    assert set(prices) == {"name", "memory", "events", "one_memory", *fields}
    assert all(value >= 0 for value in (prices[name] for name in fields))
    usual = devices.read_prices("4090-ddr5")
    assert prices == devices.read_prices(str(path)) == usual | own
    assert path.stem == "4090-ddr5" or all(own[name] != usual[name] for name in own)


def test_a_price_that_is_unknown_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"warp_us": 1, "sync_us": 1, "lock": 2}))
    with pytest.raises(ConfigError, match=r"mine\.json has unknown prices: lock, warp_us"):
        devices.read_prices(str(path))
    for text in ("[]", "{"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"no price file .* one of 3060-ddr4, 3090-pcie3, .*, h100"):
            devices.read_prices(str(path))
    with pytest.raises(ConfigError, match="no price file"):
        devices.read_prices("4090")


def test_a_build_without_tests_is_told_which_one_to_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "LIBRARY", tmp_path / "libmodelled-time.so")
    assert compare.main(["--prices", "4090-ddr5", "--shape", "tiny"]) == 1
    told = f"pyhobbit: error: there is no {devices.LIBRARY}; run 'make build' in {models.ROOT}\n"
    assert capsys.readouterr().err == told


def _lru_hits(chosen: NDArray[np.int32], capacity: int, warm_up: int) -> float:
    n_hits = n_uses = 0
    for layer in range(chosen.shape[1]):
        kept: OrderedDict[int, None] = OrderedDict()
        for token, experts in enumerate(chosen[:, layer].tolist()):
            for expert in experts:
                n_hits += token >= warm_up and expert in kept
                n_uses += token >= warm_up
                kept[expert] = None
                kept.move_to_end(expert)
            while len(kept) > capacity:
                kept.popitem(last=False)
    return n_hits / n_uses


def test_the_seeded_routing_is_like_the_recorded_one() -> None:
    """docs/results/method.md: 0.380 of the experts return at once, and LRU hits 0.654, 0.827 and 0.939."""
    chosen = seeded_routing(MoeShape(4, 128, 6), 129)
    again = [
        len({*a} & {*b}) / 6
        for a, b in zip(chosen[1:].reshape(-1, 6), chosen[:-1].reshape(-1, 6), strict=True)
    ]
    assert np.mean(again) == pytest.approx(0.380, abs=0.06)
    for share, hits in ((0.15, 0.654), (0.25, 0.827), (0.4, 0.939)):
        assert _lru_hits(chosen, int(share * 128), 32) == pytest.approx(hits, abs=0.04)
    assert all(len(set(row)) == 6 for row in chosen.reshape(-1, 6))


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--layers", "0"), "--layers is 0; it must be positive"),
        (("--limits", "0.01"), "--limits 0.01 leaves "),
        (("--tokens", "0"), "--tokens takes a positive number"),
    ],
)
def test_what_cannot_be_modelled_is_told(
    folder: Path, option: tuple[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--prices", "h100", "--shape", "tiny", "--type", "q8_0", "--folder", str(folder), *option]
    words += ["--output", str(folder / "out")]
    assert compare.main([*words, "--arms", "ours-gpu"]) == 2
    assert capsys.readouterr().err.startswith(f"pyhobbit: error: {said}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For models, which take no place, and price files."""
    return tmp_path_factory.mktemp("modelled")


def _run(
    folder: Path, arms: tuple[str, ...], share: float = 0.5, low: tuple[str, ...] = (), **changed: float | str
) -> dict[str, dict[str, Any]]:
    """[arm], on a 4090 with these prices."""
    path = folder / f"{'-'.join(changed)}.json"
    path.write_text(json.dumps(changed))
    out = folder / f"out{len(list(folder.glob('out*')))}"
    words = [
        "-m",
        "bench.compare",
        "--prices",
        str(path),
        "--shape",
        "tiny",
        "--layers",
        "6",
        "--type",
        "q8_0",
        *low,
    ]
    words += ["--limits", str(share), "--tokens", "24", "--warm-up", "24", "--folder", str(folder)]
    words += ["--stock", str(models.stock_dir()), "--output", str(out), "--arms", *arms]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=900, cwd=models.ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    head, *lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert head["source"] == "modelled"
    assert done.stdout.rstrip("\n") == (out / "table.md").read_text().rstrip("\n")
    assert all(
        f"| modelled | {'all' if line['limit'] is None else f'{share:.0%}'} " in done.stdout for line in lines
    )
    return {line["arm"]: line | {"by_cpu": _by_cpu(line["counters"])} for line in lines}


def _by_cpu(counters: dict[str, int]) -> float | None:
    """The CPU's share of the selections."""
    return counters["selections_cpu"] / counters["selections_high"] if counters else None


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, dict[str, Any]]:
    """All arms."""
    return _run(folder, MODELLED)


def test_there_is_a_line_for_each_arm(plain: dict[str, dict[str, Any]], folder: Path) -> None:
    assert sorted(plain) == sorted(MODELLED)
    for arm, line in plain.items():
        assert line["token_ms"] == pytest.approx(1e3 / line["tokens_per_second"])
        assert 0 < line["layer_beside_us"] < 1000 * line["token_ms"] / 6
        assert ("hit_rate" not in line) == arm.startswith("stock")
    assert plain["demand"]["hit_rate"] < plain["ours-gpu"]["hit_rate"]
    assert plain["ours-gpu"]["by_cpu"] == 0 < plain["ours-cooperative"]["by_cpu"]
    counters = plain["ours-gpu"]["counters"]
    assert counters["predicted_right"] > 0.7 * counters["predicted"] > 0
    files = list(folder.glob("tiny-6x-*.gguf"))
    assert len(files) == 1
    assert files[0].stat().st_blocks * 512 < files[0].stat().st_size / 4


def _placed(n_slots: int) -> tuple[NDArray[np.bool_], float]:
    """The experts [layer, expert] that a profile places, and their share of the measured uses."""
    chosen = seeded_routing(MoeShape(6, 32, 4), 49, devices.PROFILED)
    others = np.delete(chosen, slice(25, 49), axis=0)
    uses = np.stack([np.bincount(layer.ravel(), minlength=32) for layer in others.swapaxes(0, 1)])
    best = np.argsort(-uses.ravel(), kind="stable")[:n_slots]
    placed = np.isin(np.arange(uses.size), best).reshape(uses.shape)
    return placed, placed[np.arange(6)[:, None], chosen[25:49]].mean()


@pytest.mark.parametrize("slow", ["link", "cpu"])
def test_twiddlers_placement_is_that_of_the_profile_and_stays(
    slow: str, plain: dict[str, dict[str, Any]], folder: Path
) -> None:
    """Over a slow link the CPU computes what is missing. Beside a slow CPU that passes through few slots."""
    changed = {f"{slow}{busy}_gbs": 1.0 for busy in ("", "_busy")}
    line = _run(folder, ("ours-twiddler",), **changed)["ours-twiddler"]
    placed, hits = _placed(line["info"]["pool_slots_high"])
    assert placed.sum() == line["info"]["pool_slots_high"] < placed.size
    assert line["counters"]["predicted"] == 0
    if slow == "link":
        assert line["by_cpu"] == pytest.approx(1 - hits)
        assert line["counters"]["evictions"] == 0 < plain["ours-auto"]["counters"]["evictions"]
        assert line["hit_rate"] == pytest.approx(hits)
    else:
        assert line["by_cpu"] < 0.05
        assert line["counters"]["evictions"] > 0
        assert line["hit_rate"] == pytest.approx(hits, abs=0.03)


def test_two_tiers_move_their_own_bytes_by_the_papers_mix(folder: Path) -> None:
    line = _run(folder, ("hobbit-gpu-0",), low=("--low", "q4_0"))["hobbit-gpu-0"]
    found, weights = line["counters"], 3 * 512 * 512
    sizes = {"high": weights * 34 // 32, "low": weights * 18 // 32}
    assert found["bytes_transferred"] == sum(found[f"misses_{tier}"] * size for tier, size in sizes.items())
    assert min(found["misses_low"], found["hits_low"], found["selections_skipped"]) > 0
    weighted = trace.weights_of(np.zeros((1000, 4, 2), np.int32), 0.6)
    before = np.cumsum(weighted, axis=2) - weighted  # HOBBIT's scores
    assert np.mean(before <= 0.6) == pytest.approx(0.67, abs=0.02)
    assert np.mean(before > 0.9) == pytest.approx(0.03, abs=0.01)


def test_a_prompt_brings_what_it_lacks_and_one_precision_moves_no_other(folder: Path) -> None:
    """The longer one takes nearly all experts of five layers, of which half are there."""
    line = _run(folder, ("hobbit-gpu-0-high",), low=("--low", "q4_0", "--prompts", "1", "128"))
    line = line["hobbit-gpu-0-high"]
    found, expert = line["counters"], 3 * 512 * 512 * 34 // 32
    assert found["bytes_transferred"] == found["misses_high"] * expert > 0
    assert found["misses_low"] == found["selections_skipped"] == 0
    brought = line["ttft_bytes"]["128"] / expert
    assert 0.3 * 6 * 32 < brought < 0.5 * 6 * 32
    assert 0 < line["ttft_bytes"]["1"] <= 24.5 * expert  # a token takes four of each layer
    assert line["ttft_s"]["128"] > line["ttft_bytes"]["128"] / 24.5e9


def test_one_memory_is_read_into_and_nothing_is_moved_and_a_mapped_file_faults(folder: Path) -> None:
    one: dict[str, float | str] = {"one_memory": 1, "disk_gbs": 1.0, "fault_gbs": 0.25, "cache_gb": 0.02}
    slow = _run(folder, ("stock", "hobbit-gpu-0-high", "hobbit-gpu-0"), low=("--low", "q4_0"), **one)
    weights = 3 * 512 * 512
    sizes = {"high": weights * 34 // 32, "low": weights * 18 // 32}
    for arm in ("hobbit-gpu-0-high", "hobbit-gpu-0"):
        found = slow[arm]["counters"]
        missed = {tier: found[f"misses_{tier}"] for tier in sizes}
        least = sum(missed[tier] * size for tier, size in sizes.items())
        assert 0 < least <= found["bytes_read"] <= least + 3 * 4096 * sum(missed.values())
        assert found["bytes_transferred"] == 0
        assert slow[arm]["token_ms"] * 24 > found["bytes_read"] / 1e6
        assert slow[arm]["info"]["host_slots_high"] == 0
    assert slow["hobbit-gpu-0"]["token_ms"] < slow["hobbit-gpu-0-high"]["token_ms"]
    fast = _run(folder, ("stock", "hobbit-gpu-0-high"), **{**one, "disk_gbs": 2.0, "cache_gb": 24.0})
    assert fast["hobbit-gpu-0-high"]["token_ms"] < 0.75 * slow["hobbit-gpu-0-high"]["token_ms"]
    assert fast["stock"]["token_ms"] < 0.2 * slow["stock"]["token_ms"]


def test_half_of_the_experts_move_half_of_the_bytes_and_an_unsure_token_runs_twice(folder: Path) -> None:
    arms = ("demand", "demand-half", "demand-rank")
    found = {arm: line["counters"] for arm, line in _run(folder, arms).items()}
    moved = [found[arm]["bytes_transferred"] for arm in arms]
    assert moved[1] / moved[0] == 0.5
    assert moved[2] > 1.3 * moved[0]
    assert [found[arm]["tokens_repeated"] for arm in arms] == [0, 0, 24]


def test_predictions_are_as_often_right_where_the_running_layer_is_ranked_too(folder: Path) -> None:
    found = _run(folder, ("ours-daop",), share=0.25)["ours-daop"]["counters"]
    assert found["predicted_right"] > 0.7 * found["predicted"] > 0
    assert min(found["selections_early"], found["selections_replaced"]) > 0


def test_it_repeats_itself_to_the_nanosecond(plain: dict[str, dict[str, Any]], folder: Path) -> None:
    arms = ("stock", "ours-gpu", "ours-cooperative")
    again = _run(folder, arms)
    assert [again[arm]["token_ms"] for arm in arms] == [plain[arm]["token_ms"] for arm in arms]


def test_dearer_hardware_is_slower_and_where_it_is_used(
    plain: dict[str, dict[str, Any]], folder: Path
) -> None:
    link = _run(folder, ("stock", "demand", "ours-auto"), link_gbs=2.0, link_busy_gbs=2.0)
    assert link["stock"]["token_ms"] == pytest.approx(plain["stock"]["token_ms"], rel=0.03)
    assert link["demand"]["token_ms"] > 1.2 * plain["demand"]["token_ms"]
    assert link["ours-auto"]["by_cpu"] >= plain["ours-auto"]["by_cpu"]
    assert link["ours-auto"]["idle_us"]["link"] < 0.7 * 1000 * link["ours-auto"]["token_ms"] / 6  # by uploads
    cpu = _run(folder, ("stock", "ours-gpu"), cpu_gbs=2.0, cpu_busy_gbs=2.0)
    assert cpu["ours-gpu"]["token_ms"] == pytest.approx(plain["ours-gpu"]["token_ms"], rel=0.03)
    assert cpu["stock"]["token_ms"] > 1.2 * plain["stock"]["token_ms"]
    wait = _run(folder, ("ours-gpu",), sync_us=112.0)
    more = wait["ours-gpu"]["token_ms"] - plain["ours-gpu"]["token_ms"]
    assert more > 6 * 0.1  # a wait for each layer's routing


def test_with_everything_on_the_device_only_reads_and_launches_remain(folder: Path) -> None:
    line = _run(folder, ("ours-gpu",), share=1.0)["ours-gpu"]
    assert line["hit_rate"] > 0.99
    assert line["idle_us"]["link"] > 0
    assert line["per_layer"]["launches"] >= line["per_layer"]["replays"] > 0.9
