# SPDX-License-Identifier: MIT
"""Calibration: what a model does on a text, and the settings that follow."""

import hashlib
import math
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from pyhobbit._tables import RULES
from pyhobbit.engine.stats import ModelInfo
from pyhobbit.errors import HobbitError
from pyhobbit.model.long_work import progress_bar
from pyhobbit.model.model_file import model_parts
from pyhobbit.native.files import read_text
from pyhobbit.quality import search
from pyhobbit.quality.costs import CostRuns
from pyhobbit.quality.evaluate import CONFIDENCE, Chunk, Costs, Evaluator, Memo, Progress, Quality
from pyhobbit.quality.fit import CacheFitter, Weights, simulation_of
from pyhobbit.quality.search import TYPICAL_CHECKS, TYPICAL_TRIALS, Bound, Trials
from pyhobbit.quality.stored import Calibration, Measurements, digest_of
from pyhobbit.routing.observe import Observations, Recorder, observed
from pyhobbit.routing.paths import path_table
from pyhobbit.routing.rules import unimportance
from pyhobbit.routing.trace import ROUTE
from pyhobbit.settings.config import CalibrationConfig, counted_tokens, format_duration

_MAX_ROUTES = 200_000  # replayed at once
_FAST = 4.0  # the limit of the quality fast, by the one that is given
_RUNS_PER_LAYER = 2  # runs that measure a layer's costs
_ENOUGH_S = 5.0  # seconds of chunks, for an estimate of the whole time


@dataclass(frozen=True)
class _Known:
    """A model and a text, in high precision. n_fit: chunks of the fit; those after them check the result."""

    info: ModelInfo
    chunks: list[Chunk]
    n_fit: int
    reference: np.ndarray
    seen: Observations
    bound: Bound
    memo: Measurements

    @property
    def n_tokens(self) -> int:
        return sum(map(len, self.chunks))

    def first(self, n_chunks: int) -> Observations:
        """The routing of so many chunks."""
        return self.seen.first(sum(map(len, self.chunks[:n_chunks])))


@dataclass(frozen=True)
class _Found:
    """The best numbers of a rule, their check, and costs. fast: with _FAST times the limit."""

    rule: str
    quality: Quality
    check: Quality | None
    fast: Quality
    costs: Costs | None


