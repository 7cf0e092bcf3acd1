# SPDX-License-Identifier: MIT
"""docs/models.md states what the test bed computes; some cells are computed here, all by bed_matrix.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import bed_matrix as matrix
import sizes
from beds import BEDS
from verbs import VERBS, Bench, cell

# models whose files are small, and verbs that take seconds
COMPUTED = [("olmoe", "prefetch"), ("qwen3.6-35b", "prefetch"), ("olmoe", "trace")]


def test_the_page_states_every_cell() -> None:
    page = matrix.stated(matrix.PAGE.read_text("utf-8"))
    assert list(page) == list(BEDS)
    assert all(list(cells) == list(VERBS) for cells in page.values())
    assert not [cells for cells in page.values() for value in cells.values() if value[:1] in ("(", "-", "")]


def test_a_cell_that_differs_from_the_page_is_told() -> None:
    found = {"a": {"chat": "ok", "serve": "too slow"}, "b": {"chat": "no text", "serve": "ok"}}
    cells = {name: {verb: row.get(verb, "-") for verb in VERBS} for name, row in found.items()}
    page = matrix.stated(matrix.BEGIN + matrix.rendered(cells) + matrix.END)
    assert page == cells
    cells["b"]["serve"] = "breaks"
    assert matrix.differences(cells, page) == ["b, serve: the page says 'ok', computed 'breaks'"]


def test_the_page_states_the_sizes() -> None:
    assert "\n".join(sizes.table()) in matrix.PAGE.read_text("utf-8")


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize(("name", "verb"), COMPUTED)
def test_a_cell_is_what_the_page_states(name: str, verb: str, tmp_path: Path) -> None:
    page = matrix.stated(matrix.PAGE.read_text("utf-8"))
    assert cell(Bench(name, tmp_path), verb) == page[name][verb]
