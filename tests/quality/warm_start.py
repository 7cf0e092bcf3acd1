# SPDX-License-Identifier: MIT
"""Hits after load, with pools that begin with the most used experts: docs/results/warm-start.md.

    python tests/quality/warm_start.py MODEL --counts FILE --text FILE
    python tests/quality/warm_start.py --trace TRACE

The counts of an importance matrix are the uses of each expert on its text, so they are taken from the routing
of a text. A trace has one text: its earlier tokens are counted.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyhobbit.quality.calibration import profile, routes
from pyhobbit.quality.evaluate import Evaluator
from pyhobbit.routing.trace import Simulation, read_trace, simulate, use_rates
from pyhobbit.settings.config import CacheConfig, EngineConfig

N_FIRST, N_PROMPT = 50, 32  # tokens that count, and before them
N_CHUNKS, N_CTX = 8, 128
SHARES, POLICIES = (0.1, 0.25, 0.5), ("lru", "echo")
Runs = Sequence[NDArray[Any]]
"""Routes of a prompt and of the tokens after it."""


def of_model(model: Path, counted: str, text: str) -> tuple[Simulation, Runs]:
    """The shape, with the uses of one text, and the first tokens of parts of another one."""
    with Evaluator(model, EngineConfig(CacheConfig(pools=1 << 30), N_CTX, n_threads=1)) as evaluator:
        info, parts = evaluator.info, [evaluator.chunks(of) for of in (counted, text)]
        some = [[of[i * len(of) // N_CHUNKS] for i in range(N_CHUNKS)] for of in parts]
        (_, seen), (_, first) = (profile(evaluator, chunks) for chunks in some)
    n_tokens = N_CHUNKS * evaluator.n_ctx
    uses = use_rates(routes(seen, slice(n_tokens)), info.n_layers, info.n_experts, n_tokens)
    starts = range(0, n_tokens, evaluator.n_ctx)
    runs = [routes(first, slice(start, start + N_PROMPT + N_FIRST)) for start in starts]
    return Simulation(info.n_layers, info.n_experts, info.n_experts_used, prior=uses), runs


def of_trace(path: Path) -> tuple[Simulation, Runs]:
    """The uses of the tokens before the last ones, and those."""
    trace = read_trace(path)
    split = trace.n_decoded - N_FIRST - N_PROMPT
    if split < 1:
        raise SystemExit(
            f"{path} has {trace.n_decoded} tokens, and more than {N_FIRST + N_PROMPT} are needed"
        )
    counted = trace.routes[trace.routes["counted"] != 0]
    before, after = np.split(counted, [np.searchsorted(counted["token"], counted["token"][0] + split)])
    uses = use_rates(before, trace.n_layers, trace.n_experts, split)
    return Simulation(trace.n_layers, trace.n_experts, trace.n_used, prior=uses), [after]


def row(shape: Simulation, runs: Runs, policy: str, share: float, n_prompt: int) -> str:
    """Hits of the first tokens in percent, and experts read by token, without and with the counts."""
    full = replace(shape, floors=True, policy=policy).with_slots(share)
    hits, read = [], []
    for prior in ((), shape.prior):
        of_runs = [simulate(_after(run, n_prompt), replace(full, prior=prior)) for run in runs]
        hits.append(np.array([of.hit_rate for of in of_runs]))
        read.append(np.mean([of.misses_per_token for of in of_runs]))
    gain = hits[1] - hits[0]
    half = f" ± {196 * gain.std(ddof=1) / len(runs) ** 0.5:.1f}" if len(runs) > 1 else ""
    cells = f"{100 * hits[0].mean():.1f} | {100 * hits[1].mean():.1f} | {100 * gain.mean():+.1f}{half}"
    fill = full.slots_high / N_FIRST
    return f"| {n_prompt} | {policy} | {share:.0%} | {cells} | {read[0]:.1f} | {read[1]:.1f} + {fill:.1f} |"


def _after(run: NDArray[Any], n_prompt: int) -> NDArray[Any]:
    """The last n_prompt tokens of the prompt, which do not count, and the first ones after it."""
    token = run["token"] - run["token"][0]
    found = run[token >= N_PROMPT - n_prompt].copy()
    found["counted"] = token[token >= N_PROMPT - n_prompt] >= N_PROMPT
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--counts", type=Path, help="text that is counted")
    parser.add_argument("--text", type=Path, help="text that is run")
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    found = (
        of_trace(args.trace)
        if args.trace
        else of_model(args.model, args.counts.read_text(), args.text.read_text())
    )
    print("| prompt | policy | in memory | hits, % | with counts | gain | read | with counts |")
    print("|---|---|---|---|---|---|---|---|")
    for n_prompt, policy, share in product((0, N_PROMPT), POLICIES, SHARES):
        print(row(*found, policy, share, n_prompt), flush=True)


if __name__ == "__main__":
    main()
