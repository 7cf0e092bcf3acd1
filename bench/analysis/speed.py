# SPDX-License-Identifier: MIT
"""Parts that decode the text token by token under the memory: speed and quality of each configuration."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench import compare
from bench.analysis.part import SHARE, Figure, Part, Run, calibrated, figure, seconds, table
from bench.harness import runner
from bench.harness.arms import BY_NAME
from bench.harness.table import Results
from pyhobbit.engine.engine import Engine
from pyhobbit.engine.session import Session, one_sequence
from pyhobbit.engine.stats import CacheStats
from pyhobbit.errors import HobbitError
from pyhobbit.model.file_names import calibration_path
from pyhobbit.model.model_file import model_parts
from pyhobbit.quality.evaluate import compare as compared
from pyhobbit.settings.config import SamplingConfig
from pyhobbit.settings.papers import settings_of
from pyhobbit.settings.resolve import resolved

_PROMPT, _DECODED, _MARGIN = 64, 96, 8  # tokens
_PROMPTS = (512, 1024, 2048, 4096)
_OF_WORDS = 384  # tokens
_BEAMS = (4, 8, 12)
_BEAM_TOKENS = 64
_HIGH: Mapping[str, Any] = {"rule": "gate", "t1": 1.0}


@dataclass(frozen=True)
class Decoded:
    """logits: after each token of the text but the last, float32 [n, n_vocab].  seconds: of them all."""

    logits: np.ndarray
    targets: np.ndarray
    seconds: float
    stats: CacheStats

    def row(self, name: str, reference: "Decoded | None" = None) -> dict[str, Any]:
        """Figures by name."""
        n, stats = len(self.targets), self.stats
        hits = stats.hits_high + stats.hits_low
        misses = stats.misses_high + stats.misses_low
        against = compared((reference or self).logits, self.logits, self.targets)
        return {
            "configuration": name,
            "token/s": n / self.seconds,
            "waiting for the disk": stats.stall_s / self.seconds,
            "hits": hits / max(1, hits + misses),
            "MB/token": stats.bytes_read / n / 1e6,
            "computed twice": stats.tokens_repeated / n,
            "high / low / skipped": _mix(stats),
            "predicted right": stats.predicted_right / stats.predicted if stats.predicted else None,
            "KL divergence": float(np.mean(against.divergence)),
            "perplexity": float(np.exp(np.mean(against.surprise))),
        }


def _mix(stats: CacheStats) -> str:
    parts = (stats.selections_high, stats.selections_low, stats.selections_skipped)
    return " / ".join(f"{part / stats.selections:.0%}" for part in parts)


def decode(run: Run, share: float | None = None, n_tokens: int = _DECODED, **settings: Any) -> Decoded:
    """Tokens of the text, one at a time after a prompt of others. Raises HobbitError."""
    config = replace(run.engine(share, **settings), n_ctx=_PROMPT + n_tokens + 1)
    with Session(run.model, config.cache.settings(), one_sequence(config)) as session:
        tokens = session.model.tokenize(run.text)[: _PROMPT + n_tokens + 1]
        if len(tokens) <= _PROMPT + n_tokens:
            raise HobbitError(f"the text has fewer than {_PROMPT + n_tokens} tokens; give a longer one")
        session.context.evaluate(tokens[:_PROMPT])
        before, spent, kept = session.cache.stats(), 0.0, []
        for token in tokens[_PROMPT:-1]:
            start = time.perf_counter()
            session.context.evaluate([token])
            spent += time.perf_counter() - start
            kept.append(session.context.last_logits()[0].copy())
        stats = session.cache.stats().since(before)
    return Decoded(np.array(kept), np.array(tokens[_PROMPT + 1 :]), spent, stats)


def no_cache(run: Run) -> dict[str, Any]:
    """Settings of demand loading: room for a token's experts of one layer."""
    shape = run.file.n_used
    expert = run.expert_bytes / (len(shape) * run.file.n_experts)
    return {"pools": int((max(shape.values()) + 0.5) * expert), "policy": "lru", "prefetch": 0, **_HIGH}


def _table(
    run: Run, papers: str, title: str, arms: Mapping[str, Mapping[str, Any]], n_tokens: int = _DECODED
) -> Figure:
    """One row for each arm; the first one is all high. An arm that cannot be has its reason."""
    rows: list[dict[str, Any]] = []
    reference = None
    for name, settings in arms.items():
        try:
            # pools of its own are no part of the run's memory
            found = decode(run, 1.0 if "pools" in settings else None, n_tokens, **settings)
        except HobbitError as error:
            rows.append({"configuration": f"{name}: not run, {error}"})
            continue
        reference = reference or found
        rows.append(found.row(name, reference))
    return table(papers, title, rows)


def paper(name: str, **given: Any) -> dict[str, Any]:
    """A paper's settings that need no GPU."""
    return {**settings_of(name, given), **given}


def systems(run: Run) -> list[Figure]:
    arms: dict[str, Mapping[str, Any]] = {
        "all high, our defaults": {**_HIGH, "policy": "echo"},
        "demand loading, no cache": no_cache(run),
        "LRU, no prefetch": {**_HIGH, "policy": "lru", "prefetch": 0},
        "HOBBIT": paper("hobbit"),
        "HOBBIT, all high": paper("hobbit", t1=1.0, t2=1.0),
        "MoBiLE": paper("mobile"),
        "half of the experts": {"rule": "rank", "predictor": "router"},
        "degraded (DAOP)": {**_HIGH, "degrade": True},
    }
    for name, own in calibrated(run.model).items():
        arms[name] = paper("edgemoe") if own["rule"] == "edgemoe" else own
    title = "speed and quality on the text, one token at a time; EdgeMoE needs calibrate --rule edgemoe"
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


