# SPDX-License-Identifier: MIT
"""One beam search, in a process of its own: what bench/beams.py starts.

Imports nothing that loads this package's libllama.so: stock llama.cpp's may be the one.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from pyhobbit.bench import worker
from pyhobbit.bench.job import Job, tell
from pyhobbit.engine.beams import Fork, assign, search


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


def measure() -> dict[str, Any]:
    """The job comes from standard input. Loads the model, reads a prompt and searches."""
    job = Job(**json.load(sys.stdin))
    os.chdir(Path(job.model).parent)
    libraries = worker.Libraries(job.lib_dir)
    n_ctx = max(256, job.prompts[0] + job.n_beams * job.n_tokens)
    session = Beams(libraries, job, n_ctx, worker.chosen_batch(job, n_ctx))
    first_s = session.append(job.prompts[0])
    result = {"first_s": first_s, **session.search(job.n_beams, job.n_tokens)}
    session.close()
    return result


if __name__ == "__main__":
    sys.exit(tell(measure))