@dataclass(frozen=True)
class CalibrationReport:
    """Results of a calibration, and their basis.

    calibration: is stored beside the model.  n_tokens, n_chunks: of the text that was used. has_low_tier:
    without one only the cache is fitted. bound: limit on the loss of quality, for people.
    high_bytes_per_token: with everything in high precision.
    quality: of the rule, on the text its numbers were chosen on. check: of the same settings on the half that
    the fit has not seen; None without one.
    """

    calibration: Calibration
    n_tokens: int
    n_chunks: int
    has_low_tier: bool
    bound: str
    quality: Quality
    check: Quality | None
    high_bytes_per_token: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON. None: infinite, or not known."""
        values = asdict(self)
        del values["calibration"]["paths"]  # long, and for the engine alone
        return {name: _for_json(value) for name, value in values.items()}


def calibrate(model: Path, text: Path, config: CalibrationConfig) -> CalibrationReport:
    """Finds the settings for a model on a text; stores nothing. Shows its progress on standard error.

    The same text gives the same result. Raises HobbitError: a dense model, a text that is too short, a bound
    on what low precision costs for a file without a low tier, no place to store what is found.
    """
    content = read_text(text)
    Calibration.check_place(model)
    with Evaluator(model, config.engine) as evaluator:
        chunks = _chunks(evaluator, model, text, content, config)
        memo = _measurements(evaluator, model, content, chunks, config.engine.cache.sidecar)
        known = _know(evaluator, chunks, memo, config)
        if config.rule == "gate" or not known.info.has_low_tier:
            return _report(model, known, _by_gate(evaluator, known))
    with Evaluator(model, config.engine, rule=config.rule) as evaluator:
        return _report(model, known, _by_price(evaluator, known, config))


def _chunks(
    evaluator: Evaluator, model: Path, text: Path, content: str, config: CalibrationConfig
) -> list[Chunk]:
    if evaluator.info.n_absent_low:
        raise HobbitError(f"{model} has each expert once: calibrate the model that it was made from")
    if config.max_kl is not None and not evaluator.info.has_low_tier:
        raise HobbitError(
            f"{model} has no low tier whose cost could be bounded; add one with: "
            f"pyhobbit convert --sidecar {shlex.quote(str(model))}"
        )
    chunks = evaluator.chunks(content, config.max_chunks)
    if len(chunks) < config.min_chunks:
        raise HobbitError(
            f"{text} is too short: it has {counted_tokens(evaluator.count_tokens(content))} and calibration "
            f"needs {config.min_chunks * evaluator.n_ctx}; give a longer text, or smaller parts with --ctx"
        )
    is_checked = config.n_check(len(chunks)) > 0
    return [*chunks[::2], *chunks[1::2]] if is_checked else chunks  # the ones that check come last


def _measurements(
    evaluator: Evaluator, model: Path, content: str, chunks: list[Chunk], sidecar: Path | None
) -> Measurements:
    key = {
        "model": digest_of(model, sidecar),
        "text": hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest(),
        "n_ctx": evaluator.n_ctx,
        "n_chunks": len(chunks),
    }
    memo = Measurements(Measurements.path_of(model), key)
    if memo:
        _say(f"{len(memo)} measurements of a stopped calibration are taken from {memo.path}")
    return memo


def _know(evaluator: Evaluator, chunks: list[Chunk], memo: Measurements, config: CalibrationConfig) -> _Known:
    on_chunk = say_once(lambda chunk_s: _say(_takes(chunk_s, evaluator, len(chunks), config)), len(chunks))
    reference, seen = profile(evaluator, chunks, on_chunk)
    n_check = config.n_check(len(chunks)) if evaluator.info.has_low_tier else 0
    return _Known(
        info=evaluator.info,
        chunks=chunks,
        n_fit=len(chunks) - n_check,
        reference=reference,
        seen=seen,
        bound=Bound(config.default_max_kl if config.max_kl is None else config.max_kl, n_check > 0),
        memo=memo,
    )


def say_once(say: Callable[[float], None], n_chunks: int) -> Progress:
    """Calls `say` with seconds per chunk once enough are done, but for the first, which fills the cache."""
    ends: list[float] = []

    def on_chunk(_n_tokens: int) -> None:
        ends.append(time.perf_counter())
        was, now = (end - ends[0] for end in (ends[-2:][0], ends[-1]))
        if was < _ENOUGH_S and (now >= _ENOUGH_S or len(ends) == n_chunks):
            say(now / (len(ends) - 1))

    return on_chunk


def _takes(chunk_s: float, evaluator: Evaluator, n_chunks: int, config: CalibrationConfig) -> str:
    """How long it takes, from the time of one chunk, and what fewer chunks would take."""
    info = evaluator.info
    n_costs = _n_cost_runs(config, info.n_layers, info.n_all_experts)

    def seconds(n: int) -> float:
        if not evaluator.info.has_low_tier:
            return chunk_s * n
        n_check = config.n_check(n)
        n_trials = (n - n_check) * TYPICAL_TRIALS[config.rule]
        n_checks = n_check * TYPICAL_CHECKS
        return chunk_s * (n + n_trials + n_checks + min(n - n_check, config.cost_chunks) * n_costs)

    whole = format_duration(seconds(n_chunks))
    text = f"this takes about {whole} for {n_chunks} chunks of {evaluator.n_ctx} tokens"
    fewer = max(config.min_checked, n_chunks // 4)
    if fewer < n_chunks:
        text += f"; --chunks {fewer} would take {format_duration(seconds(fewer))}"
    return f"{text}. Ctrl-C keeps what is measured."


def _n_cost_runs(config: CalibrationConfig, n_layers: int, n_experts: int) -> int:
    """The number of runs that measure costs. n_experts: of all layers."""
    return {"edgemoe": n_experts, "price": _RUNS_PER_LAYER * n_layers}.get(config.rule, 0)


def _say(text: str) -> None:
    tqdm.write(f"calibrate: {text}", file=sys.stderr)


_Cheapest = Callable[[Trials, Bound], Quality]


def _fit(evaluator: Evaluator, known: _Known, cheapest: _Cheapest, costs: Costs | None = None) -> _Found:
    """Fits the evaluator's rule on the first chunks, and checks it on the others."""
    rule, n = evaluator.rule, known.n_fit
    n_tokens = TYPICAL_TRIALS[rule] * sum(map(len, known.chunks[:n]))
    with progress_bar(f"rule {rule}", n_tokens, unit=" tokens") as bar:

        def on_measured(q: Quality) -> None:
            numbers = " ".join(f"{name} {number:g}" for name, number in q.numbers.items())
            bar.set_postfix_str(f"{numbers} KL {q.mean_kl:.2g}")

        def trials(part: slice, of: str) -> Trials:
            of += f" {costs and hash(costs)}"  # a price means nothing without its costs
            memo: Memo = lambda name, measure: known.memo.measured(f"{of} {name}", measure)  # noqa: E731
            return Trials(evaluator, known.chunks[part], known.reference[part], bar.update, on_measured, memo)

        fit, check = trials(slice(n), "fit"), trials(slice(n, None), "check")
        if len(known.chunks) > n:
            best, checked = search.cheapest_that_holds(partial(cheapest, fit), fit, check, known.bound)
        else:
            best, checked = cheapest(fit, known.bound), None
        loose = known.bound.scaled(_FAST)
        if rule != "gate":  # its search takes long, and has seen some that are beyond the limit
            cheapest(fit, loose)
        within = (each for each in fit.measured.values() if loose.holds(each))
        fast = min(within, key=lambda each: each.bytes_per_token)
        bar.total = bar.n
    return _Found(rule, best, checked, fast, costs)


