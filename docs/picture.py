# SPDX-License-Identifier: MIT
"""Draws the README's picture, docs/speed-by-memory.svg, from docs/results/q4_k_m.md.

    python docs/picture.py

Needs matplotlib: pip install matplotlib.
"""

import re
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parent
FILE_GB = 5.0
# A line's label, its arms and its colour. The last arms of a line have all experts in memory.
LINES = {
    "llama.cpp, mapped file": (("stock-128k", "stock"), "#888888"),
    "pyhobbit, the same bits": (("ours", "ours-resident"), "#1f77b4"),
}


def read(page: str) -> dict[str, list[tuple[float, float]]]:
    """Share of the file in memory and token/s, by arm."""
    found: dict[str, list[tuple[float, float]]] = {}
    for memory, arm, speed in re.findall(r"^\| (all|\d+ %) \| ([\w-]+) \| ([\d.]+) \|", page, re.MULTILINE):
        share = 1.0 if memory == "all" else float(memory.removesuffix(" %")) / 100
        found.setdefault(arm, []).append((share, float(speed)))
    return found


def main() -> None:
    found = read((DOCS / "results" / "q4_k_m.md").read_text("utf-8"))
    mpl.rcParams.update({"svg.hashsalt": "pyhobbit", "svg.fonttype": "none", "font.size": 11})
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    for label, (arms, colour) in LINES.items():
        points = sorted(point for arm in arms for point in found[arm])
        xs, ys = ([FILE_GB * share for share, _ in points], [speed for _, speed in points])
        axes.plot(xs, ys, marker="o", linewidth=2.5, color=colour, label=label)
        for x, y in zip(xs, ys, strict=True):
            below = -16 if "stock" in arms and x == FILE_GB else 7  # pyhobbit is above
            axes.annotate(
                f"{y:.3g}", (x, y), (0, below), textcoords="offset points", ha="center", color=colour
            )
    axes.set(xlabel=f"memory, GB (the model has {FILE_GB} GB)", ylabel="token/s", xlim=(0, 5.4), ylim=(0, 50))
    axes.set_title("Qwen3-30B-A3B's shape, Q4_K_M, two CPU cores, 1.3 GB/s of disk", fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(DOCS / "speed-by-memory.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
