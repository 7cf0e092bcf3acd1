# SPDX-License-Identifier: MIT
"""Paths, the parser of options and the tables that the scripts of bench/ share."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build/bench"
"""Compiled and generated files, which later runs reuse."""


def option_parser(description: str | None) -> argparse.ArgumentParser:
    """Keeps the lines of the description as they are: a script's docstring shows how it is called."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def markdown(table: Sequence[Mapping[str, str]]) -> list[str]:
    """The lines of a table with aligned columns, from its rows by column."""
    if not table:
        return []
    head, rows = list(table[0]), [list(row.values()) for row in table]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (head, *rows)]
    lines = [f"| {' | '.join(cells)} |" for cells in padded]
    return [lines[0], rule, *lines[1:]]


def number(value: float | None, how: str, scale: float = 1.0) -> str:
    """A cell; a dash where there is none."""
    return "-" if value is None else format(value * scale, how)
