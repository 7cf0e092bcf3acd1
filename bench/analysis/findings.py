# SPDX-License-Identifier: MIT
"""The analyses of one run put together: as values for JSON and as tables for people."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.analysis import figures
from pyhobbit.model.router import Router
from pyhobbit.quality.calibration import routes
from pyhobbit.routing.observe import Observations
from pyhobbit.routing.rules import decide, shares, unimportance
from pyhobbit.routing.trace import Simulation, recall_by_layer
from pyhobbit.settings.table import OPTIONS

if TYPE_CHECKING:
    from pyhobbit.quality.evaluate import Quality

_OWN_ROUTING = 0.99  # below, a layer's router is not understood
_NOT_BY_ROUTES = ("router", "given")  # predictors that need more than routes
_MAX_SHOWN_AHEAD = 2  # layers

CONFIDENT = 0.7
"""Probability above which MoBiLE (section III-A) keeps the token of its small model."""

_CARRY_OVER_OF_MIXTRAL = 0.907  # DAOP, Table II, between prompt and answer


@dataclass(frozen=True)
class GateFindings:
    """Eq. 2's decisions for gate weights.

    scores: [T, L, K].  mix: shares of selections high, low and skipped at the thresholds.
    """

    scores: np.ndarray
    mix: tuple[float, float, float]
    high_use: figures.HighUse


@dataclass(frozen=True)
class AheadFindings:
    """Predictions of later layers from routers' inputs, of n_tokens tokens.

    rescaled: with the gain of the later layer's norm.  None: see `notes` of Findings.
    """

    n_tokens: int
    similarity: np.ndarray
    prediction: figures.Prediction | None
    rescaled: figures.Prediction | None


@dataclass(frozen=True)
class Cost:
    """Quality with the least important `share` of selections, those scored above `threshold`, not in high."""

    share: float
    threshold: float
    replaced: "Quality | None"
    skipped: "Quality"


@dataclass(frozen=True)
class Findings:
    """All analyses of a run in high precision.

    blocks: numbers of the L layers in the file.  t1, t2: thresholds of gates.mix and gates.high_use.
    importance: without the first token of each sequence, whose outputs can be a hundred times as large.
    recall: by predictor, share of each layer's experts that it names in advance: [L], NaN where it cannot.
    notes: what is missing, and why.  n_in_text: sequences that the text has, of which n_sequences were run.
    carry_over: [L], see figures.carry_over().
    perplexity, confident, cost: measured beside it; None, None and [] where they were not.
    confident: share of tokens whose most probable successor has a probability above CONFIDENT.
    """

    blocks: list[int]
    n_tokens: int
    n_sequences: int
    n_experts: int
    n_used: int
    t1: float
    t2: float
    importance: figures.Importance | None
    gates: GateFindings | None
    ahead: AheadFindings | None
    recall: dict[str, np.ndarray]
    reuse: figures.Reuse
    preference: figures.Preference
    carry_over: np.ndarray
    notes: list[str]
    n_in_text: int | None = None
    perplexity: float | None = None
    confident: float | None = None
    cost: list[Cost] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; NaN becomes None. Scores are given as quantiles."""
        result = asdict(self)
        if self.gates is not None:
            probabilities = np.linspace(0, 1, 101)
            result["gates"]["scores"] = {
                "probability": probabilities,
                "quantile": np.quantile(self.gates.scores, probabilities),
            }
        return _plain(result)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key.rstrip("_"): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return _plain(value.tolist())
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def find(seen: Observations, routers: list[Router] | None, n_experts: int, t1: float, t2: float) -> Findings:
    """Everything that follows from the routing alone. routers: of the layers seen, None where not known."""
    notes: list[str] = []
    magnitudes = important(seen)
    ahead = _ahead_findings(seen, routers, notes)
    return Findings(
        blocks=seen.layers,
        n_tokens=len(seen.sequences),
        n_sequences=len(np.unique(seen.sequences)),
        n_experts=n_experts,
        n_used=seen.experts.shape[2],
        t1=t1,
        t2=t2,
        importance=None if magnitudes is None else figures.importance(*magnitudes),
        gates=_gate_findings(seen, n_experts, t1, t2, notes),
        ahead=ahead,
        recall=_recall(seen, ahead, n_experts),
        reuse=figures.reuse(seen.experts, seen.sequences, n_experts),
        preference=figures.preference(seen.experts, seen.sequences, n_experts),
        carry_over=figures.carry_over(seen.experts, seen.sequences, n_experts),
        notes=notes,
    )


def _gate_findings(
    seen: Observations, n_experts: int, t1: float, t2: float, notes: list[str]
) -> GateFindings | None:
    if seen.weights is None:
        notes.append("gate weights and their scores: the engine does not see them in this architecture")
        return None
    if seen.experts.shape[2] == 1:
        notes.append("scores: the only expert of a token always runs in high precision")
        return None
    scores = unimportance(seen.weights)
    precisions = decide(scores, t1, t2)
    return GateFindings(
        scores=scores, mix=shares(precisions), high_use=figures.high_use(seen.experts, precisions, n_experts)
    )


