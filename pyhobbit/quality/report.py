# SPDX-License-Identifier: MIT
"""Results of a calibration, for people and as JSON."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pyhobbit._tables import RULES
from pyhobbit.quality.evaluate import CONFIDENCE, Quality
from pyhobbit.quality.fit import CAPACITIES, CacheFit
from pyhobbit.quality.stored import Calibration
from pyhobbit.settings.config import CalibrationConfig, format_size


@dataclass(frozen=True)
class CalibrationReport:
    """Results of a calibration, and their basis.

    calibration: is stored beside the model.  n_tokens, n_chunks: of the text that was used. n_trials:
    settings that were tried. has_low_tier: without one only the cache is fitted. bound: limit on the loss
    of quality, for people. high_bytes_per_token: with everything in high precision.
    by_rule: the best of each rule that was tried, on the text its numbers were chosen on. checks: the same
    settings on the half that the fit has not seen; empty without one.
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
    cache: CacheFit
    low_alone: Quality | None = None
    low_alone_holds: bool = False
    static_low: float | None = None

    @property
    def quality(self) -> Quality:
        """Quality of the chosen rule."""
        return self.by_rule[self.calibration.rule]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON. None: infinite, or not known."""
        values = {**asdict(self), "quality": asdict(self.quality)}
        del values["calibration"]["paths"]  # long, and for the engine alone
        return {name: _for_json(value) for name, value in values.items()}

    def summary(self) -> str:
        """The report as lines for people."""
        text = f"text         {self.n_tokens} tokens in {self.n_chunks} parts"
        return "\n".join([text, *self._quality_lines(), *self._cache_lines()])

    def _quality_lines(self) -> list[str]:
        if not self.has_low_tier:
            return [
                "thresholds   none: the file has no low tier, so everything stays in high precision; "
                "pyhobbit convert --sidecar MODEL adds one"
            ]
        lines = [f"limit        {self.bound}; {self.n_trials} settings were tried", self._check_line()]
        for rule, quality in self.by_rule.items():
            mark = "   <- stored" if rule == self.calibration.rule and len(self.by_rule) > 1 else ""
            numbers = ", ".join(f"{name} = {number:g}" for name, number in quality.numbers.items())
            lines += [f"rule {rule:7} {numbers}{mark}", *self._result_lines(rule, quality)]
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

    def _result_lines(self, rule: str, quality: Quality) -> list[str]:
        lines = [
            f"  fit        perplexity {quality.perplexity:.3f} ({quality.perplexity_ratio - 1:+.2%} on "
            f"{quality.perplexity / quality.perplexity_ratio:.3f}), KL divergence {quality.mean_kl:.2g} "
            f"(99th percentile {quality.p99_kl:.2g}), total variation {quality.total_variation:.2g}, "
            f"{1 - quality.same_top1:.1%} of the most probable tokens change",
            f"  experts    {quality.share_high:.1%} high, {quality.share_low:.1%} low, "
            f"{quality.share_skipped:.1%} skipped; {format_size(quality.bytes_per_token)} per token, "
            f"{quality.bytes_per_token / self.high_bytes_per_token:.0%} of what all-high reads",
        ]
        if (check := self.checks.get(rule)) is not None:
            lines.insert(
                1,
                f"  check      perplexity {check.perplexity_ratio - 1:+.2%}, at most "
                f"{check.ratio_at_most - 1:+.2%}; KL divergence {check.mean_kl:.2g}, "
                f"at most {check.kl_at_most:.2g}",
            )
        if self.static_low:
            lines.append(
                f"  widths     {self.static_low:.1%} of the experts are low for all tokens; "
                "pyhobbit convert --set drop_high=limit MODEL leaves out their high versions"
            )
        if quality.numbers == RULES[rule]:
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


def placement_hits(uses: np.ndarray, share: float) -> tuple[float, float]:
    """Shares of the uses that the most used and the least used `share` of the experts take (Twiddler)."""
    ranked, n = np.sort(uses, axis=None), round(share * uses.size)
    return float(ranked[ranked.size - n :].sum() / ranked.sum()), float(ranked[:n].sum() / ranked.sum())


def _for_json(value: Any) -> Any:
    """JSON has no numbers that are not finite, such as the cost of what a rule never does."""
    if isinstance(value, dict):
        return {key: _for_json(item) for key, item in (value | value.pop("numbers", {})).items()}
    if isinstance(value, (list, tuple)):
        return [_for_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