def _by_gate(evaluator: Evaluator, known: _Known) -> _Found:
    scores = _scores(known.first(known.n_fit))
    return _fit(evaluator, known, lambda trials, bound: search.cheapest_by_gate(trials, bound, scores))


def _by_price(evaluator: Evaluator, known: _Known, config: CalibrationConfig) -> _Found:
    """The evaluator's rule, which is price or edgemoe."""
    rule, seen = evaluator.rule, known.first(known.n_fit)
    n = min(config.cost_chunks, known.n_fit)
    chunks, part = known.chunks[:n], known.first(n)
    n_layers = len(seen.layers)
    n_experts_used = sum(np.unique(part.used(part.experts, i)).size for i in range(n_layers))
    n_runs = _n_cost_runs(config, n_layers, n_experts_used)
    with progress_bar("costs", n_runs * sum(map(len, chunks)), unit=" tokens") as bar:
        runs = CostRuns(evaluator, chunks, known.reference[:n], part, bar.update, known.memo.measured)
        costs = runs.by_expert() if rule == "edgemoe" else runs.by_layer()
        bar.total = bar.n
    cheapest: _Cheapest = lambda trials, bound: search.cheapest_by_price(trials, bound, costs, seen)  # noqa: E731
    return _fit(evaluator, known, cheapest, costs)


def _report(model: Path, known: _Known, found: _Found) -> CalibrationReport:
    info, seen = known.info, known.seen
    low_share, weights = _fit_cache(known, found)
    return CalibrationReport(
        calibration=Calibration(
            model_bytes=sum(part.size for part in model_parts(model)),
            low_bytes=info.tier_bytes_low,
            numbers={**RULES["gate"], **found.quality.numbers},
            low_share=low_share,
            weights=weights,
            rule=found.rule,
            costs=found.costs,
            expert_uses=_expert_uses(seen, info.n_layers, info.n_experts),
            paths=path_table(seen.by_layer(), info.n_experts),
            found=_further_numbers(known.bound, found, low_share),
        ),
        n_tokens=known.n_tokens,
        n_chunks=len(known.chunks),
        has_low_tier=known.info.has_low_tier,
        bound=str(known.bound),
        quality=found.quality,
        check=found.check,
        high_bytes_per_token=info.token_bytes_high,
    )