def important(seen: Observations) -> tuple[np.ndarray, np.ndarray] | None:
    """Weights and output norms of all but the first token of each sequence; None where not known."""
    if seen.weights is None or seen.output_norms is None:
        return None
    later = np.flatnonzero(seen.sequences[1:] == seen.sequences[:-1]) + 1
    return seen.weights[later], seen.output_norms[later]


def _ahead_findings(
    seen: Observations, routers: list[Router] | None, notes: list[str]
) -> AheadFindings | None:
    if seen.inputs is None:
        notes.append(
            "router inputs and predictions: the engine does not see this architecture's router inputs"
        )
        return None
    if len(seen.layers) < 2:
        notes.append("router inputs and predictions: only one layer has routed experts")
        return None
    chosen = seen.experts[seen.input_tokens]
    if routers is None or figures.own_routing_agreement(seen.inputs, chosen, routers) < _OWN_ROUTING:
        notes.append("predictions: the file's routers alone do not explain what this architecture chooses")
        routers = None
    has_gains = routers is not None and all(router.gain is not None for router in routers)
    return AheadFindings(
        n_tokens=len(seen.inputs),
        similarity=figures.similarity(seen.inputs),
        prediction=None if routers is None else figures.prediction(seen.inputs, chosen, routers, False),
        rescaled=figures.prediction(seen.inputs, chosen, routers, True) if routers and has_gains else None,
    )


def _recall(seen: Observations, ahead: AheadFindings | None, n_experts: int) -> dict[str, np.ndarray]:
    """Recall of each predictor, by layer. Those that need no routers learn while the text runs, token by
    token."""
    n_layers = len(seen.layers)
    if n_layers < 2:
        return {}
    recall = {}
    if ahead is not None and ahead.prediction is not None:
        for distance in range(1, min(_MAX_SHOWN_AHEAD, n_layers - 1) + 1):
            of_source = ahead.prediction.top_k[distance - 1, : n_layers - distance]
            name = "router" if distance == 1 else f"router, {distance} ahead"
            recall[name] = np.concatenate([np.full(distance, np.nan), of_source])
    for name in (each for each in OPTIONS["predictor"][0].choices if each not in _NOT_BY_ROUTES):
        simulation = Simulation(
            n_layers=seen.layers[-1] + 1,
            n_experts=n_experts,
            n_used=seen.experts.shape[2],
            slots_high=0,
            predictor=name,
        )
        recall[name] = recall_by_layer(routes(seen, slice(None)), simulation)[seen.layers]
    return recall


#
# tables
#


def tables(found: Findings) -> str:
    """The findings for people."""
    size = f"{found.n_tokens} tokens in {found.n_sequences} sequences"
    if found.n_in_text is not None and found.n_in_text > found.n_sequences:
        size += f", evenly spaced, of {found.n_in_text} in the text"
    parts = [size]
    if found.perplexity is not None:
        parts[0] += f"; perplexity {found.perplexity:.3f} in high precision"
    if found.confident is not None:
        parts[0] += (
            f"\nthe most probable token has a probability above {CONFIDENT:g} (MoBiLE's criterion) "
            f"in {found.confident:.1%} of the cases"
        )
    if found.importance is not None:
        parts.append(_importance_text(found.importance))
    if found.gates is not None:
        parts.append(_scores_text(found, found.gates))
    if found.ahead is not None:
        parts.append(_ahead_table(found, found.ahead))
    if found.recall:
        parts.append(_recall_table(found))
    parts.append(_use_table(found))
    if found.gates is not None:
        parts.append(_high_use_table(found, found.gates.high_use))
    if found.cost:
        parts.append(_cost_table(found))
    parts += [f"not shown: {note}" for note in found.notes]
    return "\n\n".join(parts)


def _importance_text(found: figures.Importance) -> str:
    if not np.isfinite(found.per_layer).any():
        return "Gate weights (Fig. 5a): all are equal"
    lines = [
        "Gate weight |G| and contribution |G E(x)| (Fig. 5a)",
        f"  Pearson's r {found.overall:.3f}; by layer {np.nanmin(found.per_layer):.3f} to "
        f"{np.nanmax(found.per_layer):.3f}; of ranks {found.by_rank:.3f}",
    ]
    if np.isfinite(found.same_least):
        lines.append(
            f"  both name the same expert as a token's least important: {found.same_least:.1%} of cases"
        )
    return "\n".join(lines)


def _scores_text(found: Findings, gates: GateFindings) -> str:
    high, low, skipped = gates.mix
    return (
        f"Scores of Eq. 2 (Fig. 5b) at t1 = {found.t1:g}, t2 = {found.t2:g}\n"
        f"  {high:.1%} of the selections in high precision, {low:.1%} in low, {skipped:.1%} skipped"
    )


