# SPDX-License-Identifier: MIT
"""Calibration: what a model does on a text, the settings that follow, and the file that keeps them."""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGUFValueType
from tqdm import tqdm

from pyhobbit.convert.write import atomic_output
from pyhobbit.errors import HobbitError
from pyhobbit.model.gguf_file import KeyValue, ints_entry, pack_header, scalar_entry, string_entry
from pyhobbit.model.model_file import model_parts, read_model_file
from pyhobbit.model.tiers import calibration_path
from pyhobbit.native.files import read_text
from pyhobbit.quality.evaluate import Chunk, Evaluator, Quality, perplexity
from pyhobbit.quality.fit import CAPACITIES, CacheFit, CacheFitter, CacheModel, Weights, cheapest_thresholds
from pyhobbit.routing.analysis import decide, own_routing_agreement, prediction, shares, unimportance
from pyhobbit.routing.observe import Observations, Recorder
from pyhobbit.routing.trace import ROUTE
from pyhobbit.settings.config import CalibrationConfig, EvaluationConfig, format_size
from pyhobbit.settings.table import KEYS

_ALIGNMENT = 32  # GGUF's default
_ARCHITECTURE = "hobbit-calibration"

_T1_STEPS = 64  # quantiles of the scores
_T2_HALVINGS = 7  # of the share that is skipped, each in two steps
_DECIMALS = 4  # of thresholds
_TYPICAL_TRIALS = 20
_MAX_ROUTES = 200_000  # replayed at once
_MAX_INPUT_BYTES = 32 << 20  # of routers' inputs
_KNOWN_ROUTING = 0.98  # of the choices, or the routers are not what they seem
_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)


@dataclass(frozen=True)
class Calibration:
    """Settings that fit a model and its low tier; see CacheConfig.

    model_bytes: size of the model's files.  low_bytes: of all experts in the low tier, 0 without one.
    residual_bytes: of a residual tier, 0 without one. They tell a calibration that belongs to something else.
    expert_uses: how often each expert was chosen, [n_layers * n_experts], layer by layer; empty: not known.
    """

    model_bytes: int
    low_bytes: int
    t1: float
    t2: float
    low_share: float
    policy: str
    weights: Weights
    residual_bytes: int = 0
    expert_uses: tuple[int, ...] = ()

    @staticmethod
    def check_place(model: Path) -> None:
        """Raises HobbitError where nothing can be stored beside the model."""
        folder = calibration_path(model).parent
        if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
            raise HobbitError(
                f"the calibration cannot be stored beside the model: {folder} is read-only; calibrate a copy "
                "of the model, or a link to it, in another folder"
            )

    def write(self, model: Path) -> Path:
        """Stores it beside the model, all or nothing; returns the file. Raises HobbitError."""
        path = calibration_path(model)
        try:
            with atomic_output(path) as temporary:
                temporary.write_bytes(pack_header(self._metadata(), [], _ALIGNMENT))
        except OSError as e:
            raise HobbitError(
                f"the calibration cannot be stored in {path}: {e.strerror}; it must lie beside the model"
            ) from e
        return path

    def _metadata(self) -> list[KeyValue]:
        floats = {"hobbit.t1": self.t1, "hobbit.t2": self.t2, "hobbit.low_share": self.low_share}
        floats.update(zip(KEYS["weights"], self.weights, strict=True))
        sizes = {"hobbit.model_bytes": self.model_bytes, "hobbit.low_bytes": self.low_bytes}
        if self.residual_bytes:
            sizes["hobbit.high_bytes"] = self.residual_bytes
        return [
            string_entry("general.architecture", _ARCHITECTURE),
            *(scalar_entry(key, GGUFValueType.UINT64, size) for key, size in sizes.items()),
            string_entry("hobbit.policy", self.policy),
            *(scalar_entry(key, GGUFValueType.FLOAT64, value) for key, value in floats.items()),
            *([ints_entry("hobbit.expert_uses", self.expert_uses)] if self.expert_uses else []),
        ]


@dataclass(frozen=True)
class LayerProfile:
    """One layer, everything in high precision. expert_use: share of the selections, by expert.

    share_*: of the selections, at the chosen thresholds.  top_weight: mean normalised weight of the best one.
    """

    layer: int
    expert_use: tuple[float, ...]
    share_high: float
    share_low: float
    share_skipped: float
    top_weight: float


