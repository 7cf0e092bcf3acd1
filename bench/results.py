# SPDX-License-Identifier: MIT
"""Pages of reports, from the lines of bench/report.py: HTML with plots for one, Markdown for several.

python -m bench.results docs/results/*.jsonl > docs/results/README.md
"""

import base64
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from bench.analysis.part import Figure
from bench.harness.system import option_parser
from bench.harness.table import markdown
from pyhobbit.cli.main import ended
from pyhobbit.errors import HobbitError
from pyhobbit.native.files import read_text

_MOST_POINTS = 8  # columns of a table
_INTRODUCTION = """# Results

Reports of `python bench/report.py MODEL --text FILE` on models and machines, one file of lines each. To add
yours, read what its first line tells of your machine, put its `lines.jsonl` here as `MODEL-MACHINE.jsonl`,
and make this page again:

    python -m bench.results docs/results/*.jsonl > docs/results/README.md

It has up to eight points of each plot. [bench/README.md](../../bench/README.md#the-report) has the format."""


def page(head: Mapping[str, Any], by_part: Mapping[str, Mapping[str, Any]]) -> str:
    """HTML that needs no other file. by_part: the last line of each part."""
    text = [x if x.startswith("<img ") else escape(x) for x in section(head, by_part, draws=True)]
    title = f"<meta charset='utf-8'><title>The papers on {escape(head['model'])}</title>"
    return "\n".join([f"<!DOCTYPE html>{title}<pre>", *text, "</pre>", ""])


def section(
    head: Mapping[str, Any], by_part: Mapping[str, Mapping[str, Any]], draws: bool = False
) -> Iterator[str]:
    """The lines of one report's section in Markdown. draws: plots are elements of HTML in place of tables."""
    yield f"## {head['model']}, {head.get('cpu')}, {head.get('memory')}"
    times = [f"{name} {line['seconds']:g}" for name, line in by_part.items() if line.get("seconds")]
    about = {**head, "seconds": ", ".join(times) or "not kept"}
    yield from ("", "; ".join(f"{name}: {_cell(value)}" for name, value in about.items()) + ".")
    for line in by_part.values():
        yield from (text for note in line.get("notes", ()) for text in ("", f"**{note}**"))
        for figure in line.get("figures", ()):
            theirs = f" In the paper: {figure['theirs']}." if figure["theirs"] else ""
            yield from ("", f"**{', '.join(figure['papers'])}**: {figure['title']}.{theirs}")
            if draws and figure["kind"] != "table":
                yield f"<img src='data:image/svg+xml;base64,{_plotted(figure)}'>"
            elif rows := [{name: _cell(value) for name, value in row.items()} for row in _rows(figure)]:
                yield from ("", *markdown(rows))
        if "not_run" in line:
            yield from ("", f"Not run: {line['part']}, {line['not_run']}.")


def _rows(figure: Figure) -> list[Mapping[str, Any]]:
    """A table's own rows; of lines one for each series. The title tells of other plots."""
    series = figure.get("series", {})
    if not series:
        return list(figure.get("rows", ()))
    x, label = figure.get("x", []), figure.get("x_label", "")
    some = np.unique(np.linspace(0, len(x) - 1, _MOST_POINTS).round().astype(int)).tolist()
    return [{label: name, **{_cell(x[i]): of[i] for i in some}} for name, of in series.items()]


def _cell(value: Any) -> str:
    text = "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _plotted(figure: Figure) -> str:
    """An SVG in base64."""
    from matplotlib import rc_context  # takes a while
    from matplotlib.figure import Figure as Plot

    plot = Plot(figsize=(7.5, 3.4), layout="constrained")
    ax, series = plot.subplots(), figure.get("series", {})
    if figure["kind"] == "points":
        ax.scatter(np.array(figure["x"], float), np.array(figure["y"], float), s=5, alpha=0.4)
    elif figure["kind"] == "map":
        plot.colorbar(ax.imshow(np.array(figure["values"], float), aspect="auto", cmap="cividis"), ax=ax)
    for label, values in series.items():
        ax.plot(
            figure["x"], np.array(values, float), "--" if label.startswith("by chance") else ".-", label=label
        )
    if len(series) > 1:
        plot.legend(loc="outside lower center", ncols=min(5, len(series)))
    ax.set(xlabel=figure.get("x_label", ""), ylabel=figure.get("y_label", ""))
    out = io.BytesIO()
    with rc_context({"svg.hashsalt": "report"}):  # the same values give the same picture
        plot.savefig(out, format="svg", metadata={"Date": None})
    return base64.b64encode(out.getvalue()).decode()


def read_lines(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The head of a report, and its parts by name. Raises HobbitError."""
    try:
        head, *parts = [json.loads(line) for line in read_text(path).splitlines()]
        by_part = {part["part"]: part for part in parts}
        _ = head["model"], head["cpu"], head["memory"]
    except (ValueError, KeyError, TypeError) as error:
        raise HobbitError(f"{path} holds no lines of bench/report.py: {error!r}") from error
    return head, by_part


def print_page(paths: Sequence[Path]) -> int:
    """Prints the page of several reports. Raises HobbitError."""
    reports = map(read_lines, sorted(paths))
    print("\n".join([_INTRODUCTION, *(line for each in reports for line in ("", *section(*each)))]))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the page; returns the exit status."""
    parser = option_parser(__doc__)
    parser.add_argument("lines", type=Path, nargs="+", metavar="LINES", help="lines.jsonl of a report")
    args = parser.parse_args(arguments)
    return ended(lambda: print_page(args.lines))


if __name__ == "__main__":
    sys.exit(main())
