# SPDX-License-Identifier: MIT
"""Decodes with one arm on a modelled device, in a process of its own: bench.compare --prices starts it.

Reads a Job as JSON from standard input and writes what measure() finds to standard output.
"""

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.harness import trace
from bench.harness.worker import Job, Libraries, Session, counted, serve
from pyhobbit.cli.main import ended

COUNTS = ("launches", "replays", "waits", "copies", "reads")
"""Counts per layer. waits: of the host for the device, or what it has ended.  reads: copies to the host."""
BUSY = ("device", "link", "cpu")


class Device:
    """The preloaded library: tests/modelled_device/time-face.cpp."""

    def __init__(self, folder: Path) -> None:
        """folder: of the process's llama.cpp, which is loaded already."""
        for name in ("ggml-base", "ggml-cpu", "ggml"):  # where the library finds their functions
            ggml = ctypes.CDLL(str(folder / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)
        self._library = library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        library.modelled_report.restype = ctypes.c_char_p
        library.ggml_backend_init.restype = ctypes.c_void_p
        library.modelled_configure(f"compute=0 {os.environ['MODELLED']}".encode())
        library.modelled_begin()
        ggml.ggml_backend_register(ctypes.c_void_p(library.ggml_backend_init()))

    def route(self, experts: NDArray[np.int32], weights: NDArray[np.float32], n_experts: int) -> None:
        """Each token takes the next row."""
        self._kept = np.ascontiguousarray(experts, np.int32), np.ascontiguousarray(weights, np.float32)
        pointers = [array.ctypes.data for array in self._kept]
        self._library.modelled_route((ctypes.c_int64 * 6)(*pointers, *experts.shape, n_experts))

    def report(self) -> dict[str, int]:
        """Counts and ns since the start, and the time now."""
        return json.loads(self._library.modelled_report())


def measure(job: Job) -> dict[str, Any]:
    """Decodes in virtual time. Raises HobbitError."""
    libraries = Libraries(job.lib_dir)
    device = Device(libraries.folder)
    shape = trace.moe_shape(Path(job.model))
    n_tokens = sum(job.prompts) + job.n_warm_up + job.n_tokens
    chosen = trace.seeded_routing(shape, n_tokens, trace.PROFILED)  # second passes take some behind
    swept = trace.sweep(shape)
    weights = np.concatenate([trace.weights_of(swept), trace.weights_of(chosen, job.spread)])
    session = Session(libraries, job, max(512, max(job.prompts) + job.n_warm_up + job.n_tokens))
    device.route(np.concatenate([swept, chosen]), weights, shape.n_experts)

    def spent(*passes: int) -> dict[str, int]:
        """Counts and ns of passes with so many tokens."""
        before = device.report()
        for n_tokens in passes:
            session.append(n_tokens)
        return {name: value - before[name] for name, value in device.report().items()}

    spent(*[1] * len(swept))
    first = {}
    for n_tokens in sorted(job.prompts):
        session.restart()
        first[str(n_tokens)] = spent(n_tokens)
    spent(*[1] * job.n_warm_up)
    stats = session.counters()
    found = spent(*[1] * job.n_tokens)
    of_cache = counted(session, stats, found["now"] / 1e9, job.n_tokens)
    session.close()
    n_layers = shape.n_layers * job.n_tokens
    return of_cache | {
        "ttft_s": {n: each["now"] / 1e9 for n, each in first.items()},
        "ttft_bytes": {n: each["copied_bytes"] for n, each in first.items()},
        "n_decoded": job.n_tokens,
        "tokens_per_second": 1e9 * job.n_tokens / found["now"],
        "token_ms": found["now"] / job.n_tokens / 1e6,
        "layer_beside_us": (found["now"] - found["any"]) / n_layers / 1e3,
        "per_layer": {name: found[name] / n_layers for name in COUNTS},
        "idle_us": {name: (found["now"] - found[name]) / n_layers / 1e3 for name in BUSY},
    }


if __name__ == "__main__":
    sys.exit(ended(lambda: serve(measure)))
