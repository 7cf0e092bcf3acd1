# SPDX-License-Identifier: MIT
"""Finds the numbers of a precision rule that ask for the fewest bytes within a bound, by measuring some."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from pyhobbit._tables import RULES
from pyhobbit.quality.evaluate import Chunk, Costs, Evaluator, Memo, Progress, Quality, measure_now
from pyhobbit.routing.observe import Observations, observed
from pyhobbit.routing.rules import losses

T = TypeVar("T")

TYPICAL_TRIALS = {"gate": 28, "price": 15, "edgemoe": 15}
"""Settings that a search measures, by rule."""

TYPICAL_CHECKS = 2
"""Settings that a check measures, by rule."""

_MAX_CHECKS = 6
_MARGIN = 0.95  # share of what a check asks for, so that the next one is unlikely to fail narrowly
_T1_STEPS = 64  # quantiles of the scores
_T2_HALVINGS = 7  # halvings of the share that is skipped, each in two steps
_PATIENCE = 3  # steps of t2 that bring nothing: the steps of t1 may be too wide for the first
_DECIMALS = 4  # decimals of thresholds
_PRICE_STEPS = 256  # quantiles of the prices at which some use changes its precision


@dataclass(frozen=True)
class Bound:
    """Limit on the mean KL divergence by low precision, in nats.

    is_sure: it holds where the measured upper bound lies within, not where the mean does.
    """

    max_kl: float
    is_sure: bool = False

    def __str__(self) -> str:
        return f"KL divergence at most {self.max_kl:g}"

    def holds(self, quality: Quality) -> bool:
        """True if a measured setting is within the bound."""
        return self._measured(quality) <= self.max_kl

    def tightened(self, checked: Quality, by: "Bound") -> "Bound":
        """A smaller one, by as much as a check exceeds another."""
        return self.scaled(_MARGIN * by.max_kl / by._measured(checked))

    def scaled(self, factor: float) -> "Bound":
        """This bound with its limit multiplied by factor."""
        return replace(self, max_kl=factor * self.max_kl)

    def _measured(self, of: Quality) -> float:
        return of.kl_at_most if self.is_sure else of.mean_kl


@dataclass
class Trials:
    """Measures settings on chunks, each once. on_measured: called for each.  measured: by name."""

    evaluator: Evaluator
    chunks: Sequence[Chunk]
    reference: np.ndarray
    progress: Progress = lambda _n_tokens: None
    on_measured: Callable[[Quality], object] = lambda _quality: None
    memo: Memo = measure_now
    measured: dict[str, Quality] = field(default_factory=dict)

    def __call__(self, **numbers: float) -> Quality:
        name = f"{self.evaluator.rule} { {**RULES[self.evaluator.rule], **numbers} }"
        if name not in self.measured:
            self.measured[name] = self.memo(
                name, lambda: self.evaluator.measure(self.chunks, self.reference, self.progress, **numbers)
            )
            self.on_measured(self.measured[name])
        return self.measured[name]


def cheapest_that_holds(
    search: Callable[[Bound], Quality], trials: Trials, check: Trials, bound: Bound
) -> tuple[Quality, Quality]:
    """A setting found by `trials` that holds by `check`: both measured. All high where few checks fail."""
    limit = bound
    for _ in range(_MAX_CHECKS):
        found = search(limit)
        checked = check(**found.numbers)
        if bound.holds(checked):
            return found, checked
        limit = limit.tightened(checked, bound)
    return trials(), check()


# --- the rule gate


def cheapest_by_gate(trials: Trials, bound: Bound, scores: np.ndarray) -> Quality:
    """The thresholds of Eq. 2 with the fewest bytes within the bound; scores: of the chunks, any shape."""
    high_bytes, low_bytes = trials.evaluator.info.mean_expert_bytes
    low_cost = low_bytes / high_bytes
    if low_cost == 0:
        return trials()
    ranked = np.sort(scores, axis=None)
    t1s, t2s = threshold_candidates(scores)
    ask = (
        lambda t1, t2: expected_cost(ranked, low_cost, t1, t2),
        lambda t1, t2: bound.holds(trials(t1=t1, t2=t2)),
    )
    t1, t2 = cheapest_thresholds(t1s, [1.0, *t2s], *ask)
    return trials(t1=t1, t2=t2)


def cheapest_thresholds(
    t1s: Sequence[float],
    t2s: Sequence[float],
    cost: Callable[[float, float], float],
    holds: Callable[[float, float], bool],
) -> tuple[float, float]:
    """The cheapest (t1, t2) that was found to hold; all high is known to.

    t1s, t2s: candidates, in any order.  cost: is asked often.  holds: is asked seldom; quality is taken to
    fall with either threshold, so that t1 is found by bisection. t2 goes down until that does not pay.
    """
    best, n_in_vain = (1.0, 1.0), 0
    for t2 in sorted(t2s, reverse=True):
        pairs = [(t1, t2) for t1 in sorted({*t1s, t2}) if t1 <= t2]
        cheaper = [pair for pair in pairs if cost(*pair) < cost(*best)]
        if cheaper and holds(*cheaper[-1]):
            best = _first(cheaper, lambda pair: holds(*pair))
            n_in_vain = 0
        else:
            n_in_vain += 1
        if n_in_vain == _PATIENCE:
            break
    return best


def _first(items: Sequence[T], holds: Callable[[T], bool]) -> T:
    """The first that holds, where all after it do too; it is looked for near the last, which is known to."""
    known, step = len(items) - 1, 1
    while known >= step and holds(items[known - step]):
        known -= step
        step *= 2
    return items[bisect_left(items, True, lo=max(0, known - step), hi=known, key=holds)]


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


def _below_one(values: np.ndarray) -> list[float]:
    return sorted({value for value in np.round(values, _DECIMALS).tolist() if value < 1})


def expected_cost(ranked: np.ndarray, low_cost: float, t1: float, t2: float) -> float:
    """Bytes of a selection by a high expert's, from scores of Eq. 2. low_cost: of a low by a high one."""
    high, kept = (
        1.0 if threshold >= 1 else float(np.searchsorted(ranked, threshold, "right")) / ranked.size
        for threshold in (t1, t2)
    )
    return high + low_cost * (kept - high)


