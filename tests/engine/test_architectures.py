# SPDX-License-Identifier: MIT
"""The MoE architectures of llama.cpp give stock's bits through the cache.

docs/architectures.md lists the outcome of each, and these tests hold the list to what they compute.
"""

from __future__ import annotations

import atexit
import functools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from architecture_models import EXPERTS
from architectures import ARCHITECTURES
from exactness import assert_same_bits
from gguf import GGUFReader

pytestmark = pytest.mark.model

PAGE = models.ROOT / "docs/architectures.md"
PLANS = ("decode", "prompt", "sequences")
SETTINGS = ("smallest", "half", "prefetch")
GROUP = 6  # architectures per process: starting one takes as long as computing one
TIMEOUT_S = 1800


@dataclass(frozen=True)
class Row:
    """One of the page's: a source file of llama.cpp that builds routed experts, and an architecture."""

    source: str
    name: str
    result: str
    prefetch: str


@functools.cache
def page() -> list[Row]:
    lines = re.findall(r"^\| `(\S+)` \| `(\S+)` \| (.+?) \| (.+?) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    return [Row(*line) for line in lines]


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="pyhobbit-architectures-"))
    atexit.register(shutil.rmtree, folder)
    return folder


def _expert_tensors(name: str) -> list[Any]:
    tensors = GGUFReader(_folder() / f"{name}.gguf").tensors
    return [tensor for tensor in tensors if EXPERTS.search(tensor.name)]


def _start(lib_dir: Path, names: tuple[str, ...], *options: object) -> None:
    """Computes what it can: the result of an architecture that ends the process is missing."""
    script = Path(__file__).with_name("architecture_run.py")
    command = [sys.executable, script, "--lib-dir", lib_dir, "--folder", _folder(), *options, *names]
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    (_folder() / f"{names[0]}-{lib_dir.parent.name}.log").write_text(done.stderr)
    if done.returncode:
        print(done.stderr[-4000:])


@functools.cache
def _compute(names: tuple[str, ...]) -> None:
    _start(models.stock_dir(), names)
    made = tuple(name for name in names if (_folder() / f"{name}-stock.npz").exists())
    n_bytes = {name: sum(int(t.n_bytes) for t in _expert_tensors(name)) for name in made}
    if made:
        _start(models.lib_dir(), made, "--experts", json.dumps(n_bytes))


@functools.cache
def _results(name: str, build: str) -> dict[str, np.ndarray]:
    """build: "stock" or "ours"."""
    names = tuple(ARCHITECTURES)
    first = names.index(name) // GROUP * GROUP
    _compute(names[first : first + GROUP])
    path = _folder() / f"{name}-{build}.npz"
    assert path.exists(), f"{name} or one before it was not computed; the log is printed"
    with np.load(path) as arrays:
        return dict(arrays)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_setting_gives_stocks_bits(name: str) -> None:
    stock, ours = _results(name, "stock"), _results(name, "ours")
    for plan in PLANS:
        expected = stock[f"logits/{plan}"]
        assert len(np.unique(expected, axis=0)) == len(expected), "tokens do not matter"
        for setting in SETTINGS:
            assert_same_bits(ours[f"{setting}/logits/{plan}"], expected)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_all_routed_experts_are_in_the_cache(name: str) -> None:
    ours = _results(name, "ours")
    layers = {tensor.name.split(".")[1] for tensor in _expert_tensors(name)}
    for setting in SETTINGS:
        stats = {key.rpartition("/")[2]: value for key, value in ours.items() if f"{setting}/stats/" in key}
        assert ours[f"{setting}/info/n_layers"] == len(layers)
        assert ours[f"{setting}/info/tier_bytes_high"] == sum(int(t.n_bytes) for t in _expert_tensors(name))
        assert stats["selections_low"] == stats["selections_skipped"] == 0
        assert stats["misses_high"] > 0
        assert stats["evictions"] > 0
        assert (stats["predicted"] > 0) == (setting == "prefetch" and _row(name).prefetch == "yes")


def _row(name: str) -> Row:
    (row,) = [row for row in page() if row.name == name and row.result == "same bits"]
    return row


def test_the_page_lists_every_source_with_routed_experts() -> None:
    sources = (models.stock_dir().parent / "vendor/llama.cpp/src/models").glob("*.cpp")
    builds = {path.name for path in sources if re.search(r"\bbuild_moe_ffn\(", path.read_text("utf-8"))}
    assert {row.source for row in page()} == builds
    assert {row.name for row in page() if row.result == "same bits"} == set(ARCHITECTURES)
    counted = re.search(r"(\d+) of the (\d+) source files", (models.ROOT / "README.md").read_text("utf-8"))
    exact = {row.source for row in page() if row.result == "same bits"}
    assert counted
    assert tuple(map(int, counted.groups())) == (len(exact), len(builds))
