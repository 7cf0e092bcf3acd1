# SPDX-License-Identifier: MIT
"""How long a calibration takes."""

import time
from collections.abc import Callable

from pyhobbit.quality.evaluate import Evaluator, Progress
from pyhobbit.quality.search import TYPICAL_CHECKS, TYPICAL_TRIALS
from pyhobbit.settings.config import CalibrationConfig, format_duration

_RUNS_PER_LAYER = 2  # runs that measure a layer's costs
_ENOUGH_S = 5.0  # seconds of chunks, for an estimate of the whole time


def say_once(say: Callable[[float], None], n_chunks: int) -> Progress:
    """Calls `say` with seconds per chunk once enough are done, but for the first, which fills the cache."""
    ends: list[float] = []

    def on_chunk(_n_tokens: int) -> None:
        ends.append(time.perf_counter())
        was, now = (end - ends[0] for end in (ends[-2:][0], ends[-1]))
        if was < _ENOUGH_S and (now >= _ENOUGH_S or len(ends) == n_chunks):
            say(now / (len(ends) - 1))

    return on_chunk


def estimate(chunk_s: float, evaluator: Evaluator, n_chunks: int, config: CalibrationConfig) -> str:
    """How long it takes, from the time of one chunk, and what fewer chunks would take."""
    info = evaluator.info
    n_costs = n_cost_runs(config, info.n_layers, info.n_all_experts)

    def seconds(n: int) -> float:
        if not evaluator.has_low_tier:
            return chunk_s * n
        n_check = config.n_check(n)
        n_trials = (n - n_check) * sum(TYPICAL_TRIALS[rule] for rule in config.rules)
        n_checks = n_check * TYPICAL_CHECKS * len(config.rules)
        return chunk_s * (2 * n + n_trials + n_checks + min(n - n_check, config.cost_chunks) * n_costs)

    time = format_duration(seconds(n_chunks))
    text = f"this takes about {time} for {n_chunks} chunks of {evaluator.n_ctx} tokens"
    fewer = max(config.min_checked, n_chunks // 4)
    if fewer < n_chunks:
        text += f"; --chunks {fewer} would take {format_duration(seconds(fewer))}"
    return f"{text}. Ctrl-C keeps what is measured."


def n_cost_runs(config: CalibrationConfig, n_layers: int, n_experts: int) -> int:
    """The number of runs that measure costs. n_experts: of all layers."""
    if config.rule == "edgemoe":
        return n_experts
    return _RUNS_PER_LAYER * n_layers * ("price" in config.rules)
