# SPDX-License-Identifier: MIT
"""An eviction policy in a folder of its own."""

import json
from pathlib import Path

from conftest import RunPyhobbit
from servers import serving

from pyhobbit import Hobbit


def test_from_the_command_line(tiny_gguf: Path, run_pyhobbit: RunPyhobbit, tmp_path: Path) -> None:
    loads = {}
    for policy in ("weight", "lru"):
        answer = ("-p", "def f(", "-n", 32, "--temp", 0, "--pools", "4M", "--prefetch", 0, "--policy", policy)
        done = run_pyhobbit("chat", tiny_gguf, *answer, "--stats-json", tmp_path / "stats.json")
        assert done.returncode == 0, done.stderr
        loads[policy] = json.loads((tmp_path / "stats.json").read_text())["misses_high"]
    assert loads["weight"] != loads["lru"]


def test_by_a_request(tiny_gguf: Path, tmp_path: Path) -> None:
    with serving(tiny_gguf, tmp_path / "log", "--pools", "4M", "--policy", "weight") as server:
        assert server.complete()
        assert server.cache()["evictions"] > 0


def test_by_hobbit(tiny_gguf: Path) -> None:
    with Hobbit(str(tiny_gguf), pools="4M", policy="weight", n_ctx=64, verbose=False) as llm:
        llm("def f(", max_tokens=16)
        assert llm.stats().cache.evictions > 0
