# SPDX-License-Identifier: MIT
"""Context checkpoints, their gain and cost: four growing conversations with and without them, in one limit.

    python tests/models_bed/snapshots.py [NAME ...]

Serves models of the test bed that have states or windows, with a part of the experts in memory. Each turn
sends the prompt with 60 tokens more and without the answer, as a client does that edits it.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import models
from servers import Server, serving

NAMES = ("qwen3.6-35b", "gpt-oss-20b", "gemma-4-26b")
N_CLIENTS, N_TURNS, N_NEW, N_ANSWER = 4, 6, 40, 4
CTX = 4096
BESIDE = 120 << 20  # bytes of the process beside weights and experts
MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """hits: share of experts that were in memory.  computed: prompt tokens.  peak: bytes above the limit."""

    hits: float
    computed: int
    read: int
    seconds: float
    snapshots: int
    slots: int
    peak: int


def talk(server: Server, number: int) -> int:
    """A conversation; returns the prompt tokens that were computed."""
    rng, tokens, computed = random.Random(number), list[int](), 0
    for _ in range(N_TURNS):
        tokens += [rng.randrange(3, 250) for _ in range(N_NEW)]
        body = {"prompt": tokens, "n_predict": N_ANSWER, "temperature": 0, "ignore_eos": True}
        answer = server.request("/completion", body)
        assert answer.status == 200, answer.text
        computed += answer.json["timings"]["prompt_n"]
    return computed


def measure(model: Path, limit: int, *options: object) -> Row:
    size = ("--ctx-size", CTX, "--parallel", N_CLIENTS, "--batch", 128)
    with serving(model, model.with_suffix(".log"), "--memory", limit, *size, *options) as server:
        start = time.monotonic()
        with ThreadPoolExecutor(N_CLIENTS) as pool:
            computed = sum(pool.map(lambda number: talk(server, number), range(N_CLIENTS)))
        seconds, cache = time.monotonic() - start, server.cache()
        hits = cache["hits_high"] / (cache["hits_high"] + cache["misses_high"])
        held = (cache["snapshot_bytes"], cache["pool_slots_high"])
        return Row(hits, computed, cache["bytes_read"], seconds, *held, server.peak() - limit)


def main() -> int:
    n_prompt = N_CLIENTS * sum(N_NEW * n for n in range(1, N_TURNS + 1))
    print(f"{n_prompt} prompt tokens in all")
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or NAMES:
            model = Path(folder) / f"{name}.gguf"
            command = (sys.executable, Path(__file__).with_name("make.py"), name, model)
            subprocess.run(list(map(str, command)), check=True, capture_output=True)
            limit = model.stat().st_size - models.routed_expert_bytes(model) * 3 // 5 + BESIDE
            for kind, options in (("with", ()), ("without", ("--ctx-checkpoints", 0))):
                row = measure(model, limit, *options)
                print(
                    f"{name} {kind}: {row.snapshots / MIB:.0f} MiB, {row.slots} experts, "
                    f"hits {row.hits:.1%}, {row.computed} computed, {row.read / MIB:.0f} MiB read, "
                    f"{row.seconds:.1f} s, peak {row.peak / MIB:+.1f} MiB",
                    flush=True,
                )
            model.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
