# SPDX-License-Identifier: MIT
"""The tables of docs/models.md that follow from shapes: which file to take, and how fast it would be at most.

python tests/models_bed/sizes.py
"""

from __future__ import annotations

from dataclasses import dataclass

from pyhobbit.model.recommend import Choice, Machine, Weights, best

GB = 10**9
DISK = 3.0 * GB  # bytes per second, for the table
MEMORY = (16, 32, 64)
FREE = 0.9  # share of the memory that a model may take
# Bits per weight of the experts, and of the rest
KINDS = {
    "IQ1_S": (1.8, 5.5), "UD-Q2_K_XL": (2.9, 6.6), "Q3_K_M": (3.6, 6.6), "IQ4_XS": (4.3, 6.6),
    "Q4_K_M": (4.9, 6.6), "Q6_K": (6.6, 6.6), "Q8_0": (8.5, 8.5),
}  # fmt: skip
MXFP4 = {"MXFP4": (4.25, 8.5)}


@dataclass(frozen=True)
class Shape:
    """The published model: layers with experts, experts of each, those used, rows' lengths of an expert.

    rest: G weights outside the experts.  table: G weights of which a token needs some rows.
    kinds: bits per weight of the published files.
    """

    layers: int
    experts: int
    used: int
    n_embd: int
    n_ff: int
    rest: float
    table: float = 0
    mxfp4: bool = False

    @property
    def n_experts(self) -> int:
        return self.layers * self.experts * 3 * self.n_embd * self.n_ff

    def choices(self, machine: Machine) -> list[Choice]:
        """The smallest first."""
        found = []
        for label, (bits, rest_bits) in sorted(
            (MXFP4 if self.mxfp4 else KINDS).items(), key=lambda kind: kind[1]
        ):
            experts = self.n_experts * bits / 8
            rest, used = self.rest * GB * rest_bits / 8, experts * self.used / self.experts
            table = self.table * GB * 4.5 / 8
            n = self.n_experts + int((self.rest + self.table) * GB)
            weights = Weights(experts, rest, used, table, n)
            size = experts + rest + table
            speed = weights.speed(machine)
            found.append(Choice(label, int(size), 8 * size / n, weights.share(machine.memory), speed))
        return found


SHAPES = {
    "Qwen3-Coder-30B-A3B": Shape(48, 128, 8, 2048, 768, 1.5),
    "Qwen3.6-35B-A3B": Shape(40, 256, 8, 2048, 512, 2.4),
    "Qwen3.8-Flash-Next": Shape(48, 512, 10, 2560, 640, 5.0, table=51.2),
    "gemma-4-26B-A4B": Shape(30, 128, 8, 2816, 704, 3.1),
    "gpt-oss-20b": Shape(24, 32, 4, 2880, 2880, 1.8, mxfp4=True),
    "gpt-oss-120b": Shape(36, 128, 4, 2880, 2880, 2.1, mxfp4=True),
    "LFM2.5-8B-A1B": Shape(22, 32, 4, 2048, 1792, 0.6),
    "GLM-5.3-Flash": Shape(42, 288, 8, 4096, 2048, 16.6),
    "GLM-5.2": Shape(75, 256, 8, 6144, 2048, 19.0),
    "Kimi-K3": Shape(92, 896, 16, 3584, 3072, 57.0),
    "DeepSeek-V4-Flash": Shape(43, 256, 6, 4096, 2048, 7.0),
    "Qwen1.5-MoE-A2.7B": Shape(24, 60, 4, 2048, 1408, 1.9),
    "DeepSeek-V2-Lite": Shape(26, 64, 6, 2048, 1408, 1.3),
    "OLMoE-1B-7B": Shape(16, 64, 8, 2048, 1024, 0.5),
}


def row(name: str) -> str:
    """Weights of the experts and of the rest, and for each memory the file with its size and speed."""
    shape = SHAPES[name]
    experts = shape.n_experts
    cells = [f"{float(f'{experts / GB:.3g}'):g} + {shape.rest + shape.table:.3g} G"]
    for memory in MEMORY:
        choices = shape.choices(Machine(FREE * memory * GB, DISK))
        if not any(each.speed for each in choices):
            cells.append("none fits")
            continue
        chosen = best(choices)
        cells.append(f"{chosen.label}, {chosen.size / GB:.3g} GB, {chosen.share:.0%}, {chosen.speed:.2g}/s")
    return f"| {name} | " + " | ".join(cells) + " |"


def table() -> list[str]:
    """The lines of the page's table, without its header."""
    return [row(name) for name in SHAPES]


if __name__ == "__main__":
    print("\n".join(table()))
