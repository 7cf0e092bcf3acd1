# SPDX-License-Identifier: MIT
"""Figures that pages take from committed reports: figures.tsv says which line each one is of."""

import inspect
import json
import re
import shlex
from argparse import ArgumentParser
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench import compare, report
from bench.analysis.part import results_of_papers
from bench.harness.arms import DEVICE_ARMS, choose_arms
from bench.harness.devices import read_prices

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_NAME = r"(?:HOBBIT|EdgeMoE|MoBiLE|Twiddler|DAOP) (?:Fig\. \d+[a-d]?|Table (?:[IVX]+|\d+))"
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


def _listed() -> dict[str, str]:
    """[figure of a paper] = where docs/results/figures.md has it."""
    found: dict[str, str] = {}
    for line in (DOCS / "results/figures.md").read_text("utf-8").splitlines():
        if match := re.fullmatch(rf"\| (({_NAME})(?:, [^|]*)?) \| [^|]* \| ([^|]*) \|", line):
            names, first, here = match.groups()
            paper = first.split(" ")[0]
            found |= {f"{paper} {name.removeprefix(f'{paper} ')}": here for name in names.split(", ")}
    return found


def test_each_figure_that_is_named_is_listed() -> None:
    pages = [page for page in DOCS.rglob("*.md") if page.name != "figures.md"]
    texts = [path.read_text("utf-8") for path in (*pages, *(ROOT / "bench/analysis").glob("*.py"))]
    assert len(_listed()) > 60
    assert {name for text in texts for name in re.findall(_NAME, text)} <= {*_listed()}
    assert results_of_papers().keys() == _listed().keys()


@pytest.mark.parametrize(("name", "here"), _listed().items())
def test_what_a_listed_figure_names_exists(name: str, here: str) -> None:
    parts = [report.PARTS[part] for part in re.findall(r"R:(\w+)", here)]
    sources = [inspect.getsource(inspect.getmodule(part) or report) for part in parts]
    assert all(name in source for source in sources) or "under" in here
    for folder, command in re.findall(r"`(?:python -m )?(bench\.|pyhobbit )(\w+)", here):
        assert (ROOT / {"bench.": "bench", "pyhobbit ": "pyhobbit/cli"}[folder] / f"{command}.py").exists()
    assert parts or re.search(r"^none: \w|\]\([\w.#-]+\)|`\w", here)


_MODELLED = [
    line.strip()
    for page in sorted(DOCS.glob("results/*.md"))
    for line in page.read_text("utf-8").replace("\\\n", " ").splitlines()
    if line.startswith("    python -m bench.compare --prices")
]


@pytest.mark.parametrize("command", _MODELLED)
def test_a_command_for_a_modelled_machine_is_one(command: str) -> None:
    parser = ArgumentParser()
    compare.add_options(parser)
    given = parser.parse_args(shlex.split(command)[3:])
    assert read_prices(given.prices)
    assert choose_arms(given.arms, bool(given.low), DEVICE_ARMS)
