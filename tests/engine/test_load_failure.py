# SPDX-License-Identifier: MIT
"""Causes outside of a file are not blamed on it."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import models
import pytest

from pyhobbit.model import loading

OTHER = "take another file of the model, or a newer pyhobbit"


@pytest.mark.parametrize(
    ("reason", "hint"),
    [
        (f"failed to open GGUF file 'm' ({os.strerror(errno.EMFILE)})", "ulimit -n"),
        (f"failed to open m: {os.strerror(errno.EACCES)}", "the system refused it"),
        (f"read error: {os.strerror(errno.EIO)}", "the system refused it"),
        (f"mmap failed: {os.strerror(errno.ENOMEM)}", "free some memory"),
        ("unable to allocate CPU buffer", "free some memory"),
        (f"seek error: {os.strerror(errno.EINVAL)}", OTHER),
        ("tensor 'a' data is not within the file bounds", OTHER),
    ],
)
def test_the_hint_follows_the_reason(reason: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "last_error", lambda: None)
    monkeypatch.setattr(loading.log, "errors", [f"load: {reason}\n"])
    text = loading.load_failure("m")
    assert reason in text
    assert hint in text
    assert (hint == OTHER) == ("another file" in text)
    assert "damaged" not in text


@pytest.mark.model
def test_a_cpu_library_without_our_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "pyhobbit", "chat", models.tiny(), "-p", "a", "-n", "1", "--pools", "6M"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    monkeypatch.setenv("LD_PRELOAD", str(models.stock_dir() / "libggml-cpu.so"))
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "error: the CPU backend that was loaded is another llama.cpp's" in refused.stderr


def test_damage_is_said_of_a_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(models.tiny().read_bytes()[:-100])
    monkeypatch.setattr(loading.log, "errors", ["load: tensor 'a' data is not within the file bounds\n"])
    assert "is truncated: tensor 'output" in loading.load_failure(tmp_path / "m.gguf")
