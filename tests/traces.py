# SPDX-License-Identifier: MIT
"""Route traces for tests."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from pyhobbit.routing.trace import Trace

COLUMNS = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"

RECORDED = Path(__file__).resolve().parent / "recorded"
SHAPES = {"qwen3-30b-a3b": (48, 128, 6), "gpt-oss-120b": (36, 128, 2)}
"""Shapes of the recorded traces: layers, experts, experts used."""

Row = tuple[int, int, int, int, int, int, float]
"""turn, phase, step, layer, slot, expert, weight"""


def header(n_layers: int, n_experts: int, n_used: int) -> list[str]:
    """The lines before the rows; an expert of layer i has 1000 + i bytes."""
    return [
        "# route_trace v1",
        f"# model=a model.gguf arch=mixtral n_layer={n_layers} n_expert={n_experts} n_expert_used={n_used}",
        *(f"# layer={i} expert_bytes={1000 + i} dense_bytes=0" for i in range(n_layers)),
        COLUMNS,
    ]


def write_trace(path: Path, rows: Iterable[Row], n_layers: int, n_experts: int, n_used: int) -> Path:
    """Writes a trace and returns its path."""
    lines = header(n_layers, n_experts, n_used)
    lines += [",".join(map(str, row)) + ",0,1000" for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_recorded(name: str, folder: Path) -> Path:
    """A recorded trace of SHAPES as a file."""
    with np.load(RECORDED / f"{name}.npz") as columns:
        rows = zip(*(columns[each].tolist() for each in _RECORDED_COLUMNS), strict=True)
        return write_trace(folder / f"{name}.csv", ((0, *row) for row in rows), *SHAPES[name])


_RECORDED_COLUMNS = ("phase", "step", "layer", "slot", "expert", "weight")


def letters(text: str) -> list[Row]:
    """One expert per token, in one layer: A is expert 0. Small letters are prefill."""
    return [(0, int(c.isupper()), step, 0, 0, ord(c.upper()) - ord("A"), 1.0) for step, c in enumerate(text)]


def ranked(*tokens: tuple[int, int, int]) -> list[Row]:
    """Decoded tokens of three experts in one layer, with the weights 0.5, 0.3 and 0.2.

    They are worth, at t1 = 0.4 and t2 = 0.7, high precision (score 0), low (0.5) and nothing (0.8).
    """
    weights = (0.5, 0.3, 0.2)
    return [
        (0, 1, step, 0, slot, experts[slot], weights[slot])
        for step, experts in enumerate(tokens)
        for slot in range(3)
    ]


def write_random_trace(path: Path, n_tokens: int, n_layers: int, n_experts: int, n_used: int) -> Path:
    """Random choices; the first two tokens are a prompt."""
    draw = np.random.default_rng(7)
    rows: list[Row] = []
    for token in range(n_tokens):
        for layer in range(n_layers):
            weights = np.sort(draw.random(n_used))[::-1]
            experts = draw.permutation(n_experts)[:n_used]
            rows += [
                (0, int(token >= 2), token, layer, rank, int(experts[rank]), round(float(weights[rank]), 6))
                for rank in range(n_used)
            ]
    return write_trace(path, rows, n_layers, n_experts, n_used)


def turn_lengths(trace: Trace) -> list[int]:
    """Tokens of each turn, in the order of the run."""
    first = trace.routes[trace.routes["layer"] == 0][:: trace.n_used]
    _, counts = np.unique(first["sequence"], return_counts=True)
    return counts.tolist()
