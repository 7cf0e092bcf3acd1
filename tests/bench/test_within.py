# SPDX-License-Identifier: MIT
"""bench.within runs a program in a share of a model's size."""

import subprocess
import sys
from pathlib import Path

import models
import pytest


def _within(share: float, model: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, "-m", "bench.within", str(share), model, "--", *command]
    return subprocess.run(words, cwd=models.ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("status", [0, 7])
def test_a_program_runs_within_the_limit(tiny_gguf: Path, status: int) -> None:
    done = _within(2.5, tiny_gguf, "sh", "-c", f"exit {status}")
    if "no memory cgroup" in done.stderr:
        pytest.skip(done.stderr)
    limit = int(2.5 * tiny_gguf.stat().st_size) >> 20
    assert done.returncode == status
    assert done.stderr.startswith(f"limit {limit} MiB, peak ")
    assert done.stderr.endswith(f"status {status}\n")


def test_a_file_that_is_no_model_is_a_sentence(tmp_path: Path) -> None:
    done = _within(1, tmp_path / "a.gguf", "true")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("bench.within: ")
