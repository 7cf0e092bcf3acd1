# SPDX-License-Identifier: MIT
"""Quality loss by low precision, on the tiny model: bytes per token, perplexity, divergence from all high.

The precision rules under several bounds, beside a random choice and skipping alone.

    python -m bench.quality

Numbers and costs are fitted on the first half of the held-out text and measured on the second.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.analysis.figures import threshold_for_share
from bench.tables import FOLDER, ROOT, option_parser, table_head
from pyhobbit.native.paths import BIN_DIR, VENDOR_DIR
from pyhobbit.quality.calibration import profile
from pyhobbit.quality.costs import CostRuns, static_costs
from pyhobbit.quality.evaluate import Chunk, Evaluator, Quality
from pyhobbit.quality.search import Bound, Trials, cheapest_by_gate, cheapest_by_price
from pyhobbit.routing.observe import observed
from pyhobbit.routing.rules import unimportance
from pyhobbit.settings.config import CacheConfig, CalibrationConfig, EngineConfig, EvaluationConfig

TINY = ROOT / "tests/tiny_moe"
PAIRS = ("f16+q4_0", "q8_0+q2_k", "f16+iq1_m")
NAMES = {"gate": "gate (Eq. 2)", "price": "price", "edgemoe": "static widths (EdgeMoE)"}
RULES = tuple(NAMES)
HEAD = [
    *("experts", "t1", "t2", "price", "high", "low", "skipped", "KiB per token", "perplexity"),
    *("ratio", "mean KL", "99 % KL", "same top-1"),
]
# All experts fit: precision is measured, not the cache. A second thread would wait more than compute.
ENGINE = EngineConfig(CacheConfig(pools=64_000_000), EvaluationConfig.default_n_ctx, n_threads=1)


def _run(*command: str | Path, **environment: str) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, **environment})


def convert(high: str, low: str) -> Path:
    """The tiny model with these two tiers."""
    path = FOLDER / f"tiny-{high}-{low}.gguf"
    if not path.exists():
        importance: list[str | Path] = ["--imatrix", imatrix()] if low.startswith("iq") else []
        tiers: list[str | Path] = ["--force", "--high", high, "--low", low, *importance]
        _run(sys.executable, "-P", "-m", "pyhobbit", "convert", *tiers, TINY / "model", "-o", path)
    return path


def plain_f16() -> Path:
    """The tiny model as llama.cpp's own converter writes it."""
    path = FOLDER / "tiny-f16.gguf"
    if not path.exists():
        search = os.pathsep.join([str(VENDOR_DIR), str(VENDOR_DIR / "gguf-py")])
        script: list[str | Path] = [
            VENDOR_DIR / "convert_hf_to_gguf.py",
            TINY / "model",
            "--outtype",
            "f16",
            "--outfile",
            path,
        ]
        _run(sys.executable, *script, PYTHONPATH=search)
    return path


