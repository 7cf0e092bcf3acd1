# SPDX-License-Identifier: MIT
"""Draws the README's picture, docs/speed-by-memory.svg, from docs/results/many-small-experts.md.

    python docs/picture.py

Needs matplotlib: pip install matplotlib.
"""

import re
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parent
FILE_GB = 8.8
# A line's label, its arms and its colour. The last arms of a line have all experts in memory.
LINES = {
    "llama.cpp, mapped file": (("stock-128k", "stock"), "#888888"),
    "pyhobbit, the same bits": (("ours", "ours-resident"), "#1f77b4"),
    "pyhobbit, with a low tier (perplexity 16.18 for 16.08)": (("ours-eq2",), "#d95f02"),
}


def read(page: str) -> dict[str, list[tuple[float, float]]]:
    """Share of the file in memory and token/s, by arm."""
    found: dict[str, list[tuple[float, float]]] = {}
    for memory, arm, speed in re.findall(r"^\| (all|\d+ %) \| ([\w-]+) \| ([\d.]+) \|", page, re.MULTILINE):
        share = 1.0 if memory == "all" else float(memory.removesuffix(" %")) / 100
        found.setdefault(arm, []).append((share, float(speed)))
    return found


def main() -> None:
    found = read((DOCS / "results" / "many-small-experts.md").read_text("utf-8"))
    mpl.rcParams.update({"svg.hashsalt": "pyhobbit", "svg.fonttype": "none", "font.size": 11})
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    for label, (arms, colour) in LINES.items():
        points = sorted(point for arm in arms for point in found[arm])
        xs, ys = ([FILE_GB * share for share, _ in points], [speed for _, speed in points])
        axes.plot(xs, ys, marker="o", linewidth=2.5, color=colour, label=label)
        for x, y in zip(xs, ys, strict=True):
            below = -16 if "stock" in arms and x == FILE_GB else 7  # beside ours
            axes.annotate(
                f"{y:.3g}", (x, y), (0, below), textcoords="offset points", ha="center", color=colour
            )
    axes.set(xlabel="memory, GB (the model has 8.8 GB)", ylabel="token/s", xlim=(0, 9.5), ylim=(0, 25))
    axes.set_title("Qwen3-30B-A3B's shape and routing, two CPU cores, a disk of 1 GB/s", fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(DOCS / "speed-by-memory.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
