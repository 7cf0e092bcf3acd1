# SPDX-License-Identifier: MIT
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from pyhobbit.cli.main import main
from pyhobbit.engine.engine import Engine
from pyhobbit.quality.evaluate import Costs
from pyhobbit.quality.stored import Calibration
from pyhobbit.settings.config import CacheConfig, EngineConfig, SamplingConfig
from pyhobbit.settings.table import OPTIONS


def _config(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, tuple[Any, str]]:
    """Value and source by name."""
    assert main(["config", *map(str, arguments), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["settings"]
    assert len({row["name"] for row in rows}) == len(rows)
    return {row["name"]: (row["value"], row["source"]) for row in rows}


def test_every_option_of_the_cache_is_shown_as_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    given = {
        "memory": "1G",
        "t1": 0.5,
        "low_share": 0.1,
        "policy": "hobbit",
        "weights": "1,0,0,0",
        "predictor": "repeat",
        "mode": "gpu",
    }
    given |= {
        "t2": 0.75,
        "prefetch": 1,
        "io_threads": 2,
        "sidecar": "s.gguf",
        "trace": "t.csv",
        "device": "GPU0",
    }
    given |= {"device_memory": "2G", "rule": "gate", "confidence": 0.3}
    flags = {"remember": True, "degrade": True, "early": True}
    assert {*given, *flags, "pools", "price"} == set(OPTIONS)  # which exclude memory, and t1 and t2
    rows = _config(
        capsys,
        *(f"--{name.replace('_', '-')}={value}" for name, value in given.items()),
        *(f"--{name}" for name in flags),
    )
    shown = {**given, **flags, "memory": 1 << 30, "device_memory": 2 << 30, "weights": [1.0, 0.0, 0.0, 0.0]}
    assert {name: rows[name] for name in shown} == {name: (value, "flag") for name, value in shown.items()}


def test_without_a_model_defaults_and_flags_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    rows = _config(capsys, "--memory", "2G", "--temp", "0", "--ctx", 100)
    assert rows["memory"] == (2 << 30, "flag")
    assert rows["temp"] == (0.0, "flag")
    assert rows["ctx"] == (100, "flag")
    assert rows["top_k"] == (SamplingConfig.top_k, "default")
    assert rows["policy"] == ("echo", "default")
    assert rows["threads"][1] == "computed"
    assert "weights" not in rows  # of the policy hobbit


def test_what_is_computed_is_what_the_engine_has(tiny_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = _config(capsys, tiny_gguf, "--pools", "6M", "--t2", "0.9")
    with Engine(tiny_gguf, EngineConfig(cache=CacheConfig(pools=6 << 20, t2=0.9))) as engine:
        info = engine.info()
    assert rows["t1"] == (info.t1, "computed")
    assert rows["t2"] == (info.t2, "flag")
    assert rows["high_pool"] == (info.pool_bytes_high, "computed")
    assert rows["low_pool"] == (info.pool_bytes_low, "computed")
    assert rows["ctx"] == (info.n_ctx, "computed")
    assert rows["threads"] == (info.n_threads, "computed")


@pytest.fixture
def calibrated(tiny_gguf: Path, tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    shutil.copyfile(tiny_gguf, path)
    size, low_bytes = path.stat().st_size, 6 * 8 * 3 * 256 * 256 * 9 // 16
    Calibration(size, low_bytes, 0.5, 0.8, 0.25, "hobbit", (0.1, 0.2, 0.3, 0.4)).write(path)
    return path


def test_a_calibration_stands_behind_flags(calibrated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = _config(capsys, calibrated)
    assert rows["t1"] == (0.5, "calibration")
    assert rows["t2"] == (0.8, "calibration")
    assert rows["low_share"] == (0.25, "calibration")
    assert rows["policy"] == ("hobbit", "calibration")
    assert rows["weights"] == ([0.1, 0.2, 0.3, 0.4], "calibration")
    assert rows["calibration"][0] == str(calibrated.with_name("m.calibration.gguf"))
    with Engine(calibrated, EngineConfig()) as engine:
        assert (engine.info().t1, engine.info().t2) == (0.5, 0.8)

    rows = _config(capsys, calibrated, "--t1", "0.6", "--policy", "hobbit", "--prefetch", 0)
    assert rows["t1"] == (0.6, "flag")
    assert rows["t2"] == (1.0, "default")  # one threshold given takes the other from the defaults
    assert rows["weights"] == ([0.6, 0.25, 0.15, 0.0], "default")
    assert rows["prefetch"] == (0, "flag")
    with Engine(calibrated, EngineConfig(cache=CacheConfig(t1=0.6))) as engine:
        assert (engine.info().t1, engine.info().t2) == (0.6, 1.0)


def test_static_widths_bring_their_price(calibrated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size, low_bytes = calibrated.stat().st_size, 6 * 8 * 3 * 256 * 256 * 9 // 16
    costs = Costs((0.5,) * 48, (math.inf,) * 48)
    numbers = (1.0, 1.0, 0.25, "lru", (1.0, 0.0, 0.0, 0.0))
    Calibration(size, low_bytes, *numbers, rule="edgemoe", price=0.125, costs=costs).write(calibrated)
    rows = _config(capsys, calibrated)
    assert (rows["rule"], rows["price"]) == (("edgemoe", "calibration"), (0.125, "calibration"))
    assert rows["t1"] == (1.0, "default")
    assert main(["inspect", str(calibrated), "--no-speed"]) == 0
    assert "rule edgemoe, price = 0.125" in capsys.readouterr().out


def test_the_table(tiny_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", str(tiny_gguf), "--pools", "6M"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^  pools +6.0 MiB +flag$", text, re.MULTILINE)
    assert re.search(r"^  high_pool +\d.\d MiB +computed \(room for 16 of 48 experts\)$", text, re.MULTILINE)
    assert re.search(r"^  prefetch +2 +default$", text, re.MULTILINE)


def test_errors_are_those_of_chat(tiny_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--t1", "2"]) == 2
    assert "between 0 and 1" in capsys.readouterr().err
    assert main(["config", str(tiny_gguf.with_name("tinyy.gguf"))]) == 1
    assert f"did you mean {tiny_gguf}?" in capsys.readouterr().err
    assert main(["config", str(tiny_gguf), "--memory", "1M"]) == 1
    assert "the smallest that works is" in capsys.readouterr().err
