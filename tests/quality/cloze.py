# SPDX-License-Identifier: MIT
"""Cloze tasks, answered token by token through the engine.

    PYTHONPATH=tests python tests/quality/cloze.py MODEL [MORE ...] --text FILE [--widths LINES --fit TEXT]

A task is a piece of the text and four ways to go on: its own, and three of other places. The answer is the
one with the largest likelihood by token. Each of MORE models adds the rule of its calibration as an arm,
and LINES of bench/report.py with the part widths those static widths of its costs that keep a KL of 0.01 on
another text, as a calibration with eight chunks of 128 tokens finds them.
KL is that of the token after each context.
Own tasks are lines of JSON in --tasks FILE: {"context": "...", "choices": ["...", "..."], "right": 0}.
"""

import argparse
import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import numpy as np
import rpc_server

from bench.results import read_lines
from pyhobbit.engine.llama import Model
from pyhobbit.engine.session import Session, one_sequence
from pyhobbit.engine.stats import CacheStats
from pyhobbit.model.model_file import read_model_file
from pyhobbit.native.rpc_servers import add_rpc_servers
from pyhobbit.quality.calibration import profile
from pyhobbit.quality.evaluate import Costs, Evaluator, compare, log_softmax
from pyhobbit.quality.search import Bound, Trials, cheapest_by_price, cheapest_that_holds
from pyhobbit.settings.config import CacheConfig, CalibrationConfig, EngineConfig
from pyhobbit.settings.papers import settings_of

ALL = 1.5  # bytes of all experts in both tiers by those in high precision, at most
CONTEXT, CONTINUED, N_CHOICES = 12, 3, 4  # tokens, and ways to go on: 24 tokens to read in all
N_CTX = 256
N_FIT, N_CHUNKS, MAX_KL, FIT_POOLS = 128, 8, 0.01, 64 << 20  # static widths are fitted with these
ALONE: Mapping[str, Any] = {"policy": "lru", "prefetch": 0, "calibrated": False}
HIGH: Mapping[str, Any] = {**ALONE, "rule": "gate", "t1": 1.0}
STRICT: Mapping[str, Any] = {**ALONE, "strict": True}
EARLY: Mapping[str, Any] = {**HIGH, "device": "RPC0", "mode": "cooperative", "prefetch": 1, "early": True}
Arms = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Task:
    """Token ids. right: number of the true choice."""

    context: Sequence[int]
    choices: Sequence[Sequence[int]]
    right: int


@dataclass(frozen=True)
class Answers:
    """Arrays by task.  chosen: the likeliest choice.  chance: mean log-probability of each one's tokens.

    after: log-probabilities after the context.  n_tokens: that were computed.
    """

    chosen: np.ndarray
    chance: np.ndarray
    after: np.ndarray
    n_tokens: int
    stats: CacheStats


def mobile(confidence: float) -> dict[str, Any]:
    """MoBiLE's second pass over tokens that are not more probable than this."""
    return {**settings_of("mobile", {}), **STRICT, "confidence": confidence, "rule": "rank"}


ARMS: Arms = {
    "all high": HIGH,
    "Eq. 2, 0.6 and 0.9": {**STRICT, "t1": 0.6, "t2": 0.9},
    "Eq. 2, 0.6 and 1": {**STRICT, "t1": 0.6, "t2": 1.0},
    "rank": {**STRICT, "rule": "rank"},
    "rank, second pass at 0.7": mobile(0.7),
    "degraded": {**HIGH, "prefetch": 1, "degrade": True},  # by the routers that prefetch keeps
    "early": EARLY,
}


def costs_of(lines: Path) -> Costs:
    """Each expert's divergence alone in low precision, of a report."""
    _, by_part = read_lines(lines)
    low = np.ravel(by_part["widths"]["figures"][0]["values"]).tolist()
    return Costs(tuple(low), (math.inf,) * len(low))


