# SPDX-License-Identifier: MIT
"""Causes outside of a file are not blamed on it."""

import errno
import os
import subprocess
import sys

import models
import pytest

from pyhobbit.engine import llama


@pytest.mark.parametrize(
    ("reason", "hint"),
    [
        (f"failed to open GGUF file 'm' ({os.strerror(errno.EMFILE)})", "ulimit -n"),
        (f"failed to open m: {os.strerror(errno.EACCES)}", "the system refused it"),
        (f"read error: {os.strerror(errno.EIO)}", "the system refused it"),
        (f"mmap failed: {os.strerror(errno.ENOMEM)}", "free some memory"),
        ("unable to allocate CPU buffer", "free some memory"),
        (f"seek error: {os.strerror(errno.EINVAL)}", llama.DAMAGED),
        ("tensor 'a' data is not within the file bounds", llama.DAMAGED),
    ],
)
def test_the_hint_follows_the_reason(reason: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "last_error", lambda: None)
    monkeypatch.setattr(llama.log, "errors", [f"load: {reason}\n"])
    text = llama.load_failure("m", llama.DAMAGED)
    assert reason in text
    assert hint in text
    assert (hint == llama.DAMAGED) == ("download" in text)


@pytest.mark.model
def test_a_cpu_library_without_our_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "pyhobbit", "chat", models.tiny(), "-p", "a", "-n", "1", "--pools", "6M"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    monkeypatch.setenv("LD_PRELOAD", str(models.stock_dir() / "libggml-cpu.so"))
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "error: the CPU backend that was loaded is another llama.cpp's" in refused.stderr
