# SPDX-License-Identifier: MIT
"""The peak memory of a process that --memory bounds, by the kernel's count, by the way a model is run.

    python tests/engine/memory_modes.py [MODE...] [--budgets 320M 400M]

prints a table in MiB. The models have random weights, and more bytes of experts than the budgets.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import limits
import models
import random_moe
import servers

from pyhobbit.settings.config import parse_size

MiB = 1 << 20
ABOVE = 8 * MiB  # the budget
BELOW = 0.92  # share of the budget
REQUESTS = 16  # the server leaves this part of it to requests and connections: docs/server.md
# more than a whole micro-batch, so that its buffers are used to their end; then tokens one by one
PROMPT = "A long prompt, so that a batch of it asks for most experts of every layer at once. " * 6
N_TOKENS = 12
SHAPE = random_moe.Shape(n_layer=4, n_embd=1024, n_ff=512, n_expert=64, n_used=8)
LARGE_VOCABULARY = random_moe.Shape(n_layer=4, n_embd=512, n_ff=512, n_expert=128, n_used=8, n_vocab=150_000)
LOW = ("--set", "t1=0.6", "--set", "t2=0.9")


@dataclass(frozen=True)
class Peak:
    """Bytes: of the budget, the most that the process held, and what is left to large requests."""

    budget: int
    peak: int
    requests: int = 0

    @property
    def is_right(self) -> bool:
        return BELOW * self.budget - self.requests <= self.peak <= self.budget + ABOVE


#
# models
#


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="memory-", dir=models.folder()))


@functools.cache
def plain(shape: random_moe.Shape = SHAPE) -> Path:
    path = _folder() / f"plain-{shape.n_vocab}.gguf"
    random_moe.write_model(random_moe.declare("qwen3moe", shape, "q8_0", "q4_0"), path, models.lib_dir())
    return path


@functools.cache
def _converted(name: str, *options: str) -> Path:
    path = _folder() / f"{name}.gguf"
    models.convert(*options, plain(), "-o", path)
    return path


@functools.cache
def _sidecar() -> Path:
    path = _folder() / "beside" / "plain.gguf"
    path.parent.mkdir()
    path.symlink_to(plain())
    models.convert("--low", "q4_0", "--sidecar", path)
    return path


#
# the ways to run a model
#


def _chat(model: Path, budget: int, *options: object) -> int:
    command = [
        sys.executable, "-P", "-m", "pyhobbit", "chat", model, "-p", PROMPT, "-n", N_TOKENS, "--temp", 0,
        "--ctx", 1024, "--memory", budget, *options,
    ]  # fmt: skip
    return _peak_of(command)


def _peak_of(command: list[object]) -> int:
    done = limits.run(command)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.peak_rss


_HOBBIT = """
import sys
from pyhobbit import Hobbit
with Hobbit(sys.argv[1], memory=sys.argv[2], n_ctx=1024, verbose=False) as model:
    model(sys.argv[3], max_tokens=int(sys.argv[4]))
"""


def _hobbit(model: Path, budget: int) -> int:
    return _peak_of([sys.executable, "-P", "-c", _HOBBIT, model, budget, PROMPT, N_TOKENS])


def _serve(model: Path, budget: int, n_slots: int, *options: object, n_rounds: int = 1) -> int:
    log = _folder() / "log"
    limit = ("--memory", budget, "--ctx-size", 1024 * n_slots, "--parallel", n_slots)
    with servers.serving(model, log, *limit, *options) as server, ThreadPoolExecutor(n_slots) as pool:
        prompts = [f"{i} {PROMPT}" for i in range(n_rounds * n_slots)]  # no prompt continues another
        list(pool.map(lambda prompt: server.complete(prompt, N_TOKENS), prompts))
        return server.peak()


def _traced(budget: int) -> int:
    return _chat(plain(), budget, "--trace", _folder() / "trace.csv")


MODES: dict[str, Callable[[int], int]] = {
    "chat": lambda budget: _chat(plain(), budget),
    "chat, prefetch": lambda budget: _chat(plain(), budget, "--prefetch", 2),
    "chat, two tiers": lambda budget: _chat(_converted("tiers", "--low", "q4_0"), budget, *LOW),
    "chat, sidecar": lambda budget: _chat(_sidecar(), budget, *LOW),
    "chat, large vocabulary": lambda budget: _chat(plain(LARGE_VOCABULARY), budget),
    "chat, trace": _traced,
    "Hobbit": lambda budget: _hobbit(plain(), budget),
    "serve, 1 slot": lambda budget: _serve(plain(), budget, 1),
    "serve, 4 slots": lambda budget: _serve(plain(), budget, 4),
    # later rounds fill the memory of old prompts
    "serve, 4 slots, old prompts": lambda budget: _serve(plain(), budget, 4, "--cache-ram", 16, n_rounds=3),
    "serve, 4 slots, two tiers": lambda budget: _serve(_converted("tiers", "--low", "q4_0"), budget, 4, *LOW),
}


def measure(mode: str, budget: int) -> Peak:
    requests = budget // REQUESTS if mode.startswith("serve") else 0
    return Peak(budget, MODES[mode](budget), requests)


def main() -> int:
    parser = argparse.ArgumentParser(description="Print the peak memory by mode and budget.")
    parser.add_argument("modes", nargs="*", default=list(MODES), metavar="MODE", help="default: all")
    parser.add_argument("--budgets", nargs="+", type=parse_size, default=[320 * MiB, 400 * MiB])
    args = parser.parse_args()
    print("| mode | budget | peak | peak of budget | |\n|---|---|---|---|---|", flush=True)
    wrong = 0
    for mode in args.modes:
        for budget in args.budgets:
            found = measure(mode, budget)
            wrong += not found.is_right
            share, verdict = found.peak / budget, "" if found.is_right else "outside"
            print(
                f"| {mode} | {budget / MiB:.0f} | {found.peak / MiB:.0f} | {share:.3f} | {verdict} |",
                flush=True,
            )
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