def fitted(model: Path, costs: Costs, text: str) -> float:
    """The price of the static widths that keep MAX_KL on every second chunk, by a check on the others."""
    config = CalibrationConfig(EngineConfig(CacheConfig(pools=FIT_POOLS), N_FIT, n_threads=1), max_kl=MAX_KL)
    with Evaluator(model, config.engine, rule="edgemoe") as opened:
        found = opened.chunks(text)
        n = min(len(found), N_CHUNKS)
        chunks = [found[i * len(found) // n] for i in (*range(0, n, 2), *range(1, n, 2))]
        reference, seen = profile(opened, chunks)
        half = (n + 1) // 2
        fit, check = (Trials(opened, chunks[p], reference[p]) for p in (slice(half), slice(half, None)))
        seen, bound = seen.first(half * opened.n_ctx), Bound(config.max_kl, is_sure=True)
        best, _ = cheapest_that_holds(
            lambda limit: cheapest_by_price(fit, limit, costs, seen), fit, check, bound
        )
    return best.numbers["price"]


def of_text(tokens: Sequence[int], n: int) -> list[Task]:
    """n tasks from evenly spaced places of a text; wrong choices are the true ones of other places."""
    size, random = CONTEXT + CONTINUED, np.random.default_rng(0)
    if len(tokens) < n * size:
        raise SystemExit(f"the text has {len(tokens)} tokens, and {n} tasks need {n * size}")
    starts = [i * (len(tokens) - size) // n for i in range(n)]
    pieces = [tokens[start : start + size] for start in starts]
    ends = [tuple(piece[CONTEXT:]) for piece in pieces]
    found = []
    for piece, end in zip(pieces, ends, strict=True):
        others = sorted({each for each in ends if each[0] != end[0]})
        picked = random.choice(len(others), N_CHOICES - 1, replace=False)
        right = int(random.integers(N_CHOICES))
        choices = [others[i] for i in picked]
        found.append(Task(piece[:CONTEXT], [*choices[:right], end, *choices[right:]], right))
    return found


def of_user(session: Session, path: Path) -> list[Task]:
    found = []
    for line in map(json.loads, path.read_text().splitlines()):
        context, *choices = (
            session.model.tokenize(text, begins_text=not i)
            for i, text in enumerate((line["context"], *line["choices"]))
        )
        found.append(Task(context, choices, line["right"]))
        if not all([context, *choices]) or len(context) + max(map(len, choices)) > N_CTX:
            raise SystemExit(f"task {len(found)} of {path} has an empty part, or more than {N_CTX} tokens")
    return found


@contextlib.contextmanager
def opened(model: Path, share: float, settings: Mapping[str, Any]) -> Iterator[Session]:
    """share: of the experts in high precision that the pools hold."""
    high = next(tier.n_bytes for tier in read_model_file(model, None).tiers if tier.name == "high")
    given = dict(settings)
    costs, price = given.pop("costs", (None, 0.0))
    pools, is_calibrated = given.pop("pools", int(share * high)), given.pop("calibrated", True)
    config = EngineConfig(CacheConfig(pools=pools, **given), N_CTX, n_threads=1)
    overrides = config.cache.settings() | {
        "hobbit.calibrated": is_calibrated,
        "hobbit.prefetch_trials": False,
    }

    def set_context(params: Any, model: Model) -> None:
        if costs:  # before the context makes the pools
            model.cache.set_costs(costs.low, costs.skip)
            model.cache.set(price=price)
        one_sequence(config)(params, model)

    with Session(model, overrides, set_context) as session:
        yield session


def answers(session: Session, tasks: Sequence[Task]) -> Answers:
    """Computes one token at a time, so that rules for single tokens act."""
    context, before, n_tokens = session.context, session.cache.stats(), 0

    def after(tokens: Sequence[int]) -> np.ndarray:
        nonlocal n_tokens
        for token in tokens:
            context.evaluate([token])
        n_tokens += len(tokens)
        return log_softmax(context.last_logits()[0])

    def likelihood(choice: Sequence[int], first: np.ndarray, n_context: int) -> float:
        context.truncate(n_context)
        found = [first, *(after([token]) for token in choice[:-1])]
        return float(np.mean([of[token] for of, token in zip(found, choice, strict=True)]))

    chance, firsts = [], []
    for task in tasks:
        context.truncate(0)
        firsts.append(first := after(task.context))
        chance.append([likelihood(choice, first, len(task.context)) for choice in task.choices])
    chosen = np.array([np.argmax(of_task) for of_task in chance])
    now = session.cache.stats().since(before)
    return Answers(chosen, np.array(chance, object), np.array(firsts), n_tokens, now)


def interval(differences: np.ndarray) -> tuple[float, float]:
    """Mean of paired differences, and half the width of its interval at 95 %."""
    return float(differences.mean()), 1.96 * float(differences.std(ddof=1)) / math.sqrt(len(differences))


def row(name: str, found: Answers, high: Answers, right: np.ndarray) -> str:
    is_right = (found.chosen == right).astype(float)
    kl = compare(high.after, found.after, high.after.argmax(1)).divergence
    mean, half = interval(is_right - (high.chosen == right))
    s = found.stats
    mix = (s.selections_high, s.selections_low, s.selections_skipped)
    parts = " / ".join(f"{100 * part / s.selections:.0f}" for part in mix)
    other = s.selections_replaced / s.selections, s.selections_early / s.selections
    of_all = [f"{100 * share:.0f}" for share in (s.tokens_repeated / found.n_tokens, *other)]
    change = np.mean(found.chosen != high.chosen)
    accuracy = f"{100 * is_right.mean():.1f} | {100 * mean:+.1f} ± {100 * half:.1f} | {100 * change:.1f}"
    return f"| {name} | {accuracy} | {kl.mean():.3g} | {parts} | {' | '.join(of_all)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", type=Path, nargs="+")
    add("--text", type=Path)
    add("--tasks", type=Path)
    add("-n", type=int, default=300, help="tasks of the text (default: %(default)s)")
    add("--pools", type=float, default=0.5, help="share of the experts in memory where some are replaced")
    add("--widths", type=Path, metavar="LINES")
    add("--fit", type=Path, metavar="FILE", help="text that the static widths are fitted on")
    add("--arms", nargs="+", default=[*ARMS], choices=ARMS, help="beside all high")
    args = parser.parse_args()
    if not (args.text or args.tasks) or bool(args.widths) != bool(args.fit):
        parser.error("give --text or --tasks, and --widths with --fit")
    model, *calibrated = args.model
    arms: list[tuple[str, Path, Mapping[str, Any]]] = [("all high", model, HIGH)]
    own = {"policy": "lru", "prefetch": 0, "strict": True}
    arms += [(f"calibrated, {each.stem}", each, own) for each in calibrated]
    if args.widths:
        costs = costs_of(args.widths)
        given = costs, fitted(model, costs, args.fit.read_text())
        by_expert = {**HIGH, **STRICT, "rule": "edgemoe", "costs": given}
        arms.append(("static widths", model, by_expert))
    arms += [(name, model, ARMS[name]) for name in args.arms if name != "all high"]
    with opened(model, ALL, HIGH) as session:
        if args.tasks:
            tasks = of_user(session, args.tasks)
        else:
            tasks = of_text(session.model.tokenize(args.text.read_text()), args.n)
    print(
        "| arm | right, % | less all high | answers that change, % | KL | high / low / skipped, % "
        "| computed twice, % | replaced, % | early, % |\n|---|---|---|---|---|---|---|---|---|"
    )
    right, high = np.array([task.right for task in tasks]), None
    for name, path, settings in arms:
        with contextlib.ExitStack() as stack:
            if "device" in settings:
                address, _ = stack.enter_context(rpc_server.running(models.lib_dir()))
                add_rpc_servers(address)
            share = args.pools if {"degrade", "early"} & {*settings} else ALL  # answers are alike, and sooner
            found = answers(stack.enter_context(opened(path, share, settings)), tasks)
        high = high or found
        print(row(name, found, high, right), flush=True)


if __name__ == "__main__":
    main()