def memory(run: Run) -> list[Figure]:
    shares = (0.1, 0.25, 0.5, 0.75)
    arms = {"all high": _HIGH, "LRU, no prefetch": {**_HIGH, "policy": "lru", "prefetch": 0}}
    if run.has_low:
        arms["HOBBIT"] = paper("hobbit")
    speeds = {
        name: [_DECODED / decode(run, share, **own).seconds for share in shares] for name, own in arms.items()
    }
    given = {"x": shares, "series": speeds, "x_label": "share of the experts in memory", "y_label": "token/s"}
    return [figure("lines", "EdgeMoE Fig. 16", "speed by memory", x_percent=True, **given)]


def confidence(run: Run) -> list[Figure]:
    arms: dict[str, Mapping[str, Any]] = {"big model": _HIGH, "big model, no cache": no_cache(run)}
    arms |= {f"gamma {gamma}": paper("mobile", confidence=gamma) for gamma in (0.0, 0.5, 0.7, 0.8)}
    # no path is that probable: all that is predicted is what the discarded pass chose
    alone = decode(run, **paper("mobile", predictor="paths", prefetch_bar=1.0)).stats
    share = alone.predicted_right / alone.predicted if alone.predicted else None
    row = {"asked for by the discarded pass": alone.predicted, "right": share}
    return [
        _table(run, "MoBiLE Fig. 5", "speed and tokens computed twice", arms),
        table("MoBiLE Fig. 5", "prefetch of the second pass; the text has over 80 % right", [row]),
    ]


def prompts(run: Run) -> list[Figure]:
    found = []
    trained = run.file.key("context_length", _PROMPTS[-1] + _MARGIN)
    for n_tokens in sorted({min(n, trained - _MARGIN) for n in _PROMPTS}):
        config = replace(run.engine(), n_ctx=n_tokens + _MARGIN, n_batch=n_tokens)
        with Session(run.model, config.cache.settings(), one_sequence(config)) as session:
            tokens = session.model.tokenize(run.text)[:n_tokens]
            if len(tokens) < n_tokens:
                break
            start, before = time.perf_counter(), session.cache.stats()
            session.context.evaluate(tokens)
            took = time.perf_counter() - start
            read = session.cache.stats().since(before).bytes_read / 1e6
            speed = n_tokens / took
            found.append({"tokens": n_tokens, "first token, s": took, "token/s": speed, "MB read": read})
    return [table("Twiddler Fig. 5", "prompts in one pass", found)]


def beams(run: Run) -> list[Figure]:
    rows = []
    for n in (1, *_BEAMS):
        with Engine(run.model, replace(run.engine(), n_ctx=None, n_beams=n)) as engine:
            start = time.perf_counter()
            if n == 1:
                list(engine.generate(run.text[:100], _BEAM_TOKENS, SamplingConfig(temp=0)))
            else:
                engine.beam_search(run.text[:100], n, _BEAM_TOKENS)
            took = time.perf_counter() - start
            stats = engine.stats()
            n_steps = max(1, stats.generated_tokens)
        row = {"beams": n, "steps": n_steps, "step, s": took / n_steps}
        rows.append(row | {"token/s of all beams": n * n_steps / took})
    return [table("Twiddler Fig. 6", "beam search, up to 64 tokens", rows)]


def stock(run: Run) -> list[Figure]:
    """Speed beside unpatched llama.cpp, each in a memory cgroup."""
    n_bytes = sum(part.size for part in model_parts(run.model))
    bound = n_bytes - (1 - SHARE) * run.expert_bytes if run.memory is None else run.memory
    share = min(1.0, bound / n_bytes)
    low = compare.own_low_tier(run.model)
    has_costs = low is not None and calibration_path(run.model).exists()
    t1, t2 = (resolved(run.model, {"hobbit.rule": "gate"}, name) for name in ("t1", "t2"))
    wanted = {"ours-hobbit": low is not None, "ours-eq2": has_costs and t1 < 1, "ours-price": has_costs}
    names = ["stock", "stock-128k", "ours", *(name for name, is_there in wanted.items() if is_there)]
    config = runner.BenchConfig(
        run.model,
        arms=tuple(BY_NAME[name] for name in names),
        limits=(share,),
        low=low,
        t1=t1,
        t2=t2,
        has_costs=has_costs,
        reps=1,
        prompts=(16, 128),
        n_threads=run.n_threads,
    )
    results = Results(runner.run(config, lambda _record: None))
    rows = [row for row in map(results.cells, results.order) if "token/s" in row]
    if all(row["memory"] == "all" for row in rows):
        raise HobbitError(f"no arm ran under the limit: {results.errors()[0]}")
    rows += [{"memory": error} for error in results.errors()]
    return [table("HOBBIT Fig. 14, HOBBIT Fig. 16", "beside llama.cpp under one limit, random tokens", rows)]


PARTS = (
    Part("prompts", seconds(in_batches=1.9, opened=4), prompts),
    Part("words", seconds(alone=6 * _OF_WORDS, opened=7), words),
    Part("systems", seconds(alone=14 * _DECODED, opened=10), systems),
    Part("confidence", seconds(alone=10 * _DECODED, opened=7), confidence),
    Part("prefetch", seconds(alone=10 * _DECODED, opened=10), prefetch),
    Part("memory", seconds(alone=14 * _DECODED, opened=12), memory),
    Part("beams", seconds(alone=(1 + 2 + 3 + 4) * _BEAM_TOKENS, opened=4), beams),
    Part("stock", seconds(alone=6 * 400, opened=5), stock),
)