def _further_numbers(bound: Bound, found: _Found, low_share: float) -> dict[str, float]:
    numbers = {"max_kl": bound.max_kl, f"{found.rule}.low_share": low_share}
    numbers |= {f"fast.{name}": number for name, number in found.fast.numbers.items()}
    for part, quality in {"fit": found.quality, "check": found.check}.items():
        for name in ("mean_kl", "kl_at_most", "perplexity_ratio") if quality else ():
            numbers[f"{found.rule}.{part}.{name}"] = getattr(quality, name)
    return numbers | ({"confidence": CONFIDENCE} if found.check else {})


def profile(
    evaluator: Evaluator, chunks: list[Chunk], on_chunk: Progress = lambda _n_tokens: None
) -> tuple[np.ndarray, Observations]:
    """The reference logits, and the routing of that run. on_chunk: called for each. Raises HobbitError."""
    recorder = Recorder(len(chunks), evaluator.n_ctx, evaluator.info.n_layers, 0)
    with progress_bar("profile", sum(map(len, chunks)), unit=" tokens") as bar, evaluator.observing(recorder):

        def progress(n_tokens: int) -> None:
            bar.update(n_tokens)
            on_chunk(n_tokens)

        reference = evaluator.reference(chunks, progress)
    seen = recorder.observations()
    if seen.weights is None:
        raise HobbitError("this architecture's router weights are unknown, so it cannot be calibrated")
    return reference, seen


def _scores(seen: Observations) -> np.ndarray:
    """Scores of Eq. 2 of all selections, by token: [T, n]."""
    of_layers = [unimportance(seen.used(observed(seen.weights), i)) for i in range(len(seen.layers))]
    return np.concatenate(of_layers, axis=1)


def _expert_uses(seen: Observations, n_layers: int, n_experts: int) -> tuple[int, ...]:
    """Layers that did not run, and experts that a layer lacks, have none."""
    uses = np.zeros((n_layers, n_experts), np.int64)
    for layer, experts in seen.by_layer().items():
        uses[layer] = np.bincount(experts.ravel(), minlength=n_experts)
    return tuple(uses.ravel().tolist())


def _fit_cache(known: _Known, found: _Found) -> tuple[float, Weights]:
    """The share of the pools for the low tier, and the weights of Eq. 3, on the first tokens."""
    seen = known.seen
    _, n_layers, n_used = seen.experts.shape
    first = routes(seen, slice(0, max(1, _MAX_ROUTES // (n_layers * n_used))))
    with progress_bar("cache", None, unit=" replays") as bar:
        replay = simulation_of(known.info, found.rule, found.quality, found.costs)
        fitter = CacheFitter(replay, first, bar.update)
        low_share = fitter.low_share()
        return low_share, fitter.weights(low_share)


def routes(seen: Observations, tokens: slice) -> np.ndarray:
    """Some tokens as trace.ROUTE [n], as if decoded one by one. Weights that nobody sees are equal."""
    chosen = np.empty(seen.experts[tokens].shape, ROUTE)
    chosen["sequence"] = seen.sequences[tokens, None, None]
    chosen["token"] = np.arange(len(seen.sequences))[tokens, None, None]
    chosen["layer"] = np.array(seen.layers)[None, :, None]
    chosen["expert"] = seen.experts[tokens]
    chosen["weight"] = 1.0 if seen.weights is None else seen.weights[tokens]
    chosen["counted"] = 1
    return chosen[:, seen.is_used].ravel()


def _for_json(value: Any) -> Any:
    """JSON has no numbers that are not finite, such as the cost of what a rule never does."""
    if isinstance(value, dict):
        return {key: _for_json(item) for key, item in (value | value.pop("numbers", {})).items()}
    if isinstance(value, (list, tuple)):
        return [_for_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