@dataclass(frozen=True)
class CalibrationReport:
    """What was found, and from what. score_quantiles: of Eq. 2, without each token's best expert.

    quality: at the chosen thresholds, on the text they were chosen on.  high_bytes_per_token: with everything
    in high precision.  prediction_*: share of the experts one layer ahead that are predicted right, the best
    one and all; None where the routers are not known.  low_alone: everything in low precision; whether that
    holds the bound.
    """

    calibration: Calibration
    n_tokens: int
    n_chunks: int
    n_trials: int
    has_low_tier: bool
    bound: str
    reference_perplexity: float
    quality: Quality
    high_bytes_per_token: float
    score_quantiles: dict[float, float]
    layers: tuple[LayerProfile, ...]
    cache: CacheFit
    prediction_top1: float | None
    prediction_top_k: float | None
    low_alone: Quality | None = None
    low_alone_holds: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def summary(self) -> str:
        """For people."""
        sections = [self._text_lines(), self._layer_lines(), self._threshold_lines(), self._cache_lines()]
        return "\n".join(line for section in sections for line in section)

    def _text_lines(self) -> list[str]:
        lines = [f"text         {self.n_tokens} tokens in {self.n_chunks} parts"]
        if self.score_quantiles:
            values = ", ".join(f"{q:.0%} {value:.3f}" for q, value in self.score_quantiles.items())
            lines.append(f"scores       quantiles, without each token's best expert: {values}")
        if self.prediction_top1 is not None:
            lines.append(
                f"prediction   one layer ahead: best expert {self.prediction_top1:.1%}, "
                f"all experts {self.prediction_top_k:.1%}"
            )
        return lines

    def _layer_lines(self) -> list[str]:
        lines = ["", "layer   busiest expert   best one's weight     high      low  skipped"]
        for layer in self.layers:
            busiest = int(np.argmax(layer.expert_use))
            lines.append(
                f"{layer.layer:5}   {busiest:5} {layer.expert_use[busiest]:8.1%}   "
                f"{layer.top_weight:17.3f}   "
                f"{layer.share_high:6.1%}   {layer.share_low:6.1%}   {layer.share_skipped:6.1%}"
            )
        return [*lines, ""]

    def _threshold_lines(self) -> list[str]:
        if not self.has_low_tier:
            return [
                "thresholds   none: the file has no low tier, so everything stays in high precision; "
                "pyhobbit convert --low TYPE --sidecar MODEL adds one"
            ]
        quality = self.quality
        increase = quality.perplexity / self.reference_perplexity - 1
        lines = [
            f"thresholds   t1 = {quality.t1:g}, t2 = {quality.t2:g}, of {self.n_trials} tried ({self.bound})",
            f"quality      perplexity {quality.perplexity:.3f} ({increase:+.2%} on "
            f"{self.reference_perplexity:.3f}), KL divergence {quality.mean_kl:.2g}",
            f"experts      {quality.share_high:.1%} high, {quality.share_low:.1%} low, "
            f"{quality.share_skipped:.1%} skipped; {format_size(quality.bytes_per_token)} per token, "
            f"{quality.bytes_per_token / self.high_bytes_per_token:.0%} of what all-high reads",
        ]
        if quality.t1 == 1:
            lines.append("             no cheaper setting meets the limit: everything stays high")
        if self.low_alone is not None:
            lines.append(
                f"low alone    perplexity {self.low_alone.perplexity:.3f}, KL divergence "
                f"{self.low_alone.mean_kl:.2g}, {format_size(self.low_alone.bytes_per_token)} per token"
            )
        if self.low_alone_holds:
            lines.append("             a plain model in the low tier's type would already meet the limit")
        return lines

    def _cache_lines(self) -> list[str]:
        fit = self.cache
        names = zip(("LRU", "LFU", "LHU", "FLD"), fit.weights, strict=True)
        weights = ", ".join(f"{name} {weight:g}" for name, weight in names)
        lines = [f"cache        policy {fit.policy}; weights of Eq. 3: {weights}"]
        if self.has_low_tier:
            lines.append(f"             {fit.low_share:.0%} of the pools for the low tier")
        head = "".join(f"{capacity:>9.0%}" for capacity in CAPACITIES)
        lines.append(f"             miss cost relative to LRU, pools of{head}  of all experts")
        for name, ratios in sorted(fit.penalties.items(), key=lambda item: np.mean(item[1])):
            lines.append(f"             {name:<24}{'':4}" + "".join(f"{ratio:9.3f}" for ratio in ratios))
        return lines


