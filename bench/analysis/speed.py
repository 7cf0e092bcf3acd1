# SPDX-License-Identifier: MIT
"""Parts that decode the text token by token under the memory: speed and quality of each configuration.

Each runs in the comparison's measuring process, in turn with the others, and is warm before its tokens count.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bench.analysis.part import NAMES, Figure, Run, calibrated_rule, table
from bench.harness import runner
from bench.harness.worker import Job
from pyhobbit.errors import HobbitError
from pyhobbit.quality.evaluate import compare as compared
from pyhobbit.settings.papers import settings_of

_PROMPT, _WARM_UP, _DECODED = 64, 128, 96  # tokens; a trial of prefetch takes up to 96
_OF_WORDS = 384  # tokens
_HOUR = 3600.0
_HIGH: Mapping[str, Any] = {"rule": "gate", "t1": 1.0}
_LRU: Mapping[str, Any] = {**_HIGH, "policy": "lru", "prefetch": 0}
Arms = Mapping[str, Mapping[str, Any]]
Decoded = dict[str, Any]
"""A measuring process's figures, with logits after each token of the text but the last, and their targets."""


def decode(run: Run, n_tokens: int, settings: Mapping[str, Any]) -> Decoded:
    """Tokens of the text, one at a time after others. Raises HobbitError."""
    config = run.engine(**settings)
    cache = config.cache.settings() | {"hobbit.prefetch_trials": False}  # a verdict depends on other load
    trained = run.file.key("context_length", 4096)  # a small context leaves less to warm up
    n_warm_up = max(0, min(_WARM_UP, trained - n_tokens - 1 - _PROMPT))
    with TemporaryDirectory() as folder:
        kept = f"{folder}/logits.npz"
        job = Job(str(run.model.absolute()), settings=cache, repack=True, text=run.text, kept=kept)
        job = replace(job, prompts=(_PROMPT,), n_warm_up=n_warm_up, n_tokens=n_tokens, seconds=_HOUR)
        found = runner.start(replace(job, n_threads=config.computing_threads(run.n_threads)))
        with np.load(kept) as arrays:
            return {**found, **arrays}


def measured(run: Run, arms: Arms, n_tokens: int) -> dict[str, list[Decoded] | HobbitError]:
    """The repetitions of each arm, or why it cannot be."""
    found: dict[str, list[Decoded] | HobbitError] = {}
    for _ in range(run.reps):
        for name, settings in arms.items():
            if isinstance(done := found.setdefault(name, []), HobbitError):
                continue
            try:
                done.append(decode(run, n_tokens, settings))
            except HobbitError as error:
                found[name] = error
    return found


def _row(name: str, done: list[Decoded], reference: Decoded) -> dict[str, Any]:
    """Medians of the repetitions; the text's quality is that of the first."""

    def middle(value: Callable[[Decoded], float | None]) -> float | None:
        known = [found for each in done if (found := value(each)) is not None]
        return median(known) if known else None

    n, first = len(reference["targets"]), done[0]
    mix = (first[f"{tier}_share"] for tier in ("high", "low", "skipped"))
    against = compared(reference["logits"], first["logits"], reference["targets"])
    speeds = [each["tokens_per_second"] for each in done]
    kl, variation, same = (float(np.mean(each)) for each in against[2:])
    return {
        "configuration": name, "token/s": median(speeds),
        "least - most": f"{min(speeds):.4g} - {max(speeds):.4g}",
        "waiting for the disk": middle(lambda each: each["stall_share"]),
        "hits": middle(lambda each: each["hit_rate"]),
        "MB/token": middle(lambda each: each["counters"]["bytes_read"] / n / 1e6),
        "computed twice": middle(lambda each: each["counters"]["tokens_repeated"] / n),
        "high / low / skipped": " / ".join(f"{part:.0%}" for part in mix),
        "predicted right": middle(_predicted_right),
        "KL divergence": kl, "total variation": variation, "same top-1": same,
        "perplexity": float(np.exp(np.mean(against.surprise))),
    }  # fmt: skip


def _predicted_right(found: Decoded) -> float | None:
    counters = found["counters"]
    return counters["predicted_right"] / counters["predicted"] if counters["predicted"] else None