def _ahead_table(found: Findings, ahead: AheadFindings) -> str:
    columns = [[f"{value:.3f}" for value in _row_means(ahead.similarity)]]
    header = ["layers ahead", "cosine"]
    chance = ["by chance", ""]
    if ahead.prediction is not None:
        result = ahead.prediction
        accuracies = [("top-1", result.top1, result.chance_top1)]
        if found.n_used > 1:
            accuracies.append((f"top-{found.n_used}", result.top_k, result.chance_top_k))
        for name, values, by_chance in accuracies:
            header.append(name)
            columns.append(_percents(_row_means(values)))
            chance.append(f"{by_chance:.1%}")
    n_rows = min(figures.MAX_AHEAD, len(found.blocks) - 1)
    rows = [[str(i + 1), *(column[i] for column in columns)] for i in range(n_rows)]
    rows += [chance] if ahead.prediction is not None else []
    title = f"Router inputs of later layers and prediction of their experts (Fig. 7), {ahead.n_tokens} tokens"
    return f"{title}\n{format_table(header, rows)}"


def _recall_table(found: Findings) -> str:
    header = ["layer", *found.recall]
    rows = [
        [name if name != "nan%" else "-" for name in row]
        for row in _by_layer(found, [*found.recall.values()])
    ]
    means = ["mean", *_percents(np.array([np.nanmean(values) for values in found.recall.values()]))]
    title = "Share of a layer's experts that each predictor names in advance"
    return f"{title}\n{format_table(header, [*rows[1:], means])}"


def _use_table(found: Findings) -> str:
    header = [
        "layer",
        "reused",
        "best reused",
        "any reused",
        "sequences differ by",
        "by chance",
        "halves alike",
    ]
    columns = [
        found.reuse.share,
        found.reuse.top1,
        found.reuse.any_,
        found.preference.distance,
        found.preference.chance_distance,
        found.carry_over,
    ]
    chances = [found.reuse.chance_top1, found.reuse.chance_top1, found.reuse.chance_any]
    chance = ["by chance", *_percents(np.array(chances)), "", "", ""]
    rows = [*_by_layer(found, columns), chance]
    title = "Expert reuse by the next token and preferences of sequences (Fig. 10)"
    alike = (
        f"  halves alike: cosine of a sequence's uses in its first and second half, mean "
        f"{np.mean(found.carry_over):.3f}; DAOP's Eq. 1 has {_CARRY_OVER_OF_MIXTRAL} for Mixtral 8x7B"
    )
    return f"{title}\n{format_table(header, rows)}\n{alike}"


def _high_use_table(found: Findings, use: figures.HighUse) -> str:
    share = np.divide(use.high, use.uses, out=np.full(use.uses.shape, np.nan), where=use.uses > 0)
    header = ["layer", "least", "most", "order by LFU and LHU differs"]
    rows = _by_layer(found, [np.nanmin(share, axis=1), np.nanmax(share, axis=1), use.order_differs])
    return f"Share of each expert's uses in high precision (Fig. 11)\n{format_table(header, rows)}"


def _by_layer(found: Findings, columns: Sequence[np.ndarray]) -> list[list[str]]:
    return [
        [str(block), *cells] for block, *cells in zip(found.blocks, *map(_percents, columns), strict=True)
    ]


def _cost_table(found: Findings) -> str:
    has_low = found.cost[0].replaced is not None
    figures = ["mean KL", "99 % KL", "same top-1"]
    header = ["share", "threshold", *(["low precision", *figures] if has_low else []), "skipped", *figures]
    rows = []
    for cost in found.cost:
        measured = ([cost.replaced] if cost.replaced is not None else []) + [cost.skipped]
        cells = [cell for quality in measured for cell in _quality_cells(quality)]
        rows.append([f"{cost.share:.0%}", f"{cost.threshold:.3f}", *cells])
    title = "Perplexity when the least important selections are replaced or skipped (Fig. 3b)"
    return f"{title}\n{format_table(header, rows)}"


def _quality_cells(quality: "Quality") -> tuple[str, ...]:
    q = quality
    return f"{q.perplexity:.3f}", f"{q.mean_kl:.2g}", f"{q.p99_kl:.2g}", f"{q.same_top1:.1%}"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns, the first left-aligned, indented by two spaces."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = (
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in (header, *rows)
    )
    return "\n".join(f"  {line.rstrip()}" for line in lines)


def _row_means(rows: np.ndarray) -> np.ndarray:
    n_known = np.isfinite(rows).sum(axis=1)
    sums = np.nansum(rows, axis=1)
    return np.divide(sums, n_known, out=np.full(len(rows), np.nan), where=n_known > 0)


def _percents(values: np.ndarray) -> list[str]:
    return [f"{value:.1%}" for value in values]
