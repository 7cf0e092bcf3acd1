# SPDX-License-Identifier: MIT
"""Parts that decode the text token by token under the memory: speed and quality of each configuration.

Each arm runs in a process of its own, in turn with the others, and is warm before its tokens count.
"""

import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from statistics import median
from typing import Any

import numpy as np

from bench.analysis.part import Figure, Run, calibrated, table
from pyhobbit.engine.session import Session, one_sequence
from pyhobbit.engine.stats import CacheStats
from pyhobbit.errors import HobbitError
from pyhobbit.quality.evaluate import compare as compared
from pyhobbit.settings.papers import settings_of

_PROMPT, _WARM_UP, _DECODED = 64, 128, 96  # tokens; a trial of prefetch takes up to 96
_OF_WORDS = 384  # tokens
_HIGH: Mapping[str, Any] = {"rule": "gate", "t1": 1.0}
_LRU: Mapping[str, Any] = {**_HIGH, "policy": "lru", "prefetch": 0}
Arms = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Decoded:
    """logits: after each token of the text but the last, float32 [n, n_vocab].  seconds: of them all."""

    logits: np.ndarray
    targets: np.ndarray
    seconds: float
    stats: CacheStats


def decode(run: Run, share: float | None, n_tokens: int, settings: Mapping[str, Any]) -> Decoded:
    """Tokens of the text, one at a time after others. Raises HobbitError."""
    trained = run.file.key("context_length", 4096)  # a small context leaves less to warm up
    n_before = max(_PROMPT, min(_PROMPT + _WARM_UP, trained - n_tokens - 1))
    config = replace(run.engine(share, **settings), n_ctx=n_before + n_tokens + 1)
    # prefetch that an arm asks for is on all the time
    cache = config.cache.settings() | {"hobbit.prefetch_trials": "prefetch" not in settings}
    with Session(run.model, cache, one_sequence(config)) as session:
        tokens = session.model.tokenize(run.text)[: n_before + n_tokens + 1]
        if len(tokens) <= n_before + n_tokens:
            raise HobbitError(f"the text has fewer than {n_before + n_tokens} tokens; give a longer one")
        session.context.evaluate(tokens[:_PROMPT])
        for token in tokens[_PROMPT:n_before]:
            session.context.evaluate([token])
        before, spent, kept = session.cache.stats(), 0.0, []
        for token in tokens[n_before:-1]:
            start = time.perf_counter()
            session.context.evaluate([token])
            spent += time.perf_counter() - start
            kept.append(session.context.last_logits()[0].copy())
        stats = session.cache.stats().since(before)
    return Decoded(np.array(kept), np.array(tokens[n_before + 1 :]), spent, stats)


def measured(run: Run, arms: Arms, n_tokens: int) -> dict[str, list[Decoded] | HobbitError]:
    """The repetitions of each arm, or why it cannot be."""
    found: dict[str, list[Decoded] | HobbitError] = {}
    spawned = get_context("spawn")
    for _ in range(run.reps):
        for name, settings in arms.items():
            if isinstance(done := found.setdefault(name, []), HobbitError):
                continue
            own = 1.0 if "pools" in settings else None  # pools of its own are no part of the run's memory
            try:
                with ProcessPoolExecutor(1, spawned) as process:
                    done.append(process.submit(decode, run, own, n_tokens, settings).result())
            except HobbitError as error:
                found[name] = error
    return found


def _row(name: str, done: list[Decoded], reference: Decoded) -> dict[str, Any]:
    """Medians of the repetitions; the text's quality is that of the first."""

    def middle(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return median(known) if known else None

    n, stats = len(reference.targets), [each.stats for each in done]
    hits = [(s.hits_high + s.hits_low, s.misses_high + s.misses_low) for s in stats]
    mix = (stats[0].selections_high, stats[0].selections_low, stats[0].selections_skipped)
    against = compared(reference.logits, done[0].logits, reference.targets)
    speeds = [n / each.seconds for each in done]
    kl, variation, same = (float(np.mean(each)) for each in against[2:])
    return {
        "configuration": name, "token/s": median(speeds),
        "least - most": f"{min(speeds):.4g} - {max(speeds):.4g}",
        "waiting for the disk": middle([each.stats.stall_s / each.seconds for each in done]),
        "hits": middle([n_hits / max(1, n_hits + n_misses) for n_hits, n_misses in hits]),
        "MB/token": middle([s.bytes_read / n / 1e6 for s in stats]),
        "computed twice": middle([s.tokens_repeated / n for s in stats]),
        "high / low / skipped": " / ".join(f"{part / stats[0].selections:.0%}" for part in mix),
        "predicted right": middle([s.predicted_right / s.predicted if s.predicted else None for s in stats]),
        "KL divergence": kl, "total variation": variation, "same top-1": same,
        "perplexity": float(np.exp(np.mean(against.surprise))),
    }  # fmt: skip


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
    return {**_LRU, "pools": int((max(shape.values()) + 0.5) * expert)}


def paper(name: str, **given: Any) -> dict[str, Any]:
    """A paper's settings that need no GPU."""
    return {**settings_of(name, given), **given}


def systems(run: Run) -> list[Figure]:
    arms: dict[str, Mapping[str, Any]] = {
        "all high, our defaults": {**_HIGH, "policy": "echo"},
        "demand loading, no cache": no_cache(run),
        "LRU, no prefetch": _LRU,
        "HOBBIT": paper("hobbit"),
        "HOBBIT, all high": paper("hobbit", t1=1.0, t2=1.0),
        "MoBiLE": paper("mobile"),
        "half of the experts": {"rule": "rank", "predictor": "router"},
        "degraded (DAOP)": {**_HIGH, "degrade": True},
    }
    for name, own in calibrated(run.model).items():
        arms[name] = paper("edgemoe") if own["rule"] == "edgemoe" else own
    title = "speed and quality on the text, one token at a time; EdgeMoE needs calibrate --set rule=edgemoe"
    papers = "HOBBIT Fig. 3a, HOBBIT Fig. 16, EdgeMoE Fig. 11, MoBiLE Table II"
    return [_table(run, papers, title, arms)]


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
    alone = decode(run, None, _DECODED, paper("mobile")).stats  # no next layer is predicted
    share = alone.predicted_right / alone.predicted if alone.predicted else None
    row = {"asked for by the discarded pass": alone.predicted, "right": share}
    found = _table(run, "MoBiLE Fig. 5", "speed and tokens computed twice", arms)
    big, _, little, *_ = (each.get("token/s") for each in found["rows"])
    for each in found["rows"] if big and little else ():
        if "token/s" in each:
            by_eq_1 = 1 / (big / little + each["computed twice"])
            each |= {"times the big model": each["token/s"] / big, "times by Eq. 1": by_eq_1}
    return [
        found,
        table("MoBiLE Fig. 5", "prefetch of the second pass; the text has over 80 % right", [row]),
    ]
