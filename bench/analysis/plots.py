# SPDX-License-Identifier: MIT
"""The plots of bench.analyse, one PNG each. Colours are told apart by the colour-blind too."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.analysis import figures
from bench.analysis.findings import important
from pyhobbit.errors import HobbitError
from pyhobbit.routing.rules import decide, shares

try:
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter
except ImportError as e:
    raise HobbitError(f"plots need matplotlib ({e}); install it with: pip install matplotlib") from e

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from bench.analysis.findings import Findings
    from pyhobbit.routing.observe import Observations

# Okabe and Ito's colours
_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#666666"
_LIGHT = "#9CCBE8"
_SERIES = (_BLUE, _ORANGE, _GREEN, _RED)
_MARKERS = ("o", "s", "^", "D")
_MAP = "cividis"
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "lines.markersize": 4,
    "savefig.dpi": 150,
}
_MANY_BARS = 40


def write(found: "Findings", seen: "Observations", folder: Path) -> list[Path]:
    """Writes a PNG for each analysis; the same findings give the same files. The folder exists."""
    paths: list[Path] = []
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        for name, figure in _figures(found, seen):
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1], metadata={"Software": None})
    return paths


def _figures(found: "Findings", seen: "Observations") -> Iterator[tuple[str, Figure]]:
    """Figures. For a property of single layers, the layer that shows it best is drawn."""
    magnitudes = important(seen)
    if found.importance is not None and magnitudes is not None:
        relative = figures.relative_importance(*magnitudes)
        yield "importance", importance(found.blocks, *relative, found.importance)
    if found.gates is not None:
        yield "scores", scores(found.gates.scores, found.t1, found.t2)
        use = found.gates.high_use
        layer = int(use.order_differs.argmax())
        yield (
            "high-precision-use",
            high_use(found.blocks[layer], use.uses[layer], use.high[layer], found.t1),
        )
    if found.ahead is not None:
        yield "similarity", similarity(found.blocks, found.ahead.similarity)
        if found.ahead.prediction is not None:
            yield "prediction", prediction(found.blocks, found.ahead.prediction, found.n_used)
    yield "reuse", reuse(found.blocks, found.reuse, found.n_used)
    layer = int(found.preference.distance.argmax())
    yield "sequences", preference(found.blocks[layer], found.preference.frequency[:, layer])
    if found.cost and found.perplexity is not None:
        replaced = [(point.share, point.replaced.perplexity) for point in found.cost if point.replaced]
        skipped = [(point.share, point.skipped.perplexity) for point in found.cost]
        yield "skip-or-replace", cost(found.perplexity, replaced, skipped)


def _panels(n: int, width: float, height: float = 3.6) -> tuple[Figure, "Sequence[Axes]"]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, n, squeeze=False)[0]


def _by_layer(ax: "Axes", layers: Sequence[int]) -> None:
    ax.set_xlabel("layer")
    ax.set_xlim(layers[0] - 0.5, layers[-1] + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _percent_axis(ax: "Axes", top: float = 1.0) -> None:
    ax.set_ylim(0, top)
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def _legend_below(figure: Figure, ax: "Axes", n_columns: int) -> None:
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=n_columns, frameon=False)


def importance(
    layers: Sequence[int], gate: np.ndarray, contribution: np.ndarray, result: figures.Importance
) -> Figure:
    """Fig. 5a: |G| against |G E(x)|, and their correlation by layer."""
    figure, (left, right) = _panels(2, 9)
    is_used = ~np.isnan(contribution)
    gate, contribution = gate[is_used], contribution[is_used]
    top = [float(np.quantile(values, 0.995)) for values in (gate, contribution)]
    bins = left.hexbin(
        gate, contribution, gridsize=40, bins="log", mincnt=1, extent=(0, top[0], 0, top[1]), cmap=_MAP
    )
    figure.colorbar(bins, ax=left, label="selections")
    left.set(xlim=(0, top[0]), ylim=(0, top[1]))
    left.set_xlabel("gate weight |G| / mean of the layer")
    left.set_ylabel("contribution |G E(x)| / mean of the layer")
    left.set_title(f"Gate weight and contribution, r = {result.overall:.2f}")
    right.bar(layers, result.per_layer, color=_BLUE)
    right.axhline(0, color="black", linewidth=0.8)
    right.set_ylim(min(0, np.nanmin(result.per_layer, initial=0) * 1.1), 1)
    right.set_ylabel("Pearson's r of |G| and |G E(x)|")
    right.set_title("Correlation by layer")
    _by_layer(right, layers)
    return figure


def scores(values: np.ndarray, t1: float, t2: float) -> Figure:
    """Fig. 5b: the distribution of the scores of Eq. 2, and what the thresholds make of it."""
    figure, (ax,) = _panels(1, 6.5)
    ranked = np.concatenate([np.sort(values, axis=None), [1]])
    up_to = np.minimum(np.arange(1, ranked.size + 1) / (ranked.size - 1), 1)
    ax.plot(ranked, up_to, color="black", drawstyle="steps-post")
    edges = (0.0, t1, max(t1, t2), 1.0)
    parts = shares(decide(values, t1, t2))
    for name, color, share, start, end in zip(
        ("high", "low", "skipped"), (_BLUE, _ORANGE, _GREY), parts, edges[:-1], edges[1:], strict=True
    ):
        if end > start:
            ax.axvspan(start, end, color=color, alpha=0.25, linewidth=0, label=f"{name}: {share:.1%}")
    ax.set_xlim(0, 1)
    _percent_axis(ax)
    ax.set_xlabel("unimportance score s (sum of the weights ranked before)")
    ax.set_ylabel("selections with a score up to s")
    ax.set_title(f"Scores of the selected experts, t1 = {t1:g}, t2 = {t2:g}")
    _legend_below(figure, ax, 3)
    return figure


def _lines_ahead(ax: "Axes", layers: Sequence[int], rows: np.ndarray) -> None:
    for ahead, (row, color, marker) in enumerate(zip(rows, _SERIES, _MARKERS, strict=True), 1):
        if not np.isnan(row).all():
            label = "next layer" if ahead == 1 else f"{ahead} layers ahead"
            ax.plot(layers, row, color=color, marker=marker, label=label)
    _by_layer(ax, layers[:-1])


def similarity(layers: Sequence[int], rows: np.ndarray) -> Figure:
    """Fig. 7a: cosine of the router inputs of a layer and of those after it."""
    figure, (ax,) = _panels(1, 6.5)
    _lines_ahead(ax, layers, rows)
    ax.set_ylim(np.floor(10 * np.nanmin(rows, initial=0.9) - 0.5) / 10, 1)
    ax.set_ylabel("mean cosine similarity")
    ax.set_title("Router inputs of a layer and of later layers")
    _legend_below(figure, ax, 4)
    return figure


def prediction(layers: Sequence[int], result: figures.Prediction, n_used: int) -> Figure:
    """Fig. 7b: accuracy of predicting a later layer's choice from a layer's router input."""
    parts = [(result.top1, result.chance_top1, "Top-1: the best expert was predicted as the best")]
    if n_used > 1:
        title = f"Top-{n_used}: share of chosen experts that were predicted"
        parts.append((result.top_k, result.chance_top_k, title))
    figure, axes = _panels(len(parts), 9 if n_used > 1 else 6.5)
    for ax, (rows, chance, title) in zip(axes, parts, strict=True):
        _lines_ahead(ax, layers, rows)
        ax.axhline(chance, color=_GREY, linestyle="--", linewidth=1, label="chance")
        _percent_axis(ax)
        ax.set_xlabel("layer whose router input is used")
        ax.set_title(title)
    axes[0].set_ylabel("accuracy")
    _legend_below(figure, axes[0], 5)
    return figure


def reuse(layers: Sequence[int], result: figures.Reuse, n_used: int) -> Figure:
    """Fig. 10a: use of a token's experts by the next token."""
    figure, (ax,) = _panels(1, 6.5)
    lines = [(result.top1, result.chance_top1, _ORANGE, "s", "its best expert")]
    if n_used > 1:
        lines.insert(0, (result.any_, result.chance_any, _BLUE, "o", f"at least one of its {n_used} experts"))
    for values, chance, color, marker, label in lines:
        ax.plot(layers, values, color=color, marker=marker, label=label)
        ax.axhline(chance, color=color, linestyle="--", linewidth=1, label="by chance")
    _by_layer(ax, layers)
    _percent_axis(ax)
    ax.set_ylabel("share of the tokens")
    ax.set_title("Experts reused by the next token")
    _legend_below(figure, ax, 2)
    return figure


