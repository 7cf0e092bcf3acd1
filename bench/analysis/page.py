# SPDX-License-Identifier: MIT
"""The page of a report, from its lines alone: tables and plots in one HTML file that needs nothing else.

Colours are Okabe and Ito's, told apart by the colour-blind too.
"""

import base64
import html
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.analysis.part import Figure
from pyhobbit.errors import HobbitError

try:
    import matplotlib as mpl
    from matplotlib.figure import Figure as Plot
    from matplotlib.ticker import MaxNLocator, PercentFormatter
except ImportError as e:
    raise HobbitError(f"the report needs matplotlib ({e}); install it with: pip install matplotlib") from e

_COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#666666", "#000000")
_MARKERS = "os^Dv<>p"
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.markersize": 4,
    "svg.hashsalt": "report",
}
_CSS = """body{font:15px/1.5 sans-serif;max-width:72em;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:.5em 0;display:block;overflow-x:auto}
td,th{border:1px solid #ccc;padding:.2em .6em;text-align:left}th{background:#f3f3f3}
td:first-child:not([colspan]){white-space:nowrap}
img{max-width:100%}figure{margin:1.5em 0;border-top:1px solid #ddd}figcaption{font-weight:bold}
.theirs,.why{color:#555}.why{font-style:italic}"""


def page(head: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], listed: Mapping[str, str]) -> str:
    """lines: the last one of each part.  listed: why each of the papers' figures is absent, if it is."""
    figures = [each for line in lines for each in line.get("figures", ())]
    shown = {name for each in figures for name in each["papers"]}
    rows = [
        {"figure": name, "here": "shown" if name in shown else f"not run: {why}"}
        for name, why in listed.items()
    ]
    times = [{"part": line["part"], "seconds": line["seconds"]} for line in lines if "seconds" in line]
    parts = [
        f"<h1>{_text(head['model'])}</h1>",
        _table([{"what": name, "value": value} for name, value in head.items()]),
        *(f"<p><b>{_text(note)}</b></p>" for line in lines for note in line.get("notes", ())),
        *map(_shown, figures),
        "<h2>The papers' figures</h2>",
        _table(rows),
        "<h2>Time</h2>" if times else "",
        _table(times),
    ]
    title = f"The papers on {_text(head['model'])}"
    style = f"<meta charset='utf-8'><title>{title}</title><style>{_CSS}</style>"
    return f"<!DOCTYPE html><html lang='en'><head>{style}</head><body>{''.join(parts)}</body></html>\n"


def _text(value: Any) -> str:
    text = "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return html.escape(text).replace(" / ", "&nbsp;/&nbsp;")  # shares in one line


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    columns = max(rows, key=len)
    head = "".join(f"<th>{_text(name)}</th>" for name in columns)
    return f"<table><tr>{head}</tr>{''.join(_row(row, columns) for row in rows)}</table>"


def _row(row: Mapping[str, Any], columns: Iterable[str]) -> str:
    """A row of one value is a sentence, over all columns."""
    if len(row) == 1:
        return f"<tr><td colspan='99'>{''.join(map(_text, row.values()))}</td></tr>"
    return f"<tr>{''.join(f'<td>{_text(row.get(name))}</td>' for name in columns)}</tr>"


def _shown(figure: Figure) -> str:
    title = f"{', '.join(figure['papers'])}: {figure['title']}"
    theirs = f"<p class='theirs'>In the paper: {_text(figure['theirs'])}</p>" if figure["theirs"] else ""
    if figure["kind"] == "table":
        content = _table(figure["rows"])
    else:
        content = f"<img alt='{_text(title)}' src='data:image/svg+xml;base64,{_plotted(figure)}'>"
    return f"<figure><figcaption>{_text(title)}</figcaption>{theirs}{content}</figure>"


def _plotted(figure: Figure) -> str:
    """An SVG in base64; the same values give the same text."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        plot = Plot(figsize=(7.5, 3.4), layout="constrained")
        ax = plot.subplots()
        _DRAW[figure["kind"]](plot, ax, figure)
        ax.set_xlabel(figure.get("x_label", ""))
        ax.set_ylabel(figure.get("y_label", ""))
        for axis, is_share in ((ax.yaxis, figure.get("percent")), (ax.xaxis, figure.get("x_percent"))):
            if is_share:
                axis.set_major_formatter(PercentFormatter(1))
        out = io.BytesIO()
        plot.savefig(out, format="svg", metadata={"Date": None})
    return base64.b64encode(out.getvalue()).decode()


def _known(values: Iterable[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _draw_lines(plot: Plot, ax: Any, figure: Figure) -> None:
    for i, (label, values) in enumerate(figure["series"].items()):
        style = {"color": _COLORS[i % len(_COLORS)], "marker": _MARKERS[i % len(_MARKERS)]}
        if label.startswith("by chance"):
            style |= {"linestyle": "--", "marker": ""}
        ax.plot(figure["x"], _known(values), label=label, **style)
    if all(isinstance(x, int) for x in figure["x"]):
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(plot, figure)


def _draw_bars(plot: Plot, ax: Any, figure: Figure) -> None:
    n = len(figure["series"])
    for i, (label, values) in enumerate(figure["series"].items()):
        places = [k + (i - (n - 1) / 2) * 0.8 / n for k in range(len(values))]
        ax.bar(places, _known(values), width=0.8 / n, label=label, color=_COLORS[i % len(_COLORS)])
    if len(figure["x"]) <= 40:
        tilt = 45 if max(len(str(x)) for x in figure["x"]) > 8 else 0
        ax.set_xticks(range(len(figure["x"])), figure["x"], rotation=tilt, ha="right" if tilt else "center")
    _legend(plot, figure)


def _draw_points(_plot: Plot, ax: Any, figure: Figure) -> None:
    ax.scatter(_known(figure["x"]), _known(figure["y"]), s=5, alpha=0.4, color=_COLORS[0], linewidths=0)


def _draw_map(plot: Plot, ax: Any, figure: Figure) -> None:
    rows = [_known(row) for row in figure["values"]]
    image = ax.imshow(rows, aspect="auto", cmap="cividis", interpolation="nearest")
    plot.colorbar(image, ax=ax, label=figure.get("color_label", ""))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))


def _legend(plot: Plot, figure: Figure) -> None:
    if len(figure["series"]) > 1:
        plot.legend(loc="outside lower center", ncols=min(5, len(figure["series"])))


_DRAW = {"lines": _draw_lines, "bars": _draw_bars, "points": _draw_points, "map": _draw_map}
