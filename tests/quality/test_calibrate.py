# SPDX-License-Identifier: MIT
"""Calibration: the stored file, and the verb on the tiny model."""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from conftest import RunPyhobbit
from gguf import GGUFReader
from models import write_dense_llama

from pyhobbit import CacheConfig, Engine, EngineConfig
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.model.file_names import calibration_path
from pyhobbit.model.gguf_file import read_gguf
from pyhobbit.quality import calibration
from pyhobbit.quality.evaluate import Costs, Evaluator, Quality
from pyhobbit.quality.stored import Calibration, Measurements
from pyhobbit.settings.config import CalibrationConfig, format_duration

TESTS = Path(__file__).resolve().parents[1]
TEXT = TESTS / "tiny_moe/heldout.txt"
STORED = Calibration(
    model_bytes=123,
    low_bytes=45,
    numbers={"t1": 0.6, "t2": 0.9, "price": 0.125},
    low_share=0.25,
    weights=(0.5, 0.25, 0.125, 0.125),
    rule="price",
    costs=Costs((0.5, 2.0), (4.0, math.inf)),
    expert_uses=(3, 0, 1, 4),
    paths=(0, 1, 0, 0, 1, 257),
)

#
# the file
#


def test_the_file_keeps_settings_under_their_keys(tmp_path: Path) -> None:
    path = STORED.write(tmp_path / "m.gguf")
    assert path == tmp_path / "m.calibration.gguf"
    fields = GGUFReader(path).fields
    values = {key: field.contents() for key, field in fields.items() if key.startswith("hobbit.")}
    assert values == {
        "hobbit.model_bytes": 123,
        "hobbit.low_bytes": 45,
        "hobbit.t1": 0.6,
        "hobbit.t2": 0.9,
        "hobbit.low_share": 0.25,
        "hobbit.price": 0.125,
        "hobbit.rule": "price",
        "hobbit.w_lru": 0.5,
        "hobbit.w_lfu": 0.25,
        "hobbit.w_lhu": 0.125,
        "hobbit.w_fld": 0.125,
        "hobbit.expert_uses": [3, 0, 1, 4],
        "hobbit.paths": [0, 1, 0, 0, 1, 257],
        "hobbit.low_costs": [0.5, 2.0],
        "hobbit.skip_costs": [4.0, math.inf],
        "hobbit.costs_rule": "price",
    }
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_split_model_has_one_calibration() -> None:
    assert calibration_path(Path("d/m-00001-of-00003.gguf")) == Path("d/m.calibration.gguf")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        HobbitError, match=r"m.calibration.gguf: No such file or directory; it must lie beside"
    ):
        STORED.write(tmp_path / "none" / "m.gguf")


#
# the verb
#

FIRST = models.folder() / "first.txt"  # four parts, too few to check on
FIRST.write_text(TEXT.read_text(encoding="utf-8")[:320], encoding="utf-8")
QUICK = ("--text", FIRST, "--ctx", 32, "--chunks", 4, "--threads", 1)


QUICK_ENGINE = EngineConfig(n_ctx=32, n_threads=1)


@pytest.fixture(scope="module")
def calibrated(
    tmp_path_factory: pytest.TempPathFactory, run_pyhobbit: RunPyhobbit
) -> tuple[Path, dict[str, Any]]:
    """A copy of the tiny model, calibrated, and what was printed as JSON."""
    model = tmp_path_factory.mktemp("calibrated") / "m.gguf"
    shutil.copyfile(models.tiny_tiers("f16", "tq2_0"), model)
    done = run_pyhobbit("calibrate", model, *QUICK, "--max-kl", 0.02, "--json")
    assert done.returncode == 0, done.stderr
    return model, json.loads(done.stdout)


def test_the_bound_is_kept_and_bytes_are_saved(calibrated: tuple[Path, dict[str, Any]]) -> None:
    _, found = calibrated
    quality = found["quality"]
    assert 0 < quality["mean_kl"] <= 0.02
    assert quality["bytes_per_token"] < 0.9 * found["high_bytes_per_token"]
    assert quality["share_low"] > 0
    assert found["calibration"]["rule"] == "price"
    assert found["n_tokens"] == 4 * 32
    assert found["check"] is None