def preference(layer: int, frequency: np.ndarray) -> Figure:
    """Fig. 10b: how often each sequence uses each expert of one layer; frequency: [S, E]."""
    figure, (ax,) = _panels(1, 6.5, min(8, 3 + 0.12 * len(frequency)))
    image = ax.imshow(frequency, aspect="auto", cmap=_MAP, vmin=0, interpolation="nearest")
    bar = figure.colorbar(image, ax=ax, label="share of its selections")
    bar.ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0 if frequency.max() > 0.05 else 1))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("expert")
    ax.set_ylabel("sequence")
    ax.set_title(f"Expert use by sequence, layer {layer}")
    ax.spines[:].set_visible(False)
    return figure


def high_use(layer: int, uses: np.ndarray, high: np.ndarray, t1: float) -> Figure:
    """Fig. 11a: how often each expert of one layer is used, and how often in high precision; counts: [E]."""
    n_experts = len(uses)
    figure, (ax,) = _panels(1, 6.5 if n_experts <= _MANY_BARS else 9)
    experts = np.arange(n_experts)
    ax.bar(experts, uses, color=_LIGHT, label="all uses")
    ax.bar(experts, high, color=_BLUE, label="uses in high precision")
    ax.set_xlim(-0.6, n_experts - 0.4)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("expert")
    ax.set_ylabel("selections")
    ax.set_title(f"Expert use in layer {layer}, t1 = {t1:g}")
    _legend_below(figure, ax, 2)
    return figure


def cost(
    baseline: float, replaced: Sequence[tuple[float, float]], skipped: Sequence[tuple[float, float]]
) -> Figure:
    """Fig. 3b: perplexity by the share of selections replaced or skipped; (share, perplexity) pairs."""
    figure, (ax,) = _panels(1, 6.5)
    for points, color, marker, label in (
        (skipped, _RED, "s", "skipped"),
        (replaced, _BLUE, "o", "in low precision"),
    ):
        if points:
            ax.plot(*zip((0.0, baseline), *points, strict=True), color=color, marker=marker, label=label)
    ax.axhline(baseline, color=_GREY, linestyle="--", linewidth=1, label="all in high precision")
    ax.set_xlim(left=0)
    ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.set_xlabel("share of selections, least important first")
    ax.set_ylabel("perplexity")
    ax.set_title("Perplexity when the least important experts are skipped or replaced")
    _legend_below(figure, ax, 3)
    return figure
