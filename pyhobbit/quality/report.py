# SPDX-License-Identifier: MIT
"""Results of a calibration, for people and as JSON."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from pyhobbit.quality.evaluate import CONFIDENCE, Quality
from pyhobbit.quality.fit import CAPACITIES, CacheFit
from pyhobbit.quality.lookahead import Lookahead
from pyhobbit.quality.stored import Calibration
from pyhobbit.settings.config import CalibrationConfig, format_size


@dataclass(frozen=True)
class LayerProfile:
    """One layer, everything in high precision. expert_use: share of the selections, by expert.

    share_*: of the selections, as the chosen rule decides.  top_weight: mean normalised weight of the best.
    *_cost: of the rule price, None where it was not tried; of several experts the mean.
    """

    layer: int
    expert_use: tuple[float, ...]
    share_high: float
    share_low: float
    share_skipped: float
    top_weight: float
    low_cost: float | None = None
    skip_cost: float | None = None


@dataclass(frozen=True)
class CalibrationReport:
    """Results of a calibration, and their basis.

    calibration: is stored beside the model.  n_tokens, n_chunks: of the text that was used. n_trials:
    settings that were tried. has_low_tier: without one only the cache is fitted. bound: limit on the loss
    of quality, for people. high_bytes_per_token: with everything in high precision.
    by_rule: the best of each rule that was tried, on the text its numbers were chosen on. checks: the same
    settings on the half that the fit has not seen; empty without one. score_quantiles: of Eq. 2's scores,
    without each token's best expert. lookahead: maps that predict better than the routers, or None.
    low_alone: with everything in low precision, on the half that checks; low_alone_holds: True if that keeps
    the bound. static_low: with the rule edgemoe, share of the experts that are low for all tokens.
    """

    calibration: Calibration
    n_tokens: int
    n_chunks: int
    n_trials: int
    has_low_tier: bool
    bound: str
    by_rule: dict[str, Quality]
    checks: dict[str, Quality]
    high_bytes_per_token: float
    score_quantiles: dict[float, float]
    layers: tuple[LayerProfile, ...]
    cache: CacheFit
    lookahead: Lookahead | None = None
    low_alone: Quality | None = None
    low_alone_holds: bool = False
    static_low: float | None = None

    @property
    def quality(self) -> Quality:
        """Quality of the chosen rule."""
        return self.by_rule[self.calibration.rule]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the maps of the prediction. None: infinite, or not known."""
        values = {**asdict(replace(self, lookahead=None)), "quality": asdict(self.quality)}
        if self.lookahead is not None:
            names = ("recall", "router_recall")
            values["lookahead"] = {name: list(getattr(self.lookahead, name)) for name in names}
        return {name: _for_json(value) for name, value in values.items()}

    def summary(self) -> str:
        """For people."""
        sections = [self._text_lines(), self._layer_lines(), self._quality_lines(), self._cache_lines()]
        return "\n".join(line for section in sections for line in section)

    def _text_lines(self) -> list[str]:
        lines = [f"text         {self.n_tokens} tokens in {self.n_chunks} parts"]
        if self.score_quantiles:
            values = ", ".join(f"{q:.0%} {value:.3f}" for q, value in self.score_quantiles.items())
            lines.append(f"scores       quantiles, without each token's best expert: {values}")
        if self.lookahead is not None:
            pairs = zip(self.lookahead.recall, self.lookahead.router_recall, strict=True)
            shares = ", ".join(f"{fitted:.1%} instead of {router:.1%}" for fitted, router in pairs)
            lines.append(f"prediction   fitted maps name, 1 layer ahead and further: {shares}")
        return lines

    def _layer_lines(self) -> list[str]:
        head = "layer   busiest expert   best one's weight     high      low  skipped"
        lines = ["", head + ("   cost of low   of skipping" if self.layers[0].low_cost is not None else "")]
        for layer in self.layers:
            busiest = int(np.argmax(layer.expert_use))
            line = (
                f"{layer.layer:5}   {busiest:5} {layer.expert_use[busiest]:8.1%}   "
                f"{layer.top_weight:17.3f}   "
                f"{layer.share_high:6.1%}   {layer.share_low:6.1%}   {layer.share_skipped:6.1%}"
            )
            if layer.low_cost is not None:
                line += f"   {layer.low_cost:11.2g}   {layer.skip_cost:11.2g}"
            lines.append(line)
        return [*lines, ""]

    def _quality_lines(self) -> list[str]:
        if not self.has_low_tier:
            return [
                "thresholds   none: the file has no low tier, so everything stays in high precision; "
                "pyhobbit convert --sidecar MODEL adds one"
            ]
        lines = [f"limit        {self.bound}; {self.n_trials} settings were tried", self._check_line()]
        for rule, quality in self.by_rule.items():
            mark = "   <- stored" if rule == self.calibration.rule and len(self.by_rule) > 1 else ""
            lines += [f"{_numbers(rule, quality)}{mark}", *self._result_lines(quality, self.checks.get(rule))]
        if self.low_alone is not None:
            lines.append(
                f"low alone    perplexity {self.low_alone.perplexity:.3f}, KL divergence "
                f"{self.low_alone.mean_kl:.2g}, {format_size(self.low_alone.bytes_per_token)} per token"
            )
        if self.low_alone_holds:
            lines += [
                "             a plain model in the low tier's type would already meet the limit;",
                "             pyhobbit llama quantize makes one of the original model",
            ]
        return lines

    def _check_line(self) -> str:
        return (
            f"             checked on {self.n_chunks // 2} parts that the fit has not seen: on text like "
            f"them it holds with a confidence of {CONFIDENCE:.0%}"
            if self.checks
            else "             checked on no other text, so that no confidence can be stated; that takes "
            f"{CalibrationConfig.min_checked} parts: give a longer text, smaller --ctx or more --chunks"
        )

    def _result_lines(self, quality: Quality, check: Quality | None) -> list[str]:
        lines = [
            f"  fit        perplexity {quality.perplexity:.3f} ({quality.perplexity_ratio - 1:+.2%} on "
            f"{quality.perplexity / quality.perplexity_ratio:.3f}), KL divergence {quality.mean_kl:.2g} "
            f"(99th percentile {quality.p99_kl:.2g}), same top-1 {quality.same_top1:.1%}",
            f"  experts    {quality.share_high:.1%} high, {quality.share_low:.1%} low, "
            f"{quality.share_skipped:.1%} skipped; {format_size(quality.bytes_per_token)} per token, "
            f"{quality.bytes_per_token / self.high_bytes_per_token:.0%} of what all-high reads",
        ]
        if check is not None:
            lines.insert(
                1,
                f"  check      perplexity {check.perplexity_ratio - 1:+.2%}, at most "
                f"{check.ratio_at_most - 1:+.2%}; KL divergence {check.mean_kl:.2g}, "
                f"at most {check.kl_at_most:.2g}",
            )
        if self.static_low:
            lines.append(
                f"  widths     {self.static_low:.1%} of the experts are low for all tokens; "
                "pyhobbit convert --drop-high limit MODEL leaves out their high versions"
            )
        if quality.t1 == 1 and quality.price == 0:
            lines.append("             no cheaper setting meets the limit: everything stays high")
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


def _for_json(value: Any) -> Any:
    """JSON has no numbers that are not finite, such as the cost of what a rule never does."""
    if isinstance(value, dict):
        return {key: _for_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_for_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(rule: str, quality: Quality) -> str:
    numbers = f"price = {quality.price:g}" if rule == "price" else f"t1 = {quality.t1:g}, t2 = {quality.t2:g}"
    return f"rule {rule:7} {numbers}"
