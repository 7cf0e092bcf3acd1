# SPDX-License-Identifier: MIT
"""Reports of several models and machines as one page of Markdown, from the lines that bench/report.py writes.

    python -m bench.results docs/results/*.jsonl > docs/results/README.md

--html writes each report's own page with its plots as well.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.analysis.page import section
from bench.harness.system import option_parser
from bench.report import write_page
from pyhobbit.errors import HobbitError
from pyhobbit.native.files import read_text

_INTRODUCTION = """# Results

Reports of `python bench/report.py MODEL --text FILE` on models and machines, one file of lines each. To add
yours, read what its first line tells of your machine, put its `lines.jsonl` here as `MODEL-MACHINE.jsonl`,
and make this page again:

    python -m bench.results docs/results/*.jsonl > docs/results/README.md

`--html DIR` writes the pages with all plots; this one has up to eight points of each.
[bench/README.md](../../bench/README.md#the-report) has the format."""


def read_lines(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The head of a report, and its parts by name. Raises HobbitError."""
    try:
        head, *parts = [json.loads(line) for line in read_text(path).splitlines()]
        by_part = {part["part"]: part for part in parts}
        _ = head["model"], head["cpu"], head["memory"]
    except (ValueError, KeyError, TypeError) as error:
        raise HobbitError(f"{path} holds no lines of bench/report.py: {error!r}") from error
    return head, by_part


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the page; returns the exit status."""
    parser = option_parser(__doc__)
    add = parser.add_argument
    add("lines", type=Path, nargs="+", metavar="LINES", help="lines.jsonl of a report")
    add("--html", type=Path, metavar="DIR", help="folder for a page with plots of each")
    args = parser.parse_args(arguments)
    try:
        reports = {path: read_lines(path) for path in sorted(args.lines)}
        sections = (line for each in reports.values() for line in ("", *section(*each)))
        for path, (head, by_part) in reports.items() if args.html else ():
            args.html.mkdir(parents=True, exist_ok=True)
            write_page(head, by_part, args.html / f"{path.stem}.html")
    except HobbitError as error:
        print(f"results: {error}", file=sys.stderr)
        return 1
    print("\n".join([_INTRODUCTION, *sections]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
