# SPDX-License-Identifier: MIT
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from built import MECHANISMS

from pyhobbit.cli.main import main
from pyhobbit.engine.engine import Engine
from pyhobbit.model.file_names import calibration_path
from pyhobbit.model.options_file import write_options
from pyhobbit.quality.evaluate import Costs
from pyhobbit.quality.stored import Calibration
from pyhobbit.settings.config import CacheConfig, EngineConfig, SamplingConfig
from pyhobbit.settings.table import NAMED, OPTIONS


def _config(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, tuple[Any, str]]:
    """Value and source by name."""
    assert main(["config", *map(str, arguments), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["settings"]
    assert len({row["name"] for row in rows}) == len(rows)
    return {row["name"]: (row["value"], row["source"]) for row in rows}


def test_without_a_model_defaults_and_flags_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    rows = _config(capsys, "--memory", "2G", "--temp", "0", "--ctx", 100)
    assert rows["memory"] == (2 << 30, "flag")
    assert rows["temp"] == (0.0, "flag")
    assert rows["ctx"] == (100, "flag")
    assert rows["top_k"] == (SamplingConfig.top_k, "default")
    assert rows["policy"] == ("echo", "default")
    assert rows["threads"][1] == "computed"
    assert "weights" not in rows  # only the policy hobbit has weights


def test_what_is_computed_is_what_the_engine_has(tiny_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = _config(capsys, tiny_gguf, "--pools", "6M", "--set", "t2=0.9")
    with Engine(tiny_gguf, EngineConfig(cache=CacheConfig(pools=6 << 20, t2=0.9))) as engine:
        info = engine.info()
    assert rows["t1"] == (info.t1, "computed")
    assert rows["t2"] == (info.t2, "flag")
    assert rows["ctx"] == (info.n_ctx, "computed")
    assert rows["threads"] == (info.n_threads, "computed")


# Options that mechanisms bring.
OF_MECHANISMS = {
    "early": ("early", "early_from"),
    "replacement": ("degrade",),
    "second_pass": ("confidence",),
}
_LEFT_OUT = {name for each, names in OF_MECHANISMS.items() if each not in MECHANISMS for name in names}

# Values of every option that a model on the CPU takes; others need a GPU.
VALUES: dict[str, Any] = {
    "memory": 4 << 30,  # more than the tests' process takes
    "pools": 8 << 20,
    "quality": "fast",
    "rule": "random",
    "strict": True,
    "price": 0.5,
    "t1": 0.5,
    "t2": 0.75,
    "confidence": 0.3,
    "low_share": 0.3,
    "policy": "lru",
    "weights": (1.0, 0.0, 0.0, 0.0),
    "prefetch": 1,
    "predictor": "repeat",
    "prefetch_bar": 0.2,
    "io_threads": 2,
    "device": "CPU",
    "degrade": True,
    "placement": "cache",
}
VALUES = {name: value for name, value in VALUES.items() if name not in _LEFT_OUT}
FILES = ("sidecar", "trace", "timeline")
OF_GPUS = ("device_memory", "mode", "early", "early_from")
BESIDE: dict[str, dict[str, Any]] = {"confidence": {"rule": "rank"}}  # further options that it needs


def _flags(options: dict[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}" if name in NAMED else f"--set={name}"
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        yield f"{flag}={text.lower() if isinstance(value, bool) else text}"


def _assert_agree(rows: dict[str, tuple[Any, str]], model: Path, options: dict[str, Any]) -> None:
    """The opened engine has the values that `config` has shown, setting by setting."""
    with Engine(model, EngineConfig(cache=CacheConfig(**options))) as engine:
        settings = engine._opened().cache.settings()
    assert set(settings) == set(OPTIONS)
    for name, each in settings.items():
        if each.value is None or (name == "mode" and each.source == "default"):
            assert name not in rows or rows[name][1] in ("computed", each.source)
        else:
            value = list(each.value) if isinstance(each.value, tuple) else each.value
            source = "options" if rows[name][1] == "options" else each.source
            assert rows[name] == (value, source), name


def test_there_is_a_value_for_every_option() -> None:
    assert {*VALUES, *FILES, *OF_GPUS} - _LEFT_OUT == set(OPTIONS)


@pytest.mark.parametrize(
    ("name", "is_calibrated"),
    [
        (name, each) for name in VALUES for each in (False, True) if name != "price" or each
    ],  # a price needs costs
)
def test_config_shows_what_the_engine_takes(
    name: str, is_calibrated: bool, priced: Path, tiny_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For every option, beside nothing and beside a calibration, as a flag and in the file of options."""
    model, given = priced if is_calibrated else tiny_gguf, {name: VALUES[name], **BESIDE.get(name, {})}
    _assert_agree(_config(capsys, model, *_flags(given)), model, given)
    model = Path(shutil.copy(model, priced.with_name("own.gguf")))
    if is_calibrated:
        shutil.copy(calibration_path(priced), calibration_path(model))
    write_options(model, given)
    rows = _config(capsys, model)
    assert rows[name][1] == "options"
    _assert_agree(rows, model, given)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"t1": 0.5},
        {"t2": 0.5},
        *(({"rule": "rank"}, {"rule": "rank", "t1": 0.25}) if "second_pass" in MECHANISMS else ()),
        {"rule": "gate", "prefetch": 0},
        {"price": 0.0},
        {"policy": "hobbit"},
        {"policy": "hobbit", "weights": (0.5, 0.5, 0.0, 0.0)},
    ],
)
def test_what_overrules_a_calibration_is_shown_as_the_engine_has_it(
    given: dict[str, Any], calibrated: Path, priced: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for model in (calibrated, priced):
        _assert_agree(_config(capsys, model, *_flags(given)), model, given)


def test_a_rule_that_needs_costs_is_refused_without_its_own(
    calibrated: Path, priced: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _assert_agree(_config(capsys, priced, "--set", "rule=price"), priced, {"rule": "price"})
    for model, rule in ((calibrated, "price"), (priced, "edgemoe")):
        assert main(["config", str(model), "--set", f"rule={rule}"]) == 1
        assert f"the rule {rule} needs the costs that a calibration measures" in capsys.readouterr().err


def test_weights_bring_their_policy(calibrated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for model in ((), (calibrated,)):
        rows = _config(capsys, *model, "--set", "weights=1,0,0,0")
        assert rows["policy"] == ("hobbit", "computed")
        assert rows["weights"] == ([1.0, 0.0, 0.0, 0.0], "flag")


@pytest.fixture
def calibrated(tiny_gguf: Path, tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    shutil.copyfile(tiny_gguf, path)
    size, low_bytes = path.stat().st_size, 6 * 8 * 3 * 256 * 256 * 9 // 16
    Calibration(size, low_bytes, {"t1": 0.5, "t2": 0.8}, 0.25, (0.1, 0.2, 0.3, 0.4)).write(path)
    return path


@pytest.fixture
def priced(tiny_gguf: Path, tmp_path: Path) -> Path:
    """A model whose calibration has the rule price."""
    path = tmp_path / "p.gguf"
    shutil.copyfile(tiny_gguf, path)
    size, low_bytes = path.stat().st_size, 6 * 8 * 3 * 256 * 256 * 9 // 16
    costs = Costs((0.5,) * 48, (math.inf,) * 48)
    numbers = ({"price": 0.125}, 0.25)
    Calibration(size, low_bytes, *numbers, rule="price", costs=costs).write(path)
    return path


def test_a_calibration_stands_behind_flags(calibrated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = _config(capsys, calibrated)
    assert rows["t1"] == (0.5, "calibration")
    assert rows["t2"] == (0.8, "calibration")
    assert rows["low_share"] == (0.25, "calibration")
    assert rows["calibration"][0] == str(calibrated.with_name("m.calibration.gguf"))
    with Engine(calibrated, EngineConfig()) as engine:
        assert (engine.info().t1, engine.info().t2) == (0.5, 0.8)

    rows = _config(capsys, calibrated, "--set", "t1=0.6", "--policy", "hobbit", "--prefetch", 0)
    assert rows["t1"] == (0.6, "flag")
    assert rows["t2"] == (1.0, "default")  # one threshold given takes the other from the defaults
    assert rows["weights"] == ([0.1, 0.2, 0.3, 0.4], "calibration")
    assert rows["low_share"] == (None, "computed")  # the calibration's is fitted to its thresholds
    assert rows["prefetch"] == (0, "flag")
    with Engine(calibrated, EngineConfig(cache=CacheConfig(t1=0.6))) as engine:
        assert (engine.info().t1, engine.info().t2) == (0.6, 1.0)


def test_static_widths_bring_their_price(calibrated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size, low_bytes = calibrated.stat().st_size, 6 * 8 * 3 * 256 * 256 * 9 // 16
    costs = Costs((0.5,) * 48, (math.inf,) * 48)
    numbers = ({"price": 0.125}, 0.25)
    Calibration(size, low_bytes, *numbers, rule="edgemoe", costs=costs).write(calibrated)
    rows = _config(capsys, calibrated)
    assert (rows["rule"], rows["price"]) == (("edgemoe", "calibration"), (0.125, "calibration"))
    assert rows["t1"] == (1.0, "default")
    assert main(["inspect", str(calibrated), "--no-speed"]) == 0
    assert "rule edgemoe, price = 0.125" in capsys.readouterr().out


def test_the_table(tiny_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", str(tiny_gguf), "--pools", "6M"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^  pools +6.0 MiB +flag$", text, re.MULTILINE)
    assert re.search(r"^  prefetch +2 +default$", text, re.MULTILINE)
    assert re.search(r"^  ctx +512 +computed \(the model was trained for 512\)$", text, re.MULTILINE)


def test_errors_are_those_of_chat(tiny_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--set", "t1=2"]) == 2
    assert "between 0 and 1" in capsys.readouterr().err
    assert main(["config", str(tiny_gguf.with_name("tinyy.gguf"))]) == 1
    assert f"did you mean {tiny_gguf}?" in capsys.readouterr().err
    assert main(["config", str(tiny_gguf), "--memory", "1M"]) == 1
    assert "the smallest that works is" in capsys.readouterr().err
