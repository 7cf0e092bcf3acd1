# SPDX-License-Identifier: MIT
"""What scripts that measure share: the parser of their options, and the lines of their tables."""

import argparse
from collections.abc import Iterable


def option_parser(description: str | None) -> argparse.ArgumentParser:
    """Keeps the lines of the description as they are: a script's docstring shows how it is called."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def table_row(cells: Iterable[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def table_head(columns: Iterable[str]) -> str:
    """The first two lines of a Markdown table."""
    columns = tuple(columns)
    return f"{table_row(columns)}\n|{'---|' * len(columns)}"
