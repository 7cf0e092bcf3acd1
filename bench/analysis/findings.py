# SPDX-License-Identifier: MIT
"""The analyses of one run put together, as values for JSON."""

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


@dataclass(frozen=True)
class GateFindings:
    """Eq. 2's decisions for gate weights.

    scores: [T, n] of a token's selections in all layers.  mix: shares of selections high, low and skipped at
    the thresholds.
    """

    scores: np.ndarray
    mix: tuple[float, float, float]
    high_use: figures.HighUse


@dataclass(frozen=True)
class AheadFindings:
    """Predictions of later layers from routers' inputs, of n_tokens tokens. None: see `notes` of Findings."""

    n_tokens: int
    similarity: np.ndarray
    prediction: figures.Prediction | None


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
    precisions, used = decide(scores, t1, t2), seen.is_used
    return GateFindings(
        scores=scores[:, used],
        mix=shares(precisions[:, used]),
        high_use=figures.high_use(seen.experts, precisions, n_experts),
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
    return AheadFindings(
        n_tokens=len(seen.inputs),
        similarity=figures.similarity(seen.inputs),
        prediction=None if routers is None else figures.prediction(seen.inputs, chosen, routers),
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
