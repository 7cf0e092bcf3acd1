# SPDX-License-Identifier: MIT
"""A rule that brings a number, in a folder of its own."""

import json
from pathlib import Path

from conftest import RunPyhobbit
from servers import serving

from pyhobbit import Hobbit


def test_from_the_command_line(tiny_gguf: Path, run_pyhobbit: RunPyhobbit, tmp_path: Path) -> None:
    skipped = []
    for number in (1, 0.5):
        answer = ("-p", "def f(", "-n", 8, "--temp", 0, "--pools", "6M", "--set", f"nucleus={number}")
        done = run_pyhobbit("chat", tiny_gguf, *answer, "--stats-json", tmp_path / "stats.json")
        assert done.returncode == 0, done.stderr
        skipped.append(json.loads((tmp_path / "stats.json").read_text())["selections_skipped"])
    assert skipped[0] == 0 < skipped[1]
    assert "a token keeps its best experts" in run_pyhobbit("chat", "--help-all").stdout
    refused = run_pyhobbit("chat", tiny_gguf, "-p", "x", "--set", "nucleus=0.5", "--set", "rule=gate")
    assert "nucleus belongs to the rule nucleus" in refused.stderr


def test_by_a_request(tiny_gguf: Path, tmp_path: Path) -> None:
    options = ("--pools", "6M", "--set", "rule=nucleus", "--prefetch", 0)
    with serving(tiny_gguf, tmp_path / "log", *options) as server:
        assert server.cache()["nucleus"] == 1
        server.complete()
        assert server.cache()["selections_skipped"] == 0
        server.complete(hobbit={"nucleus": 0.5})
        assert server.cache()["selections_skipped"] > 0
        assert 'hobbit_threshold{name="nucleus"} 1' in server.request("/metrics").text


def test_by_hobbit(tiny_gguf: Path) -> None:
    with Hobbit(str(tiny_gguf), pools="6M", nucleus=0.5, n_ctx=64, verbose=False) as llm:
        llm("def f(", max_tokens=4)
        assert llm.cache_config.nucleus == 0.5
        assert llm.stats().cache.selections_skipped > 0
        assert llm.stats().info.nucleus == 0.5
