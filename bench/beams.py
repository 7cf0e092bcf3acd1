# SPDX-License-Identifier: MIT
"""Beam search in stock llama.cpp and in the expert cache, in the same memory: one search drives both.

    python bench/beams.py MODEL --limits 0.25 0.4 --beams 4 8 12

The prompt's tokens are drawn at random, so that any model will do. A step computes one token of each beam.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from pyhobbit.bench import report, routing, runner, system, worker
from pyhobbit.bench.arms import BY_NAME
from pyhobbit.bench.job import Job
from pyhobbit.engine.beams import Fork, assign, search
from pyhobbit.errors import HobbitError

_STOCK = BY_NAME["stock-mmap-128k"]
_PLAIN = replace(BY_NAME["ours"], name="ours, plain layouts", repack=False)  # whose bits are stock's
_ARMS = {arm.name: arm for arm in (_STOCK, _PLAIN, BY_NAME["ours"])}
_PROGRAM = (str(Path(__file__).resolve()), "--child")

#
# one process
#


class Beams(worker.Session):
    """The sequences of one search."""

    def search(self, n_beams: int, n_tokens: int) -> dict[str, Any]:
        """What it found, seconds for each of its steps and bytes read from disk; after append(prompt)."""
        times, places, position = [time.perf_counter()], [0], self._n_past
        read_before = worker.bytes_from_disk()

        def extend(fork: Fork) -> np.ndarray:
            nonlocal places
            places, copies = assign([parent for parent, _ in fork], places, n_beams)
            for source, target in copies:
                self._copy(source, target)
            logits = self._step([token for _, token in fork], position + len(times) - 1, places)
            times.append(time.perf_counter())
            return logits

        found = search(self.logits().copy(), extend, lambda _: False, n_beams, n_tokens)
        return {
            "step_s": (times[-1] - times[0]) / (len(times) - 1),
            "step_bytes": (worker.bytes_from_disk() - read_before) / (len(times) - 1),
            "texts": [each.tokens for each in found],
        }

    def _copy(self, source: int, target: int) -> None:
        memory = self.llama.llama_get_memory(self.context)
        self.llama.llama_memory_seq_rm(memory, target, -1, -1)
        self.llama.llama_memory_seq_cp(memory, source, target, -1, -1)

    def _step(self, tokens: list[int], position: int, sequences: list[int]) -> np.ndarray:
        batch = self.llama.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, (token, sequence) in enumerate(zip(tokens, sequences, strict=True)):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        status = self.llama.llama_decode(self.context, batch)
        self.llama.llama_batch_free(batch)
        if status:
            raise worker.RunError(f"llama_decode failed with status {status}")
        return self.logits(len(tokens))


def child(job: Job) -> dict[str, Any]:
    """Loads the model, reads a prompt and searches."""
    os.chdir(Path(job.model).parent)
    libraries = worker.Libraries(job.lib_dir)
    n_ctx = max(256, job.prompts[0] + job.n_beams * job.n_tokens)
    session = Beams(libraries, job, n_ctx, worker.chosen_batch(job, n_ctx))
    first_s = session.append(job.prompts[0])
    result = {"first_s": first_s, **session.search(job.n_beams, job.n_tokens)}
    session.close()
    return result


#
# all processes
#


def measure(config: runner.BenchConfig, arm_name: str, limit: float, n_beams: int) -> dict[str, Any]:
    """One search in a process of its own, with an empty page cache at its start. Raises HobbitError."""
    arm, limit_bytes = _ARMS[arm_name], int(config.model_bytes * limit)
    system.drop_cached(config.files)
    with tempfile.TemporaryDirectory() as folder:
        routes = Path(folder) / "routing.npz"
        np.savez(routes, sweep=routing.sweep(routing.moe_shape(config.model)).experts)
        what = replace(runner.job(config, arm, limit_bytes, routes), n_beams=n_beams)
        with (
            system.readahead(config.model, arm.readahead_kb),
            system.memory_cgroup(limit_bytes) as cgroup,
        ):
            done = runner.start(what, cgroup, _PROGRAM)
    if done.returncode:
        raise HobbitError(f"{arm_name} with {n_beams} beams: {runner.reason(done, limit_bytes)}")
    return json.loads(done.stdout)


def main() -> None:
    """Prints a table; medians over the repetitions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--limits", type=float, nargs="+", default=[0.25, 0.4], help="shares of the model")
    parser.add_argument("--beams", type=int, nargs="+", default=[4, 8, 12])
    parser.add_argument("--prompt", type=int, default=32, help="tokens (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to search (default: %(default)s)")
    parser.add_argument("--reps", type=int, default=5, help="repetitions (default: %(default)s)")
    args = parser.parse_args()
    config = runner.BenchConfig(
        model=args.model.absolute(),
        arms=tuple(_ARMS.values()),
        prompts=(args.prompt,),
        n_tokens=args.tokens,
    )
    rows = []
    for limit in args.limits:
        for n_beams in args.beams:
            runs = {name: [] for name in _ARMS}
            for _ in range(args.reps):
                for name in _ARMS:
                    runs[name].append(measure(config, name, limit, n_beams))
            rows += [_row(limit, n_beams, name, runs) for name in _ARMS]
    print("\n".join(report.markdown(rows)))


def _row(limit: float, n_beams: int, name: str, runs: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    first_s, step_s, step_bytes = (
        median(run[figure] for run in runs[name]) for figure in ("first_s", "step_s", "step_bytes")
    )
    same = all(run["texts"] == runs[_STOCK.name][0]["texts"] for run in runs[name])
    return {
        "memory": f"{limit:.0%}",
        "beams": str(n_beams),
        "arm": name,
        "step/s": f"{1 / step_s:.2f}",
        "token/s": f"{n_beams / step_s:.2f}",
        "MB/step": f"{step_bytes / 1e6:.0f}",
        "first token": f"{first_s:.2f} s",
        "texts of stock": "yes" if same else "no",
    }


if __name__ == "__main__":
    if sys.argv[1:] == ["--child"]:
        json.dump(child(Job(**json.load(sys.stdin))), sys.stdout)
    else:
        main()