def imatrix() -> Path:
    """The importance matrix that the coarsest types need, from the first half of the held-out text."""
    path, text = FOLDER / "tiny.imatrix.gguf", FOLDER / "first-half.txt"
    if not path.exists():
        plain, whole = plain_f16(), (TINY / "heldout.txt").read_text(encoding="utf-8")
        text.write_text(whole[: len(whole) // 2], encoding="utf-8")
        _run(BIN_DIR / "llama-imatrix", "-m", plain, "-f", text, "-o", path, "-c", "512", "-t", "1")
    return path


def halves(evaluator: Evaluator, n_chunks: int) -> tuple[list[Chunk], list[Chunk]]:
    """n_chunks each of the first and of the second half of the held-out text."""
    chunks = evaluator.chunks((TINY / "heldout.txt").read_text(encoding="utf-8"))
    middle = len(chunks) // 2
    if n_chunks > middle:
        raise SystemExit(f"--chunks: half of the text has {middle} of them")
    return chunks[:n_chunks], chunks[middle : middle + n_chunks]


def row(name: str, quality: Quality) -> str:
    q = quality
    return (
        f"| {name} | {q.t1:.3f} | {q.t2:.3f} | {q.price:.2g} "
        f"| {q.share_high:.1%} | {q.share_low:.1%} | {q.share_skipped:.1%} "
        f"| {q.bytes_per_token / 1024:.0f} | {q.perplexity:.3f} | {q.perplexity_ratio:.4f} "
        f"| {q.mean_kl:.2e} | {q.p99_kl:.2e} | {q.same_top1:.1%} |"
    )


def equal_bytes_share(cost: float, expert_bytes: tuple[float, float]) -> float:
    """The share in high precision at which nothing need be skipped; cost: bytes by those of all high."""
    low_cost = expert_bytes[1] / expert_bytes[0]
    return max(0.0, (cost - low_cost) / (1 - low_cost))


@contextlib.contextmanager
def evaluators(
    path: Path, engine: EngineConfig, rules: Sequence[str] = RULES
) -> Iterator[dict[str, Evaluator]]:
    """The model once for each rule."""
    with contextlib.ExitStack() as stack:
        yield {
            rule: stack.enter_context(Evaluator(path, EvaluationConfig(engine, rule=rule))) for rule in rules
        }


class Fitted:
    """The searches of the opened rules on one text, each setting measured once."""

    def __init__(self, opened: dict[str, Evaluator], chunks: list[Chunk], engine: EngineConfig) -> None:
        self.reference, self.seen = profile(opened["gate"], chunks)
        self._chunks, self._engine = chunks, engine
        self.trials = {rule: Trials(opened[rule], chunks, self.reference) for rule in opened}
        runs = {rule: CostRuns(opened[rule], chunks, self.reference, self.seen) for rule in opened}
        self.costs = {"price": runs["price"].by_layer()}
        if "edgemoe" in opened:
            self.costs["edgemoe"] = static_costs(runs["edgemoe"].by_expert())

    def cheapest(self, rule: str, max_kl: float) -> Quality:
        config = CalibrationConfig(self._engine, max_kl=max_kl)
        bound = Bound.of(config)
        if rule == "gate":
            return cheapest_by_gate(self.trials[rule], bound, unimportance(observed(self.seen.weights)))
        return cheapest_by_price(self.trials[rule], bound, self.costs[rule], self.seen)


def arms(
    path: Path, engine: EngineConfig, n_chunks: int, bounds: list[float]
) -> Iterator[tuple[str, Quality]]:
    """All settings of one pair of types."""
    with (
        evaluators(path, engine) as opened,
        Evaluator(path, EvaluationConfig(engine, rule="random")) as random,
    ):
        gate = opened["gate"]
        chunks, measured = halves(gate, n_chunks)
        reference, seen = profile(gate, measured)
        scores = unimportance(observed(seen.weights))
        high = gate.measure(measured, 1.0, 1.0, reference)
        yield "all high", high
        yield "all low", random.measure(measured, 0.0, 1.0, reference)
        fitted = Fitted(opened, chunks, engine)
        for bound in bounds:
            found = {}
            for rule in RULES:
                q = fitted.cheapest(rule, bound)
                if rule != "gate":
                    opened[rule].set_costs(fitted.costs[rule])
                found[rule] = opened[rule].measure(measured, q.t1, q.t2, reference, price=q.price)
                yield f"{NAMES[rule]}, KL at most {bound:g}", found[rule]
            mix = found["gate"]
            by_chance = (mix.share_high, mix.share_high + mix.share_low)
            yield "- random choice of gate's mix", random.measure(measured, *by_chance, reference)
            share = equal_bytes_share(mix.bytes_per_token / high.bytes_per_token, gate.expert_bytes)
            yield "- random, none skipped, at gate's bytes", random.measure(measured, share, 1.0, reference)
            threshold = threshold_for_share(scores, 1 - mix.bytes_per_token / high.bytes_per_token)
            yield "- skipping, at gate's bytes", gate.measure(measured, threshold, threshold, reference)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument(
        "--chunks", type=int, default=16, help="number of 512-token chunks, to calibrate and to measure"
    )
    parser.add_argument("--pairs", nargs="+", default=PAIRS, metavar="HIGH+LOW")
    parser.add_argument("--max-kl", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2], metavar="NATS")
    args = parser.parse_args()
    for pair in args.pairs:
        print(f"\n{pair}, {args.chunks} x {ENGINE.n_ctx} tokens\n\n{table_head(HEAD)}")
        for name, quality in arms(convert(*pair.split("+")), ENGINE, args.chunks, args.max_kl):
            print(row(name, quality), flush=True)


if __name__ == "__main__":
    main()
