# SPDX-License-Identifier: MIT
"""Computes the matrix of docs/models.md, and fails where a cell differs from the page.

python tests/models_bed/bed_matrix.py --models qwen3.6-35b,kimi-k3 --verbs serve,memory
python tests/models_bed/bed_matrix.py --write
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path

from beds import BEDS
from verbs import VERBS, Bench, cell

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- matrix -->\n", "<!-- end of the matrix -->\n"
Matrix = dict[str, dict[str, str]]


def computed(names: list[str], verbs: list[str], kept: Path | None = None) -> Matrix:
    """Cells by model and verb; each is also printed to standard error.

    The models' files are deleted after use, or with `kept` left there and taken from there."""
    matrix: Matrix = {}
    for name in names:
        matrix[name] = {}
        with tempfile.TemporaryDirectory(prefix="pyhobbit-bed-") as folder:
            bench = Bench(name, kept or Path(folder))
            for verb in verbs:
                start = time.monotonic()
                matrix[name][verb] = cell(bench, verb)
                print(
                    f"{name} {verb} {time.monotonic() - start:.0f} s: {matrix[name][verb]}", file=sys.stderr
                )
    return matrix


def rendered(matrix: Matrix) -> str:
    """Two tables: yes or a number for each cell, and what the numbers say."""
    notes: list[str] = []

    def mark(value: str) -> str:
        if value == "ok":
            return value
        if value not in notes:
            notes.append(value)
        return f"({notes.index(value) + 1})"

    lines = ["| model | " + " | ".join(VERBS) + " |", "|---" * (len(VERBS) + 1) + "|"]
    for name, cells in matrix.items():
        lines.append(f"| {name} | " + " | ".join(mark(cells[verb]) for verb in VERBS) + " |")
    return "\n".join([*lines, "", *(f"{n}. {note}" for n, note in enumerate(notes, 1))]) + "\n"


def stated(page: str) -> Matrix:
    """The cells that the page states, by model and verb."""
    table = page.split(BEGIN)[1].split(END)[0]
    notes = {f"({number})": text for number, text in re.findall(r"(?m)^(\d+)\. (.*)$", table)}
    rows = [
        [each.strip() for each in line.strip("|").split("|")]
        for line in table.splitlines()
        if line[:1] == "|"
    ]
    header, _, *body = rows
    return {
        name: {verb: notes.get(mark, mark) for verb, mark in zip(header[1:], marks, strict=True)}
        for name, *marks in body
    }


def differences(found: Matrix, page: Matrix) -> list[str]:
    return [
        f"{name}, {verb}: the page says '{page.get(name, {}).get(verb)}', computed '{value}'"
        for name, cells in found.items()
        for verb, value in cells.items()
        if page.get(name, {}).get(verb) != value
    ]


def _chosen(text: str | None, known: list[str]) -> list[str]:
    chosen = known if text is None else text.split(",")
    if unknown := set(chosen) - set(known):
        raise SystemExit(f"unknown: {', '.join(unknown)}; choose of {', '.join(known)}")
    return chosen


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compute the matrix of models and verbs.")
    parser.add_argument("--models", help="some of them, separated by commas")
    parser.add_argument("--verbs", help="some of them, separated by commas")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the models' files in this folder")
    parser.add_argument("--write", action="store_true", help="put the cells into the page")
    args = parser.parse_args(argv)
    found = computed(_chosen(args.models, list(BEDS)), _chosen(args.verbs, list(VERBS)), args.keep)
    page = PAGE.read_text("utf-8")
    old = stated(page)
    if args.write:
        new = {name: old.get(name, {}) | found.get(name, {}) for name in BEDS}
        new = {name: {verb: cells.get(verb, "-") for verb in VERBS} for name, cells in new.items()}
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(before + BEGIN + rendered(new) + END + after, "utf-8")
        return 0
    for line in differences(found, old):
        print(line)
    return 1 if differences(found, old) else 0


if __name__ == "__main__":
    sys.exit(main())