#
# calibrating
#


def calibrate(model: Path, text: Path, config: CalibrationConfig) -> CalibrationReport:
    """Finds the settings for a model on a text; stores nothing. Shows its progress on standard error.

    The same text gives the same result. Raises HobbitError: a dense model, a text that is too short, a bound
    on what low precision costs for a file without a low tier, no place to store what is found.
    """
    content = read_text(text)
    Calibration.check_place(model)
    with Evaluator(model, EvaluationConfig(engine=config.engine)) as evaluator:
        bounded = config.max_kl is not None or config.max_ppl_increase is not None
        if bounded and not evaluator.has_low_tier:
            raise HobbitError(
                f"{model} has no low tier whose cost could be bounded; add one with: "
                f"pyhobbit convert --low TYPE --sidecar {model}"
            )
        chunks = evaluator.chunks(content, config.max_chunks)
        if len(chunks) < config.min_chunks:
            raise HobbitError(
                f"{text} is too short: it has {evaluator.count_tokens(content)} tokens and calibration needs "
                f"{config.min_chunks * evaluator.n_ctx}; give a longer text, or smaller parts with --ctx"
            )
        report, search = _calibrate(evaluator, model, chunks, config)
    if not report.has_low_tier:
        return report
    with Evaluator(model, EvaluationConfig(engine=config.engine, scorer="random")) as evaluator:
        low = search.measure_all_low(evaluator)
    return replace(report, low_alone=low, low_alone_holds=search.holds(low))


def _calibrate(
    evaluator: Evaluator, model: Path, chunks: list[Chunk], config: CalibrationConfig
) -> tuple[CalibrationReport, "ThresholdSearch"]:
    info = evaluator.info
    high_bytes, low_bytes = evaluator.expert_bytes
    reference, seen = profile(evaluator, chunks)
    scores = unimportance(seen.weights)
    search = ThresholdSearch(evaluator, chunks, reference, config)
    quality = search.cheapest(scores)
    cache_model = CacheModel(
        n_layers=info.n_layers,
        n_experts=info.n_experts,
        n_used=info.n_experts_used,
        low_cost=low_bytes / high_bytes,
        t1=quality.t1,
        t2=quality.t2,
        residual=info.high_is_residual,
    )
    fit = _fit_cache(cache_model, seen)
    top1, top_k = _prediction(model, config.engine.cache.sidecar, seen)
    report = CalibrationReport(
        calibration=Calibration(
            model_bytes=sum(part.size for part in model_parts(model)),
            low_bytes=info.tier_bytes_low,
            t1=quality.t1,
            t2=quality.t2,
            low_share=fit.low_share,
            policy=fit.policy,
            weights=fit.weights,
            residual_bytes=info.tier_bytes_high if info.high_is_residual else 0,
            expert_uses=_expert_uses(seen, info.n_layers, info.n_experts),
        ),
        n_tokens=sum(map(len, chunks)),
        n_chunks=len(chunks),
        n_trials=len(search.measured),
        has_low_tier=evaluator.has_low_tier,
        bound=search.bound,
        reference_perplexity=search.reference_perplexity,
        quality=quality,
        high_bytes_per_token=info.n_layers * info.n_experts_used * high_bytes,
        score_quantiles=_quantiles(scores),
        layers=_layer_profiles(seen, scores, quality, info.n_experts),
        cache=fit,
        prediction_top1=top1,
        prediction_top_k=top_k,
    )
    return report, search


def profile(evaluator: Evaluator, chunks: list[Chunk]) -> tuple[np.ndarray, Observations]:
    """The reference, and what the routers did in it. Raises HobbitError."""
    recorder = Recorder(len(chunks), evaluator.n_ctx, evaluator.info.n_layers, _MAX_INPUT_BYTES)
    with _bar("profile", sum(map(len, chunks)), "tokens") as bar, evaluator.observing(recorder):
        reference = evaluator.reference(chunks, bar.update)
    seen = recorder.observations()
    if seen.weights is None:
        raise HobbitError("this architecture's router weights are unknown, so it cannot be calibrated")
    return reference, seen


