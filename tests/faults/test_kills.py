# SPDX-License-Identifier: MIT
"""SIGKILL while files are written: none is half a file, and the next run works and tidies up."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import models
import pytest
from conftest import RunPyhobbit

from pyhobbit.model.file_names import calibration_path

TEXT = Path(__file__).resolve().parents[1] / "tiny_moe/heldout.txt"


def kill_when(command: list[object], folder: Path, n_files: int) -> None:
    """Kills `pyhobbit COMMAND` and its processes once the folder has so many files."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pyhobbit", *map(str, command)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while process.poll() is None and len(list(folder.iterdir())) < n_files:
        time.sleep(0.005)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    said = process.communicate(timeout=300)[1]
    assert process.returncode in (0, -signal.SIGKILL), said


@pytest.mark.parametrize("source", [models.TINY / "model", None], ids=["checkpoint", "GGUF"])
def test_a_killed_conversion_leaves_no_model(
    tmp_path: Path, run_pyhobbit: RunPyhobbit, source: Path | None
) -> None:
    right = models.tiny_tiers("q8_0", "q4_0")
    made = tmp_path / "made.gguf"
    tiers = ("--low", "q4_0", "--high", "q8_0", "--set", "t1=1")
    command = ["convert", *tiers, source or models.tiny(), "-o", made, "--force"]
    kill_when(command, tmp_path, 1)
    assert not made.exists() or made.read_bytes() == right.read_bytes()
    done = run_pyhobbit(*command)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == [made]
    assert made.read_bytes() == right.read_bytes()


def test_a_killed_calibration_leaves_a_model_that_runs(tmp_path: Path, run_pyhobbit: RunPyhobbit) -> None:
    model = tmp_path / "m.gguf"
    shutil.copyfile(models.tiny_tiers("q8_0", "q4_0"), model)
    command = ["calibrate", model, "--text", TEXT, "--chunks", 4, "--ctx", 64, "--set", "rule=gate"]
    kill_when(command, tmp_path, 2)
    stored = calibration_path(model)
    for _ in range(2):
        done = run_pyhobbit("chat", model, "-p", "x", "-n", 2, "--pools", "5M")
        assert done.returncode == 0, done.stderr
        if not stored.exists():
            done = run_pyhobbit(*command)
            assert done.returncode == 0, done.stderr
    assert stored.exists()
    assert not list(tmp_path.glob(".*.tmp"))