def test_the_engine_uses_the_calibration_unless_told_otherwise(
    calibrated: tuple[Path, dict[str, Any]],
) -> None:
    model, found = calibrated
    with Engine(model, EngineConfig(cache=CacheConfig(pools=5_000_000))) as engine:
        info = engine.info()
        assert (info.t1, info.t2, info.price) == (1, 1, found["quality"]["price"])
        engine.set(price=0)
        assert engine.info().price == 0
        with pytest.raises(HobbitError, match="runs by price: restart with --set rule=gate to use t1"):
            engine.set(t1=0.5, t2=0.9)
    with Engine(model, EngineConfig(cache=CacheConfig(pools=5_000_000, rule="gate"))) as engine:
        info = engine.info()
        assert (info.t1, info.t2, info.price) == (1, 1, 0)  # it was not fitted
        with pytest.raises(HobbitError, match="runs by t1 and t2: restart with --set rule=price"):
            engine.set(price=0.5)
    with Engine(model, EngineConfig(cache=CacheConfig(pools=5_000_000, t1=1.0, t2=1.0))) as engine:
        info = engine.info()
        assert (info.t1, info.t2, info.price) == (1, 1, 0)


def test_a_quality_is_what_the_calibration_found(
    calibrated: tuple[Path, dict[str, Any]], run_pyhobbit: RunPyhobbit
) -> None:
    model, found = calibrated
    price, fast = found["quality"]["price"], found["calibration"]["found"]["fast.price"]
    assert 0 < price < fast
    with Engine(model, EngineConfig(cache=CacheConfig(pools=5_000_000, quality="fast"))) as engine:
        assert (engine.info().price, engine.live()["quality"]) == (fast, "fast")
        engine.set(quality="small-loss")
        assert engine.info().price == price
        engine.set(quality="lossless")
        assert (engine.info().price, engine.info().t1) == (0, 1)
        with pytest.raises(ConfigError, match=r"hobbit\.quality chooses the rule and its numbers"):
            engine.set(quality="fast", price=0.5)
        engine.set(price=0.5)
        assert engine.live()["quality"] is None
    shown = run_pyhobbit("inspect", model, "--no-speed", "--pools", "5M").stdout
    assert f"small-loss: calibrated: price {price:.3g}; fast: calibrated: price {fast:.3g}" in shown
    done = run_pyhobbit("chat", model, "-p", "a", "-n", 1, "--quality", "fast", "--pools", "5M")
    assert f"pyhobbit: quality fast: calibrated: price {fast:.3g}\n" in done.stderr
    done = run_pyhobbit("chat", model, "-p", "a", "-n", 1, "--quality", "fast", "--set", "t1=0.5")
    assert done.returncode == 2
    assert "--quality chooses the rule and its numbers, and t1 is given beside it: leave one" in done.stderr


def test_what_was_used_most_is_read_before_anything_is_computed(
    calibrated: tuple[Path, dict[str, Any]],
) -> None:
    model, _ = calibrated
    uses = GGUFReader(calibration_path(model)).fields["hobbit.expert_uses"].contents()
    assert len({sum(uses[i : i + 8]) for i in range(0, 6 * 8, 8)}) == 1  # each layer has seen the whole text

    cache = CacheConfig(pools=5_000_000, prefetch=0, t1=1.0, t2=1.0)
    with Engine(model, EngineConfig(cache=cache)) as engine:
        info = engine.info()
        slot = info.pool_bytes_high / info.pool_slots_high
        wanted = slot * min(np.count_nonzero(uses), info.pool_slots_high)
        deadline, stats = time.monotonic() + 300, engine.stats().cache
        while not 0.9 * wanted <= stats.bytes_prefetched == stats.bytes_read and time.monotonic() < deadline:
            time.sleep(0.01)
            stats = engine.stats().cache
    assert 0.9 * wanted <= stats.bytes_prefetched == stats.bytes_read <= 1.1 * wanted
    assert stats.layers_computed == 0


