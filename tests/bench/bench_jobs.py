# SPDX-License-Identifier: MIT
"""Single processes of bench.compare."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest

from bench.harness import runner, worker

PROMPTS = (4, 12)


def measure(model: Path, **options: Any) -> SimpleNamespace:
    """In a process of its own, as the bench does it, but forked."""
    what = worker.Job(str(model), prompts=PROMPTS, n_warm_up=3, n_tokens=5, seconds=99, **options)
    forks = SimpleNamespace(run=forked.run_for_bench, TimeoutExpired=subprocess.TimeoutExpired)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runner, "subprocess", forks)
        return SimpleNamespace(**runner.start(what))


def ours(pools: int, **settings: Any) -> dict[str, Any]:
    """Options of measure() for the expert cache."""
    given = {"enable": True, "pools": pools, **settings}
    return {"lib_dir": None, "settings": {f"hobbit.{key}": value for key, value in given.items()}}
