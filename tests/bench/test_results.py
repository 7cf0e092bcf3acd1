# SPDX-License-Identifier: MIT
"""bench/results.py: the page of docs/results, from the lines of reports."""

import json
from pathlib import Path
from typing import Any

import pytest
from models import ROOT

from bench import results
from bench.analysis.part import figure, table

HEAD = {"model": "m.gguf", "cpu": "a CPU", "memory": "8G"}


def _page(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert results.main([str(each) for each in arguments]) == 0
    return capsys.readouterr().out


def _lines(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in (HEAD, *lines)))
    return path


def test_the_page_of_the_repository_is_that_of_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    folder = ROOT / "docs/results"
    assert (folder / "README.md").read_text("utf-8") == _page(capsys, *folder.glob("*.jsonl"))


def test_each_kind_of_figure_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = [{"setting": "a|b", "KL": 0.123456}, {"setting": "late", "more": None}]
    series = {"low": [0.5] * 100, "skipped": [0.7] * 100}
    line = figure("lines", "HOBBIT Fig. 3b", "skipping", x=list(range(100)), series=series)
    one = figure("lines", "DAOP Table II", "mean cosine", x=[0, 1], series={"cosine": [0.9] * 2})
    heat = figure("map", "EdgeMoE Fig. 7a", "heat", values=[[1]])
    figures = [table("HOBBIT Fig. 5a", "r", rows), line, one, heat]
    first = _lines(
        tmp_path / "b.jsonl",
        {"part": "start", "costs": {}, "notes": ["A guess."]},
        {"part": "routing", "figures": figures, "seconds": 1},
        {"part": "stock", "not_run": "no stock was built"},
    )
    page = _page(capsys, first)
    assert "## m.gguf, a CPU, 8G" in page
    assert "**A guess.**" in page
    assert "**HOBBIT Fig. 5a**: r. In the paper: gate weight by weighted output, r 0.99." in page
    assert "| a\\|b    | 0.1235 | -    |" in page
    assert "|         | 0   | 14  | 28  | 42  | 57  | 71  | 85  | 99  |" in page
    assert "| cosine | 0.9 | 0.9 |" in page
    assert "memory: 8G; seconds: routing 1." in page
    assert "**EdgeMoE Fig. 7a**: heat. In the paper: one expert in INT2" in page
    assert page.endswith("\n\nNot run: stock, no stock was built.\n")
    html = results.page(*results.read_lines(first))
    assert "**EdgeMoE Fig. 7a**: heat" in html
    assert html.count("<img src='data:image/svg+xml;base64,") == 3
    assert "Not run: stock, no stock was built" in html


@pytest.mark.parametrize("content", ["", "{}\n", "[1]\n", "no json\n", '{"model": "m", "cpu": "c"}\n'])
def test_other_files_are_refused(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    assert results.main([str(path)]) == 1
    assert f"pyhobbit: error: {path} holds no lines of bench/report.py" in capsys.readouterr().err
