# SPDX-License-Identifier: MIT
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from models import ROOT

from pyhobbit.cli.main import main
from pyhobbit.engine.engine import Engine
from pyhobbit.model.stored_settings import ENGINE_DEFAULTS
from pyhobbit.quality.calibration import Calibration
from pyhobbit.settings.config import CacheConfig, EngineConfig, SamplingConfig


def _config(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, tuple[Any, str]]:
    """Value and source by name."""
    assert main(["config", *map(str, arguments), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["settings"]
    assert len({row["name"] for row in rows}) == len(rows)
    return {row["name"]: (row["value"], row["source"]) for row in rows}


def test_the_defaults_are_the_engines() -> None:
    code = (ROOT / "ggml_ext/src/engine/settings.h").read_text()
    policies = (ROOT / "ggml_ext/src/policy/cache-policy.h").read_text()
    rule = (ROOT / "ggml_ext/src/plan/precision-rule.h").read_text()

    def default(text: str, pattern: str) -> str:
        match = re.search(pattern + r"\s*=\s*([^;]+);", text)
        assert match is not None, pattern
        return match[1].strip()

    assert default(code, r"policy") == f'"{ENGINE_DEFAULTS["policy"]}"'
    assert int(default(code, r"prefetch")) == ENGINE_DEFAULTS["prefetch"]
    assert int(default(code, r"io_threads")) == ENGINE_DEFAULTS["io_threads"]
    weights = tuple(map(float, re.findall(r"[\d.]+", default(policies, r"weights"))))
    assert weights == ENGINE_DEFAULTS["weights"]
    for name in ("t1", "t2"):
        assert float(default(rule, rf"double\s+{name}")) == ENGINE_DEFAULTS[name]


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
