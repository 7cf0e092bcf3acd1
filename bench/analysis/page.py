# SPDX-License-Identifier: MIT
"""Pages of reports, from their lines alone: HTML with plots, in one file, and Markdown."""

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from bench.analysis.part import Figure
from bench.harness.table import markdown
from pyhobbit.errors import HobbitError

try:
    from matplotlib import style
    from matplotlib.figure import Figure as Plot
    from matplotlib.ticker import MaxNLocator, PercentFormatter
except ImportError as e:
    raise HobbitError(f"the report needs matplotlib ({e}); install it with: pip install matplotlib") from e

# colours that the colour-blind tell apart; the same values give the same picture
_STYLE: list[Any] = ["default", "tableau-colorblind10", {"font.size": 9, "svg.hashsalt": "report"}]
_MARKERS = "os^Dv<>p"
_MOST_LABELS, _MOST_POINTS = 40, 8  # labels of bars, columns of a table


def page(head: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], listed: Mapping[str, str]) -> str:
    """HTML that needs no other file.

    lines: the last one of each part.  listed: why each of the papers' figures is absent, if it is.
    """
    shown = {name for line in lines for each in line.get("figures", ()) for name in each["papers"]}
    rows = [
        {"figure": name, "here": "shown" if name in shown else f"not run: {why}"}
        for name, why in listed.items()
    ]
    own = section(head, {line["part"]: line for line in lines}, draws=True)
    text = [line if line.startswith("<img ") else escape(line) for line in (*own, "", *markdown(rows))]
    title = f"<meta charset='utf-8'><title>The papers on {escape(head['model'])}</title>"
    return "\n".join([f"<!DOCTYPE html>{title}<pre>", *text, "</pre>", ""])


def section(
    head: Mapping[str, Any], by_part: Mapping[str, Mapping[str, Any]], draws: bool = False
) -> Iterator[str]:
    """The lines of one report's section in Markdown. draws: plots are elements of HTML in place of tables."""
    yield f"## {head['model']}, {head.get('cpu')}, {head.get('memory')}"
    yield from ("", *markdown([{"what": name, "value": _cell(value)} for name, value in head.items()]))
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
    times = [f"{name} {line['seconds']:g}" for name, line in by_part.items() if line.get("seconds")]
    yield from ("", f"Seconds of the parts: {', '.join(times)}.") if times else ()


def _rows(figure: Figure) -> list[Mapping[str, Any]]:
    """A table's own rows; of lines and bars one for each series."""
    if figure["kind"] == "table":
        return list(figure["rows"])
    x, label = figure.get("x", []), figure.get("x_label", "")
    some = np.unique(np.linspace(0, len(x) - 1, _MOST_POINTS).round().astype(int)).tolist()
    series = figure.get("series", {})
    return [{label: name, **{_cell(x[i]): of[i] for i in some}} for name, of in series.items()]


def _cell(value: Any) -> str:
    text = "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _plotted(figure: Figure) -> str:
    """An SVG in base64."""
    kind, x, series = figure["kind"], figure.get("x", []), figure.get("series", {})
    with style.context(_STYLE):
        plot = Plot(figsize=(7.5, 3.4), layout="constrained")
        ax = plot.subplots()
        if kind == "points":
            ax.scatter(np.array(x, float), np.array(figure["y"], float), s=5, alpha=0.4)
        elif kind == "map":
            values = np.array(figure["values"], float)
            plot.colorbar(ax.imshow(values, aspect="auto", cmap="cividis", interpolation="nearest"), ax=ax)
        for i, (label, values) in enumerate(series.items()):
            given: dict[str, Any] = {"label": label, "color": f"C{i % 10}"}
            if kind == "lines":
                looks = "--" if label.startswith("by chance") else f"{_MARKERS[i % len(_MARKERS)]}-"
                ax.plot(x, np.array(values, float), looks, **given)
            else:
                width = 0.8 / len(series)
                ax.bar(np.arange(len(x)) + i * width, np.array(values, float), width, **given)
        if kind == "bars" and len(x) <= _MOST_LABELS:
            ax.set_xticks(range(len(x)), x)
        elif kind == "map" or all(isinstance(each, int) for each in x):
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(series) > 1:
            plot.legend(loc="outside lower center", ncols=min(5, len(series)))
        ax.set(xlabel=figure.get("x_label", ""), ylabel=figure.get("y_label", ""))
        for axis, is_share in ((ax.yaxis, figure.get("percent")), (ax.xaxis, figure.get("x_percent"))):
            if is_share:
                axis.set_major_formatter(PercentFormatter(1))
        out = io.BytesIO()
        plot.savefig(out, format="svg", metadata={"Date": None})
    return base64.b64encode(out.getvalue()).decode()