def test_calibrating_again_finds_the_same(
    calibrated: tuple[Path, dict[str, Any]], run_pyhobbit: RunPyhobbit
) -> None:
    """The first calibration's values do not lead the second."""
    model, found = calibrated
    stored = calibration_path(model).read_bytes()
    done = run_pyhobbit("calibrate", model, *QUICK, "--max-kl", 0.02)
    assert done.returncode == 0, done.stderr
    assert calibration_path(model).read_bytes() == stored
    assert f"total variation {found['quality']['total_variation']:.2g}" in done.stdout
    assert "(not checked on other text, which takes 8 parts), about " in done.stdout
    assert "stored in" in done.stdout
    stored_keys = set(GGUFReader(calibration_path(model)).fields)
    assert not stored_keys & {"hobbit.confidence", "hobbit.price.check.mean_kl"}


def test_a_bound_holds_on_text_that_the_fit_has_not_seen(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.symlink_to(models.tiny_tiers("f16", "tq2_0"))
    for rule in ("gate", "price"):
        config = CalibrationConfig(QUICK_ENGINE, max_chunks=16, rule=rule)
        report = calibration.calibrate(model, TEXT, config)
        fields = GGUFReader(report.calibration.write(model)).fields
        stored = {key.removeprefix("hobbit."): field.contents() for key, field in fields.items()}
        assert stored["confidence"] == 0.95
        assert stored["max_kl"] == 0.01
        assert report.n_chunks // 2 == 8
        fit, check = report.quality, report.check
        assert check is not None
        assert fit.numbers == check.numbers
        assert 0 < check.mean_kl < check.kl_at_most
        assert check.mean_kl != fit.mean_kl
        for of in (fit, check):
            assert of.kl_at_most <= 0.01
        assert stored[f"{rule}.fit.mean_kl"] == fit.mean_kl
        assert stored[f"{rule}.check.kl_at_most"] == check.kl_at_most
        with Engine(model, EngineConfig(cache=CacheConfig(pools=5_000_000, rule=rule))) as engine:
            pools = engine.info()
        share = pools.pool_bytes_low / (pools.pool_bytes_low + pools.pool_bytes_high)
        assert share == pytest.approx(stored[f"{rule}.low_share"], abs=0.05)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (Costs((0.5,) * 5, (4.0,) * 5), "there are 5 costs of low precision and 5 of skipping"),
        (Costs((math.nan,) * 6, (4.0,) * 6), "a cost of low precision or of skipping is negative or NaN"),
    ],
)
def test_stored_costs_that_cannot_be_are_refused(
    calibrated: tuple[Path, dict[str, Any]], tmp_path: Path, costs: Costs, message: str
) -> None:
    with (
        pytest.raises(HobbitError, match=f"{message}.*; calibrate it again"),
        Engine(_stored(calibrated, tmp_path, costs), EngineConfig(cache=CacheConfig(pools=5_000_000))),
    ):
        pass


