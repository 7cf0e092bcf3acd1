# SPDX-License-Identifier: MIT
"""`pyhobbit serve --calibrate-idle`."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import models
import pytest
from servers import LONG, START_TIMEOUT_S, serving, streaming

from pyhobbit.model.file_names import calibration_path

pytestmark = pytest.mark.model
TEXT = models.TINY / "heldout.txt"


def _calibrator(model: Path) -> Path | None:
    """The folder in /proc of the process that calibrates a model."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if words[3:5] == ["calibrate", str(model)]:
            return folder
    return None


def _state(process: Path | None) -> str:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] if process else ""
    except OSError:  # it has ended
        return ""


def _wait_until(condition: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
        time.sleep(0.02)


def test_requests_stop_it_and_it_ends_with_the_server(tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    shutil.copy(models.tiny(), model)
    log = tmp_path / "tiny.calibration.log"
    with serving(model, tmp_path / "log", "--memory", "1400M", "--calibrate-idle", TEXT, *LONG) as server:
        assert "calibrates on heldout.txt, with 350.0 MiB" in server.log.read_text()
        _wait_until(lambda: _state(_calibrator(model)) in ("R", "S", "D"), log)
        process = _calibrator(model)
        with streaming(server):
            _wait_until(lambda: _state(process) == "T", log)
            assert server.busy_slots() > 0
        _wait_until(lambda: _state(process) in ("R", "S", "D"), log)
    _wait_until(lambda: _state(process) in ("", "Z"), log)
    assert not calibration_path(model).exists()


def test_what_cannot_be_calibrated_is_refused_before_the_server_runs(tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    shutil.copy(models.tiny(), model)

    def said(*options: object) -> str:
        command = [sys.executable, "-m", "pyhobbit", "serve", *options, "--calibrate-idle"]
        done = subprocess.run(
            [*map(str, command), str(tmp_path / "none.txt")], capture_output=True, text=True, check=False
        )
        assert done.returncode in (1, 2)
        return done.stderr

    assert "the text" in said(model, "--memory", "1400M")
    assert "--calibrate-idle is for one model" in said("--models-dir", tmp_path)
