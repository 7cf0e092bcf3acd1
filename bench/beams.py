# SPDX-License-Identifier: MIT
"""Beam search in stock llama.cpp and in the expert cache, in the same memory: one search drives both.

    python bench/beams.py MODEL --limits 0.25 0.4 --beams 4 8 12 --results beams.jsonl

The prompt's tokens are drawn at random, so that any model will do. A step computes one token of each beam.
--results keeps each search as soon as it ends: the same command goes on after an interruption.
"""

import json
import signal
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from pyhobbit.bench import routing, runner, system
from pyhobbit.bench.arms import BY_NAME
from pyhobbit.bench.script import option_parser, table_head, table_row
from pyhobbit.errors import HobbitError

_STOCK = BY_NAME["stock-mmap-128k"]
_PLAIN = replace(BY_NAME["ours"], name="ours, plain layouts", repack=False)  # whose bits are stock's
_ARMS = {arm.name: arm for arm in (_STOCK, _PLAIN, BY_NAME["ours"])}
_PROGRAM = (str(Path(__file__).resolve().with_name("beam_worker.py")),)
_COLUMNS = ("memory", "beams", "arm", "runs", "step/s", "token/s", "least - most", "MB/step")
_COLUMNS += ("first token", "texts of stock")


class Case(NamedTuple):
    """One search. limit: share of the model.  repetition: from 0."""

    limit: float
    n_beams: int
    arm: str
    repetition: int


@dataclass(frozen=True)
class Found:
    """What one search took: seconds and bytes of a step, seconds of the first token."""

    first_s: float
    step_s: float
    step_bytes: float
    texts: list[list[int]]


class Results:
    """The searches that are done, also in a file if there is one."""

    def __init__(self, path: Path | None, options: dict[str, Any]) -> None:
        """options: those that the file's searches must share. Raises HobbitError."""
        self._path, self._options = path, options
        self._done: dict[Case, Found] = {}
        lines = path.read_text().splitlines() if path and path.exists() else []
        for record in map(json.loads, lines):
            if record["options"] != options:
                raise HobbitError(f"{path} is of {record['options']}; give another file")
            self._done[Case(*record["case"])] = Found(**record["found"])

    def add(self, case: Case, found: Found) -> None:
        self._done[case] = found
        if self._path:
            with self._path.open("a") as file:
                print(json.dumps({"options": self._options, "case": case, "found": asdict(found)}), file=file)

    def __contains__(self, case: Case) -> bool:
        return case in self._done

    def row(self, limit: float, n_beams: int, arm: str) -> str | None:
        """Medians, or None for an arm without a search."""
        runs = {case.repetition: f for case, f in self._done.items() if case[:3] == (limit, n_beams, arm)}
        if not runs:
            return None
        steps = [found.step_s for found in runs.values()]
        stock = [self._done.get(Case(limit, n_beams, _STOCK.name, repetition)) for repetition in runs]
        same = [f.texts == other.texts for f, other in zip(runs.values(), stock, strict=True) if other]
        cells = (
            f"{limit:.0%}",
            str(n_beams),
            arm,
            str(len(runs)),
            f"{1 / median(steps):.2f}",
            f"{n_beams / median(steps):.2f}",
            f"{n_beams / max(steps):.2f} - {n_beams / min(steps):.2f}",
            f"{median(found.step_bytes for found in runs.values()) / 1e6:.0f}",
            f"{median(found.first_s for found in runs.values()):.2f} s",
            "" if not same else "yes" if all(same) else "no",
        )
        return table_row(cells)


def measure(config: runner.BenchConfig, case: Case) -> Found:
    """One search in a process of its own, with an empty page cache at its start. Raises HobbitError."""
    arm, limit_bytes = _ARMS[case.arm], int(config.model_bytes * case.limit)
    system.drop_cached(config.files)
    with tempfile.TemporaryDirectory() as folder:
        routes = Path(folder) / "routing.npz"
        np.savez(routes, sweep=routing.sweep(routing.moe_shape(config.model)).experts)
        what = replace(runner.job(config, arm, limit_bytes, routes), n_beams=case.n_beams)
        with (
            system.readahead(config.model, arm.readahead_kb),
            system.memory_cgroup(limit_bytes) as cgroup,
        ):
            done = runner.start(what, cgroup, _PROGRAM)
    if done.returncode:
        raise HobbitError(f"{case.arm} with {case.n_beams} beams: {runner.reason(done, limit_bytes)}")
    return Found(**json.loads(done.stdout))


def run(config: runner.BenchConfig, all_beams: list[int], results: Results) -> None:
    """Prints the rows of the arms when their last repetition ends, or when the user ends it."""
    print(table_head(_COLUMNS), flush=True)
    for limit in config.limits:
        for n_beams in all_beams:
            cases = [Case(limit, n_beams, arm.name, i) for i in range(config.reps) for arm in config.arms]
            try:
                for case in cases:
                    if case not in results:
                        results.add(case, measure(config, case))
            finally:
                rows = (results.row(limit, n_beams, arm.name) for arm in config.arms)
                print("\n".join(row for row in rows if row), flush=True)


def main() -> None:
    """Prints a table; medians over the repetitions."""
    parser = option_parser(__doc__)
    add = parser.add_argument
    add("model", type=Path)
    add("--limits", type=float, nargs="+", default=[0.25, 0.4], help="shares of the model")
    add("--beams", type=int, nargs="+", default=[4, 8, 12])
    add("--prompt", type=int, default=32, help="tokens (default: %(default)s)")
    add("--tokens", type=int, default=64, help="tokens to search (default: %(default)s)")
    add("--reps", type=int, default=5, help="repetitions (default: %(default)s)")
    add("--results", type=Path, help="file that keeps each search, and from which an earlier run goes on")
    add("--stock", type=Path, default=runner.BenchConfig.stock, help="unpatched libllama.so's folder")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # readahead and cgroup must go back
    config = runner.BenchConfig(
        model=args.model.absolute(),
        arms=tuple(_ARMS.values()),
        limits=tuple(args.limits),
        reps=args.reps,
        prompts=(args.prompt,),
        n_tokens=args.tokens,
        stock=args.stock,
    )
    options = {"model": args.model.name, "prompt": args.prompt, "tokens": args.tokens}
    try:
        run(config, args.beams, Results(args.results, options))
    except HobbitError as e:
        raise SystemExit(f"beams: {e}") from None
    except KeyboardInterrupt:
        raise SystemExit("beams: interrupted") from None


if __name__ == "__main__":
    main()