def test_a_price_needs_stored_costs(calibrated: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    model = _stored(calibrated, tmp_path, None)
    with Engine(model, EngineConfig(cache=CacheConfig(pools=5_000_000, quality="lossless"))) as engine:
        assert engine.info().price == 0
    for price in (None, 0.5):
        with (
            pytest.raises(HobbitError, match="the rule price needs the costs that a calibration measures"),
            Engine(model, EngineConfig(cache=CacheConfig(pools=5_000_000, price=price))),
        ):
            pass


def _stored(calibrated: tuple[Path, dict[str, Any]], folder: Path, costs: Costs | None) -> Path:
    """The calibrated model with a calibration of these costs."""
    model = folder / "m.gguf"
    model.symlink_to(calibrated[0])
    sizes = {name: calibrated[1]["calibration"][name] for name in ("model_bytes", "low_bytes")}
    replace(STORED, **sizes, costs=costs, expert_uses=()).write(model)
    return model


@pytest.mark.slow
def test_a_stopped_calibration_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.symlink_to(models.tiny_tiers("f16", "tq2_0"))
    config = CalibrationConfig(QUICK_ENGINE, max_kl=0.05, max_chunks=4, rule="price")
    measure, n_measured = Evaluator.measure, 0

    def counted(self: Evaluator, *args: Any, **kwargs: Any) -> Quality:
        nonlocal n_measured
        if n_measured == n_until:
            raise KeyboardInterrupt
        n_measured += 1
        return measure(self, *args, **kwargs)

    monkeypatch.setattr(Evaluator, "measure", counted)
    n_until = -1
    whole = calibration.calibrate(model, TEXT, config)
    n_whole = n_measured
    partial = Measurements.path_of(model)
    assert partial.exists()  # the disk may be full
    whole.calibration.write(model)
    assert not partial.exists()

    n_measured, n_until = 0, 5
    with pytest.raises(KeyboardInterrupt):
        calibration.calibrate(model, TEXT, config)
    assert partial.exists()
    n_measured, n_until = 0, -1
    assert calibration.calibrate(model, TEXT, config) == whole
    assert n_measured == n_whole - 5


def test_measurements_of_something_else_or_damaged_ones_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "m.partial.json"
    good = Quality({}, *range(11))
    assert Measurements(path, {"text": "a"}).measured("x", lambda: good) == good
    assert len(Measurements(path, {"text": "a"})) == 1
    assert Measurements(path, {"text": "a"}).measured("x", pytest.fail) == good
    assert len(Measurements(path, {"text": "b"})) == 0
    for damaged in ("", "{", "[]", '{"key": {"version": 1, "text": "a"}, "found": {"x": {"t1": 1}}}', "\xff"):
        path.write_text(damaged, encoding="latin-1")
        assert len(Measurements(path, {"text": "a"})) == 0
    with pytest.raises(HobbitError, match=r"none/m\.json cannot be written: No such file"):
        Measurements(tmp_path / "none/m.json", {}).measured("x", lambda: good)


def test_measurements_of_another_model_of_the_same_size_are_dropped(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    shutil.copyfile(models.tiny_tiers("f16", "q4_0"), model)

    def stored() -> Measurements:
        with Evaluator(model, QUICK_ENGINE) as evaluator:
            return calibration._measurements(evaluator, model, "a text", [], None)

    stored().measured("x", lambda: Quality({}, *range(11)))
    assert len(stored()) == 1
    low = next(tensor for tensor in read_gguf(model).tensors if ".low." in tensor.name)
    with model.open("r+b") as file:
        file.seek(low.offset)
        file.write(bytes(low.nbytes))
    assert len(stored()) == 0


def test_the_time_of_a_chunk_leaves_out_the_first_and_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for ends, wanted in (((9, 10, 11, 12), [1]), ((9, 12, 15, 30), [3]), ((9, 18, 20, 22), [9])):
        clock, said = iter(ends), []
        monkeypatch.setattr(calibration.time, "perf_counter", lambda clock=clock: next(clock))
        say = calibration.say_once(said.append, 4)
        for _ in ends:
            say(512)
        assert said == wanted


@pytest.mark.parametrize(
    ("seconds", "text"), [(12, "12 s"), (89.4, "89 s"), (600, "10 min"), (9000, "2.5 h")]
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_one_rule_alone_can_be_fitted(run_pyhobbit: RunPyhobbit, tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.symlink_to(models.tiny_tiers("f16", "tq2_0"))
    for rule in ("gate", "price", "edgemoe"):
        done = run_pyhobbit("calibrate", model, *QUICK, "--max-kl", 0.02, "--set", f"rule={rule}", "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout, parse_constant=pytest.fail)  # Infinity is not JSON
        assert found["calibration"]["rule"] == rule
    quality, costs = found["quality"], found["calibration"]["costs"]
    assert len(costs["low"]) == 6 * 8
    assert costs["skip"] == [None] * 6 * 8
    assert 0 < quality["mean_kl"] <= 0.02
    assert quality["share_skipped"] == 0 < quality["share_low"] < 1
    with Engine(model, EngineConfig(cache=CacheConfig(pools=5_000_000))) as engine:
        assert engine.info().price == found["calibration"]["price"] > 0


def test_a_stale_calibration_is_replaced(
    calibrated: tuple[Path, dict[str, Any]], run_pyhobbit: RunPyhobbit, tmp_path: Path
) -> None:
    model = tmp_path / "m.gguf"
    model.symlink_to(calibrated[0])
    stale = STORED.write(model).read_bytes()
    done = run_pyhobbit("chat", model, "-p", "x", "-n", 1)
    assert "made for another version" in done.stderr
    assert done.returncode == 1
    rule = calibrated[1]["calibration"]["rule"]
    done = run_pyhobbit("calibrate", model, *QUICK, "--max-kl", 0.02, "--set", f"rule={rule}")
    assert done.returncode == 0, done.stderr
    assert calibration_path(model).read_bytes() != stale
    short = r"In short: (\d+)% of the bytes per token, (\d+)% of the next tokens change, "
    short += r"total variation (\S+) \("
    first, *places = done.stdout.splitlines()
    (bytes_, changed, variation) = re.search(short, first).groups()  # type: ignore[union-attr]
    assert [each.split()[0] for each in places] == ["stored"]
    quality = calibrated[1]["quality"]
    assert int(changed) == round(100 * (1 - quality["same_top1"]))
    assert variation == f"{quality['total_variation']:.2g}"
    assert int(bytes_) == round(100 * quality["bytes_per_token"] / calibrated[1]["high_bytes_per_token"])


def test_without_a_low_tier_the_cache_alone_is_fitted(run_pyhobbit: RunPyhobbit, tmp_path: Path) -> None:
    model = tmp_path / "plain.gguf"
    model.symlink_to(models.tiny_experts("f16"))
    text = tmp_path / "latin-1.txt"
    text.write_bytes(b"caf\xe9\n" + TEXT.read_bytes())
    done = run_pyhobbit("calibrate", model, *QUICK, "--text", text, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["quality"]["t1"], found["quality"]["t2"], found["quality"]["mean_kl"]) == (1, 1, 0)
    assert found["calibration"]["low_share"] == 0


def test_a_split_model_can_be_calibrated_and_opened(run_pyhobbit: RunPyhobbit, tmp_path: Path) -> None:
    first = models.split(models.tiny)
    for part in first.parent.glob(first.name.replace("00001-of", "*-of")):
        (tmp_path / part.name).symlink_to(part)
    model = tmp_path / first.name
    done = run_pyhobbit("calibrate", model, *QUICK)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("In short: the file has no low tier, which pyhobbit convert --sidecar")
    with Engine(model, EngineConfig(cache=CacheConfig(pools=5_000_000))) as engine:
        assert engine.info().cached
    assert calibration_path(model).exists()


def test_a_folder_that_nothing_can_be_stored_in_is_refused_before_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(HobbitError, match=f"{tmp_path} is read-only; calibrate a copy"):
        calibration.calibrate(tmp_path / "none.gguf", TEXT, CalibrationConfig())


def _error(run_pyhobbit: RunPyhobbit, model: Path, *arguments: object) -> str:
    done = run_pyhobbit("calibrate", model, *arguments)
    assert done.returncode in (1, 2), done.stderr
    assert done.stdout == ""
    assert not calibration_path(model).exists()
    errors = [line for line in done.stderr.splitlines() if line.startswith("pyhobbit: error: ")]
    assert len(errors) == 1, done.stderr
    return errors[0]


def test_errors_say_what_to_do(run_pyhobbit: RunPyhobbit, tmp_path: Path) -> None:
    plain, dense, short = tmp_path / "plain.gguf", tmp_path / "dense.gguf", tmp_path / "short.txt"
    plain.symlink_to(models.tiny_experts("f16"))
    write_dense_llama(dense)
    short.write_text("import os\n" * 20)
    message = _error(run_pyhobbit, plain, "--text", short)
    assert "is too short: it has " in message
    assert "calibration needs 2048; give a longer text" in message
    assert "has no low tier" in _error(run_pyhobbit, plain, *QUICK, "--max-kl", 0.1)
    assert "is a dense model" in _error(run_pyhobbit, dense, *QUICK)
    assert "none.txt" in _error(run_pyhobbit, plain, "--text", tmp_path / "none.txt")
    assert "--ctx is 2; it must be at least 3" in _error(run_pyhobbit, plain, *QUICK, "--ctx", 2)
    assert "--chunks is 1; it must be at least 4" in _error(run_pyhobbit, plain, *QUICK, "--chunks", 1)
