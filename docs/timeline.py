# SPDX-License-Identifier: MIT
"""Draws one decoded token of a timeline, docs/timeline.svg.

    pyhobbit bench MODEL --memory SIZE -n 64 --timeline FILE
    python docs/timeline.py FILE [TOKEN]

TOKEN counts passes from the end (default: the median of the last half by time). Needs matplotlib.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Patch

Event = dict[str, Any]

COLOURS = {
    "layers outside the cache": "#bbbbbb",
    "experts": "#1f77b4",
    "wait": "#d62728",
    "look ahead": "#9467bd",
    "plan": "#e377c2",
    "read": "#2ca02c",
    "convert": "#ff7f0e",
}


def chosen_pass(spans: list[Event], token: str | None) -> Event:
    passes = sorted((span for span in spans if span["name"] == "pass"), key=lambda span: span["ts"])
    if token is not None:
        return passes[-int(token)]
    late = sorted(passes[len(passes) // 2 :], key=lambda span: span["dur"])
    return late[len(late) // 2]


def main() -> None:
    events: list[Event] = json.loads(Path(sys.argv[1]).read_text("utf-8"))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    token = chosen_pass(spans, sys.argv[2] if len(sys.argv) > 2 else None)
    begin, end = token["ts"], token["ts"] + token["dur"]
    inside = [span for span in spans if begin <= span["ts"] < end and span["name"] in COLOURS]
    readers = sorted({span["tid"] for span in inside} - {token["tid"]})
    rows = {token["tid"]: 0} | {tid: i + 1 for i, tid in enumerate(readers)}

    mpl.rcParams.update({"svg.hashsalt": "pyhobbit", "svg.fonttype": "none", "font.size": 10})
    figure = Figure(figsize=(10, 2.6), layout="constrained")
    axes = figure.subplots()
    axes.broken_barh([(0, token["dur"] / 1e3)], (-0.4, 0.8), color=COLOURS["layers outside the cache"])
    for layer in (span for span in spans if span["name"] == "layer" and begin <= span["ts"] < end):
        axes.broken_barh([((layer["ts"] - begin) / 1e3, layer["dur"] / 1e3)], (-0.4, 0.8), color="white")
    for name, colour in COLOURS.items():
        for tid, row in rows.items():
            bars = [
                ((span["ts"] - begin) / 1e3, span["dur"] / 1e3)
                for span in inside
                if span["name"] == name and span["tid"] == tid
            ]
            axes.broken_barh(bars, (row - 0.4, 0.8), color=colour, linewidth=0)
    axes.set_yticks(range(len(rows)), ["computing", *(f"disk {i + 1}" for i in range(len(readers)))])
    axes.set(xlabel="milliseconds", xlim=(0, token["dur"] / 1e3), ylim=(len(rows) - 0.5, -0.5))
    handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9)
    figure.savefig(Path(__file__).with_name("timeline.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