# --- the rule price


def cheapest_by_price(trials: Trials, bound: Bound, costs: Costs, seen: Observations) -> Quality:
    """The highest price within the bound, by the rule price or edgemoe. seen: the routing of the chunks."""
    info = trials.evaluator.info
    high_bytes, low_bytes = trials.evaluator.info.mean_expert_bytes
    loss, used = losses(observed(seen.weights), trials.evaluator.rule), seen.is_used
    low, skip = costs.of(seen.layers, seen.experts, info.n_layers)
    prices = price_candidates(loss[:, used], low[:, used], skip[:, used], low_bytes / high_bytes)
    trials.evaluator.set_costs(costs)
    return trials(price=_first([*reversed(prices), 0.0], lambda price: bound.holds(trials(price=price))))


def price_candidates(
    loss: np.ndarray, low_cost: np.ndarray, skip_cost: np.ndarray, low_bytes: float
) -> list[float]:
    """Prices in ascending order, by quantiles of those at which a use leaves high precision.

    loss: see rules.losses(), [T, n], as the costs are.  low_bytes: of an expert in low precision by
    those of one in high, 0 without a low tier.
    """
    with np.errstate(invalid="ignore"):  # 0 * inf
        changes = loss * skip_cost
        if low_bytes > 0:
            changes = np.fmin(changes, loss * low_cost / (1 - low_bytes))
    changes = changes[np.isfinite(changes) & (changes > 0)]
    if not changes.size:
        return []
    found = np.quantile(changes, np.arange(1, _PRICE_STEPS + 1) / _PRICE_STEPS)
    # beyond, ever more uses are skipped
    return sorted({float(f"{price:.4g}") for price in [*found, *found[-1] * 2.0 ** np.arange(1, 9)]})