class ThresholdSearch:
    """Finds thresholds by measuring some."""

    def __init__(
        self, evaluator: Evaluator, chunks: list[Chunk], reference: np.ndarray, config: CalibrationConfig
    ) -> None:
        self._evaluator = evaluator
        self._chunks = chunks
        self._reference = reference
        self._max_kl = config.max_kl
        self._max_increase = config.max_ppl_increase
        if self._max_kl is None and self._max_increase is None:
            self._max_increase = config.default_ppl_increase
        self.reference_perplexity = perplexity(reference, chunks)
        self.measured: dict[tuple[float, float], Quality] = {}

    @property
    def bound(self) -> str:
        """What they must keep, for people."""
        bounds = []
        if self._max_increase is not None:
            bounds.append(f"perplexity at most {self._max_increase:+.3%}")
        if self._max_kl is not None:
            bounds.append(f"KL divergence at most {self._max_kl:g}")
        return ", ".join(bounds)

    def cheapest(self, scores: np.ndarray) -> Quality:
        """The thresholds that ask for the fewest bytes within the bound; scores: of the chunks, [T, L, K]."""
        n_tokens = sum(map(len, self._chunks))
        high_bytes, low_bytes = self._evaluator.expert_bytes
        low_cost = low_bytes / high_bytes
        with _bar("thresholds", _TYPICAL_TRIALS * n_tokens, "tokens") as bar:
            if low_cost > 0:
                ranked = np.sort(scores, axis=None)
                t1s, t2s = threshold_candidates(scores)
                ask = (
                    lambda t1, t2: expected_cost(ranked, low_cost, t1, t2),
                    lambda t1, t2: self.holds(self._measure(t1, t2, bar)),
                )
                coarse = cheapest_thresholds(t1s, [1.0, *t2s], *ask)
                t1, t2 = cheapest_thresholds(t1s, closer_candidates(scores, coarse[1]), *ask, best=coarse)
            else:
                t1, t2 = 1.0, 1.0
            quality = self._measure(t1, t2, bar)
            bar.total = bar.n
        return quality

    def _measure(self, t1: float, t2: float, bar: "tqdm[Any]") -> Quality:
        if (t1, t2) not in self.measured:
            quality = self._evaluator.measure(self._chunks, t1, t2, self._reference, bar.update)
            bar.set_postfix_str(f"t1 {t1:g} t2 {t2:g} KL {quality.mean_kl:.2g}")
            self.measured[t1, t2] = quality
        return self.measured[t1, t2]

    def measure_all_low(self, by_chance: Evaluator) -> Quality:
        """Everything in low precision, which Eq. 2 cannot ask for; by_chance: with the scorer "random"."""
        with _bar("low tier", sum(map(len, self._chunks)), "tokens") as bar:
            return by_chance.measure(self._chunks, 0.0, 1.0, self._reference, bar.update)

    def holds(self, quality: Quality) -> bool:
        """Whether it is within the bound."""
        increase = quality.perplexity / self.reference_perplexity - 1
        return (self._max_increase is None or increase <= self._max_increase) and (
            self._max_kl is None or quality.mean_kl <= self._max_kl
        )


def threshold_candidates(scores: np.ndarray) -> tuple[list[float], list[float]]:
    """Candidates below 1 for t1 and for t2, by quantiles of the scores of all but each token's best expert.

    t1: evenly spaced, and 0, at which all but the best experts are low.  t2: by the share that is skipped,
    closer where little is.
    """
    ranked = scores[scores > 0]
    if not ranked.size:
        return [], []
    skipped = 2.0 ** -np.arange(0, _T2_HALVINGS + 0.25, 0.5)
    t1s = np.quantile(ranked, np.arange(1, _T1_STEPS) / _T1_STEPS)
    t2s = np.quantile(ranked, 1 - skipped[1:])
    return [0.0, *_below_one(t1s)], [0.0, *_below_one(t2s)]


def closer_candidates(scores: np.ndarray, t2: float) -> list[float]:
    """Candidates for t2 on both sides of one of threshold_candidates, up to its neighbours."""
    ranked = scores[scores > 0]
    skipped = float(np.mean(ranked > t2)) if ranked.size and t2 < 1 else 0.0
    shares_ = skipped * 2.0 ** np.array([-0.375, -0.25, -0.125, 0.125, 0.25, 0.375])
    return _below_one(np.quantile(ranked, 1 - np.minimum(shares_, 1))) if skipped > 0 else []


