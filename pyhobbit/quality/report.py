# SPDX-License-Identifier: MIT
"""Results of a calibration."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pyhobbit.quality.evaluate import Quality
from pyhobbit.quality.fit import CacheFit
from pyhobbit.quality.stored import Calibration


@dataclass(frozen=True)
class CalibrationReport:
    """Results of a calibration, and their basis.

    calibration: is stored beside the model.  n_tokens, n_chunks: of the text that was used. has_low_tier:
    without one only the cache is fitted. bound: limit on the loss of quality, for people.
    high_bytes_per_token: with everything in high precision.
    by_rule: the best of each rule that was tried, on the text its numbers were chosen on. checks: the same
    settings on the half that the fit has not seen; empty without one.
    """

    calibration: Calibration
    n_tokens: int
    n_chunks: int
    has_low_tier: bool
    bound: str
    by_rule: dict[str, Quality]
    checks: dict[str, Quality]
    high_bytes_per_token: float
    cache: CacheFit

    @property
    def quality(self) -> Quality:
        """Quality of the chosen rule."""
        return self.by_rule[self.calibration.rule]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON. None: infinite, or not known."""
        values = {**asdict(self), "quality": asdict(self.quality)}
        del values["calibration"]["paths"]  # long, and for the engine alone
        return {name: _for_json(value) for name, value in values.items()}


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
