# SPDX-License-Identifier: MIT
"""Single processes of bench.compare."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import numpy as np
import pytest

from bench.harness import runner, worker
from bench.harness import trace as recorded
from pyhobbit.routing.trace import read_trace

PROMPTS = (4, 12)


def routes(folder: Path, shape: recorded.MoeShape, trace: Path | None) -> Path:
    """The routing of a Job: the trace's, or the model's own."""
    arrays = {"sweep": recorded.sweep(shape).experts}
    if trace is not None:
        laid = recorded.lay_over(read_trace(trace), shape)
        arrays |= {"experts": laid.experts, "weights": laid.weights}
    np.savez(folder / "routing.npz", **arrays)
    return folder / "routing.npz"


def measure(model: Path, routing_file: Path, **options: Any) -> SimpleNamespace:
    """In a process of its own, as the bench does it, but forked."""
    what = worker.Job(
        str(model), routing=str(routing_file), prompts=PROMPTS, n_warm_up=3, n_tokens=5, seconds=99, **options
    )
    forks = SimpleNamespace(run=forked.run_for_bench, TimeoutExpired=subprocess.TimeoutExpired)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runner, "subprocess", forks)
        return SimpleNamespace(**runner.start(what))


def ours(pools: int, **settings: Any) -> dict[str, Any]:
    """Options of measure() for the expert cache."""
    given = {"enable": True, "pools": pools, **settings}
    return {"lib_dir": None, "settings": {f"hobbit.{key}": value for key, value in given.items()}}