def _table(run: Run, papers: str, title: str, arms: Arms, n_tokens: int = _DECODED) -> Figure:
    """One row for each arm; the first one is all high. An arm that cannot be has its reason."""
    found = measured(run, arms, n_tokens)
    reference = next((each[0] for each in found.values() if isinstance(each, list)), None)
    rows = [
        _row(name, each, reference)
        if isinstance(each, list) and reference
        else {"configuration": f"{name}: not run, {each}"}
        for name, each in found.items()
    ]
    return table(papers, title, rows)


def no_cache(run: Run) -> dict[str, Any]:
    """Settings of demand loading: room for a token's experts of one layer."""
    shape = run.file.n_used
    expert = run.expert_bytes / (len(shape) * run.file.n_experts)
    return {**_LRU, "pools": int((max(shape.values()) + 1) * expert)}  # one more: the low tier's least


def paper(name: str, **given: Any) -> dict[str, Any]:
    """A paper's settings that need no GPU."""
    return {**settings_of(name, given), **given}


def systems(run: Run) -> list[Figure]:
    demand = no_cache(run)
    arms: dict[str, Mapping[str, Any]] = {
        "all high, our defaults": {**_HIGH, "policy": "echo"},
        "all in memory": {**_LRU, "pools": 2 * run.expert_bytes},
        "demand loading, no cache": demand,
        "demand loading, all low": {**demand, "rule": "random", "t1": 0.0},
        "LRU, no prefetch": _LRU,
        "HOBBIT": paper("hobbit"),
        "HOBBIT, all high": paper("hobbit", t1=1.0, t2=1.0),
        "MoBiLE": paper("mobile"),
        "half of the experts": {"rule": "rank", "predictor": "router"},
        "degraded (DAOP)": {**_HIGH, "degrade": True},
    }
    edgemoe = {
        "EdgeMoE, Q": paper("edgemoe", prefetch=0, pools=demand["pools"]),
        "EdgeMoE, Q and P": paper("edgemoe", pools=2 * demand["pools"]),  # room for the next layer's
        "EdgeMoE, Q, P and C": paper("edgemoe"),
    }
    if rule := calibrated_rule(run.model):
        arms |= edgemoe if rule == "edgemoe" else {f"calibrated, {NAMES[rule]}": {"rule": rule}}
    title = "speed and quality on the text, token by token; prefetch never pauses; EdgeMoE needs calibrate"
    papers = "HOBBIT Fig. 3a, HOBBIT Fig. 16, EdgeMoE Fig. 3, EdgeMoE Fig. 11, EdgeMoE Fig. 16"
    return [_table(run, f"{papers}, EdgeMoE Fig. 18, MoBiLE Table II", title, arms)]


def words(run: Run) -> list[Figure]:
    run.need_low()
    arms: dict[str, Mapping[str, Any]] = {}
    for name, own in {"": {}, ", no prefetch": {"prefetch": 0}}.items():
        arms |= {word + name: {"quality": word, **own} for word in ("lossless", "small-loss", "fast")}
    return [_table(run, "The words of --quality", "one token at a time", arms, _OF_WORDS)]


def prefetch(run: Run) -> list[Figure]:
    by_tiers = {"all high": _HIGH, **({"mixed": paper("hobbit")} if run.has_low else {})}
    arms = {f"{tiers}, p = {p}": {**own, "prefetch": p} for tiers, own in by_tiers.items() for p in range(5)}
    return [_table(run, "HOBBIT Fig. 17b", "layers that are predicted", arms)]


def confidence(run: Run) -> list[Figure]:
    arms: dict[str, Mapping[str, Any]] = {"big model": _HIGH, "big model, no cache": no_cache(run)}
    arms |= {f"gamma {gamma}": paper("mobile", confidence=gamma) for gamma in (0.0, 0.5, 0.7, 0.8)}
    alone = decode(run, _DECODED, paper("mobile"))  # no next layer is predicted
    asked = alone["counters"]["predicted"]
    row = {"asked for by the discarded pass": asked, "right": _predicted_right(alone)}
    found = _table(run, "MoBiLE Fig. 3, MoBiLE Fig. 5, MoBiLE Table III", "tokens computed twice", arms)
    big, _, little, *_ = (each.get("token/s") for each in found["rows"])
    for each in found["rows"] if big and little else ():
        if "token/s" in each:
            by_eq_1 = 1 / (big / little + each["computed twice"])
            each |= {"times the big model": each["token/s"] / big, "times by Eq. 1": by_eq_1}
    return [found, table("MoBiLE Fig. 5", "prefetch of the second pass; the text has over 80 % right", [row])]
