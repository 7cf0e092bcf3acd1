# SPDX-License-Identifier: MIT
"""bench/beams.py: searches that are kept, and the rows made of them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import bench_scripts
import pytest

from pyhobbit.errors import HobbitError

OPTIONS = {"model": "m.gguf", "prompt": 8, "tokens": 4}
STOCK, OURS = "stock-mmap-128k", "ours"


@pytest.fixture(scope="module")
def beams() -> ModuleType:
    return bench_scripts.load("beams")


def _found(beams: ModuleType, step_s: float, *text: int) -> Any:
    return beams.Found(first_s=2.0, step_s=step_s, step_bytes=3e6, texts=[list(text)])


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.split("|")[1:-1]]


def test_a_row_has_medians_and_ranges(beams: ModuleType) -> None:
    results = beams.Results(None, OPTIONS)
    for repetition, step_s in enumerate((0.5, 0.25, 1.0)):
        results.add(beams.Case(0.25, 4, OURS, repetition), _found(beams, step_s, 1))
    results.add(beams.Case(0.4, 4, OURS, 0), _found(beams, 8.0, 1))
    expected = ["25%", "4", OURS, "3", "2.00", "8.00", "4.00 - 16.00", "3", "2.00 s", ""]
    assert _cells(results.row(0.25, 4, OURS)) == expected
    assert results.row(0.25, 8, OURS) is None


def test_texts_are_compared_with_those_of_stock(beams: ModuleType) -> None:
    results = beams.Results(None, OPTIONS)
    for repetition, text in enumerate((1, 2)):
        results.add(beams.Case(0.25, 4, STOCK, repetition), _found(beams, 1.0, 1))
        results.add(beams.Case(0.25, 4, OURS, repetition), _found(beams, 1.0, text))
    assert _cells(results.row(0.25, 4, STOCK))[-1] == "yes"
    assert _cells(results.row(0.25, 4, OURS))[-1] == "no"


def test_an_interrupted_run_goes_on(
    beams: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    searched: list[Any] = []

    def measure(_config: object, case: Any) -> Any:
        if len(searched) == 4:
            raise KeyboardInterrupt
        searched.append(case)
        return _found(beams, 1.0, 1)

    def arguments(tokens: int) -> list[str]:
        model = tmp_path / "m.gguf"
        model.touch()
        options = ("--limits", 0.25, "--beams", 4, "--reps", 2, "--tokens", tokens, "--stock", tmp_path)
        return ["beams.py", *map(str, (model, *options, "--results", tmp_path / "r"))]

    (tmp_path / "libllama.so").touch()
    monkeypatch.setattr(beams, "measure", measure)
    monkeypatch.setattr(beams.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", arguments(tokens=4))
    with pytest.raises(SystemExit, match="interrupted"):
        beams.main()
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [_cells(row)[3] for row in rows] == ["2", "1", "1"]  # runs: stock's second one ended
    before, searched = searched, []
    beams.main()
    assert len(before) == 4
    assert len(searched) == 2
    assert not set(before) & set(searched)
    assert [_cells(row)[3] for row in capsys.readouterr().out.splitlines()[2:]] == ["2", "2", "2"]
    monkeypatch.setattr(sys, "argv", arguments(tokens=5))
    with pytest.raises(SystemExit, match="give another file"):
        beams.main()


def test_a_file_of_other_options_is_refused(beams: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "r"
    beams.Results(path, OPTIONS).add(beams.Case(0.25, 4, OURS, 0), _found(beams, 1.0, 1))
    with pytest.raises(HobbitError, match="give another file"):
        beams.Results(path, {**OPTIONS, "prompt": 9})