def _below_one(values: np.ndarray) -> list[float]:
    return sorted({value for value in np.round(values, _DECIMALS).tolist() if value < 1})


def expected_cost(ranked: np.ndarray, low_cost: float, t1: float, t2: float) -> float:
    """Bytes of a selection by those of an expert in high precision, from ascending scores of Eq. 2.

    low_cost: bytes of an expert in low precision by those of one in high.
    """
    high, kept = (
        1.0 if threshold >= 1 else float(np.searchsorted(ranked, threshold, "right")) / ranked.size
        for threshold in (t1, t2)
    )
    return high + low_cost * (kept - high)


def _quantiles(scores: np.ndarray) -> dict[float, float]:
    ranked = scores[scores > 0]
    return {q: float(np.quantile(ranked, q)) for q in _QUANTILES} if ranked.size else {}


def _layer_profiles(
    seen: Observations, scores: np.ndarray, quality: Quality, n_experts: int
) -> tuple[LayerProfile, ...]:
    precisions = decide(scores, quality.t1, quality.t2)
    profiles = []
    for i, layer in enumerate(seen.layers):
        use = _uses(seen, i, n_experts) / seen.experts[:, i].size
        weights = seen.weights[:, i]
        high, low, skipped = shares(precisions[:, i])
        profiles.append(
            LayerProfile(
                layer=layer,
                expert_use=tuple(use.tolist()),
                share_high=high,
                share_low=low,
                share_skipped=skipped,
                top_weight=float(np.mean(weights.max(axis=1) / weights.sum(axis=1))),
            )
        )
    return tuple(profiles)


def _uses(seen: Observations, i: int, n_experts: int) -> np.ndarray:
    """How often each expert was chosen in the i-th of the layers seen."""
    return np.bincount(seen.experts[:, i].ravel(), minlength=n_experts)


def _expert_uses(seen: Observations, n_layers: int, n_experts: int) -> tuple[int, ...]:
    """Layers that did not run, and experts that a layer lacks, have none."""
    uses = np.zeros((n_layers, n_experts), np.int64)
    for i, layer in enumerate(seen.layers):
        uses[layer] = _uses(seen, i, n_experts)
    return tuple(uses.ravel().tolist())


def _fit_cache(model: CacheModel, seen: Observations) -> CacheFit:
    """Weights are fitted to the first half of the text, the policy is chosen on the second."""
    n_tokens, n_layers, n_used = seen.experts.shape
    half = n_tokens // 2
    n_at_once = max(1, min(half, _MAX_ROUTES // (n_layers * n_used)))
    with _bar("cache", None, "replays") as bar:
        return CacheFitter(model, bar.update).fit(
            routes(seen, slice(0, n_at_once)), routes(seen, slice(half, half + n_at_once))
        )


def routes(seen: Observations, tokens: slice) -> np.ndarray:
    """Some of the tokens as an array of trace.ROUTE, all counted, as if decoded one by one."""
    chosen = np.empty(seen.experts[tokens].shape, ROUTE)
    chosen["sequence"] = seen.sequences[tokens, None, None]
    chosen["token"] = np.arange(len(seen.sequences))[tokens, None, None]
    chosen["layer"] = np.array(seen.layers)[None, :, None]
    chosen["expert"] = seen.experts[tokens]
    chosen["weight"] = seen.weights[tokens]
    chosen["counted"] = 1
    return chosen.ravel()


def _prediction(model: Path, sidecar: Path | None, seen: Observations) -> tuple[float | None, float | None]:
    """Shares of the best and of all experts that the next layer's router predicts."""
    file = read_model_file(model, sidecar)
    routers = file.routers([file.blocks[layer] for layer in seen.layers])
    if routers is None or seen.inputs is None or len(seen.layers) < 2:
        return None, None
    experts = seen.experts[seen.input_tokens]
    if own_routing_agreement(seen.inputs, experts, routers) < _KNOWN_ROUTING:
        return None, None
    found = prediction(seen.inputs, experts, routers, rescale=False)
    return float(np.nanmean(found.top1[0])), float(np.nanmean(found.top_k[0]))


@contextlib.contextmanager
def _bar(what: str, total: int | None, unit: str) -> Iterator["tqdm[Any]"]:
    interval = 0.1 if sys.stderr.isatty() else 5  # seconds; a log file gets few lines
    with tqdm(desc=what, total=total, unit=f" {unit}", mininterval=interval) as bar:
        yield bar
