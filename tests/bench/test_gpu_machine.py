# SPDX-License-Identifier: MIT
"""bench/gpu_machine.py: what it runs, and what it says of the rest. bench/device.py has tests of its own."""

import subprocess
import sys
from pathlib import Path

import models

from bench import gpu_machine
from bench.device import BY_NAME


def _run(out: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    given = ("--device", "CUDA7", "--stock", "nowhere", "--folder", str(out.parent), "--output", str(out))
    return subprocess.run(
        [sys.executable, "-m", "bench.gpu_machine", *given, *options],
        cwd=models.ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_what_the_time_does_not_suffice_for_is_named(tmp_path: Path) -> None:
    done = _run(tmp_path / "out", "--minutes", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip() == (tmp_path / "out/tables.md").read_text().rstrip()
    parts = dict(part.split("\n\n", 1) for part in done.stdout.split("## ")[1:])
    assert list(parts) == [run.name for run in gpu_machine.RUNS]
    assert parts["many small experts"].strip() == "Left out: it may take 9 minutes, and 1 were left."
    assert parts["newer llama.cpp"].strip() == "Left out: it needs --newer."
    assert parts["calibrated"].strip() == "Left out: it needs --calibration."


def test_a_run_that_fails_is_told_with_its_command(tmp_path: Path) -> None:
    done = _run(tmp_path / "out", "--trial", "--runs", "prompts", "--minutes", "9")
    assert done.returncode == 1
    (part,) = done.stdout.split("## ")[1:]
    assert part.startswith("prompts\n\n    python -m bench.device --device CUDA7 --shape tiny ")
    assert "Failed: device: llama.cpp in " in part
    assert "has no device 'CUDA7': choose one of CPU" in part


def test_each_row_says_whether_it_is_measured_or_modelled(tmp_path: Path) -> None:
    assert all(arm in BY_NAME for run in gpu_machine.RUNS for arm in run.arms)
    command = [
        sys.executable,
        "-m",
        "bench.gpu_machine",
        "--prices",
        "h100",
        "--stock",
        str(models.stock_dir()),
    ]
    command += ["--trial", "--folder", str(tmp_path), "-o", str(tmp_path / "out")]
    command += ["--runs", "many small experts", "Twiddler and DAOP", "calibrated"]
    done = subprocess.run(command, cwd=models.ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    small, left_out, papers = done.stdout.split("## ")[1:]
    arms = "stock", "stock-fit", "demand", *gpu_machine.MODES
    for part, expected in ((small, arms), (papers, ("ours-twiddler", "ours-daop"))):
        rows = [line.split("|")[1:3] for line in part.splitlines() if line.startswith("|")]
        head, rule, *others = ([cell.strip(" -") for cell in row] for row in rows)
        assert [head, rule] == [["modelled", "arm"], ["", ""]]
        assert others == [["modelled", arm] for arm in expected]
    assert "Left out: it needs --calibration." in left_out
