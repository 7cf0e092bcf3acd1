# SPDX-License-Identifier: MIT
"""Figures that pages take from committed reports: figures.tsv says which line each one is of."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
_SENTENCES = [
    line.split("\t")
    for line in Path(__file__).with_name("figures.tsv").read_text("utf-8").splitlines()
    if not line.startswith("#")
]


@cache
def _figures(report: str, part: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (DOCS / f"results/{report}.jsonl").read_text("utf-8").splitlines())
    return next(line["figures"] for line in lines if line.get("part") == part)


def _value(place: str) -> float:
    """The number at REPORT;PART;TITLE;ROW;COLUMN of a table, or SERIES;X of lines, or ;TEXT of a title."""
    report, part, title, row, column = place.split(";")
    figure = next(each for each in _figures(report, part) if title in each["title"])
    if not row:
        return float(re.findall(re.escape(column) + r"([\d.]*\d)", figure["title"])[0])
    if figure["kind"] != "table":
        return float(figure["series"][row][figure["x"].index(float(column))])
    return float(next(each[column] for each in figure["rows"] if row in each.values()))


def _figure(formula: str) -> float:
    """A place, with %A in hundredths, A / B as a ratio, and less A / B as what A lacks in per cent of B."""
    a, _, b = formula.removeprefix("less ").removeprefix("%").partition(" / ")
    value = _value(a) / (_value(b) if b else 1)
    return 100 * (1 - value) if formula.startswith("less ") else value * (100 if formula[0] == "%" else 1)


@pytest.mark.parametrize(("page", "text", "places"), [(each[0], each[1], each[2:]) for each in _SENTENCES])
def test_a_page_has_the_figures_of_the_lines_that_it_names(page: str, text: str, places: list[str]) -> None:
    assert text.count("{") == len(places)
    words, figures = " ".join((DOCS / page).read_text("utf-8").split()), [*map(_figure, places)]
    assert text.format(*figures) in words
    for i, figure in enumerate(figures):  # no place is idle
        assert text.format(*figures[:i], 3 * figure, *figures[i + 1 :]) not in words
