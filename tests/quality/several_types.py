# SPDX-License-Identifier: MIT
"""Static widths of two and of more types (EdgeMoE, III-B) on the tiny model: docs/results/static-widths.md.

    PYTHONPATH=tests python tests/quality/several_types.py

Each expert has one type for all tokens, the one with the least divergence + price * bytes. The divergence was
measured with this expert alone in the type and the others in q8_0. The highest price within the limit on one
half of the text is measured on the other.
"""

import functools
import math
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import models
import numpy as np
from gguf import GGUFReader, GGUFWriter, ReaderTensor

from pyhobbit.model.tiers import routed_part
from pyhobbit.quality.calibration import profile
from pyhobbit.quality.costs import CostRuns
from pyhobbit.quality.evaluate import Costs, Evaluator
from pyhobbit.settings.config import CacheConfig, EngineConfig

N_LAYERS, N_EXPERTS, HIGH = 6, 8, "q8_0"
LOW = ("q4_0", "q3_k", "q2_k")
N_COST_CHUNKS, N_CHUNKS = 4, 16
NEVER = (math.inf,) * N_LAYERS * N_EXPERTS

Types = list[list[str]]
"""A type by layer and expert."""


@functools.cache
def _low_tier(kind: str) -> dict[str, ReaderTensor]:
    tensors = GGUFReader(models.tiny_tiers(HIGH, kind)).tensors
    return {tensor.name: tensor for tensor in tensors if ".low." in tensor.name}


def write_mixed(types: Types, path: Path) -> Path:
    """The tiny model in HIGH, with a low tier in which each expert has its own type."""
    reader = GGUFReader(models.tiny_tiers(HIGH, LOW[0]))
    writer = GGUFWriter(path, reader.fields["general.architecture"].contents())
    for key, value in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, value.contents(), value.types[0], value.types[-1])
    writer.data_alignment = reader.alignment
    for tensor in (each for each in reader.tensors if ".low." not in each.name):
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        if part := routed_part(tensor.name):
            _write_groups(writer, tensor.name.removesuffix(".weight"), types[part.layer])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_groups(writer: GGUFWriter, name: str, types: Sequence[str]) -> None:
    kinds = list(dict.fromkeys(types))
    for group, kind in enumerate(kinds):
        experts = [i for i, each in enumerate(types) if each == kind]
        low = _low_tier(kind)[f"{name}.low.0.weight"]
        data = low.data.reshape(N_EXPERTS, -1, low.data.shape[-1])[experts]
        if len(kinds) > 1:
            writer.add_array(f"hobbit.tier.low.{name}.{group}.experts", experts)
        writer.add_tensor(f"{name}.low.{group}.weight", np.ascontiguousarray(data), raw_dtype=low.tensor_type)


def evaluator(model: Path, rule: str = "edgemoe") -> Evaluator:
    engine = EngineConfig(CacheConfig(pools=64 << 20), 512, n_threads=1)
    return Evaluator(model, engine, rule)


def divergence(model: Path, is_low: np.ndarray, chunks: list[list[int]], reference: np.ndarray) -> float:
    """Mean, with the experts of is_low [layer, expert] in their low version for all tokens."""
    with evaluator(model) as opened:
        opened.set_costs(Costs(tuple(np.where(is_low, 0.0, math.inf).ravel().tolist()), NEVER))
        return opened.measure(chunks, reference, price=1.0).mean_kl


class Widths:
    """Costs of each expert in each type, on the first half of the text."""

    def __init__(self) -> None:
        with evaluator(models.tiny_tiers(HIGH, LOW[0]), "gate") as opened:
            all_chunks = opened.chunks((models.TINY / "heldout.txt").read_text())
            chunks = [all_chunks[i * len(all_chunks) // N_CHUNKS] for i in range(N_CHUNKS)]
            self.halves = [chunks[::2], chunks[1::2]]
            (first, seen), (second, others) = (profile(opened, half) for half in self.halves)
            high, _ = opened.expert_bytes
        self.references = [first, second]
        self.costs = {HIGH: np.zeros((N_LAYERS, N_EXPERTS))}
        self.n_bytes = {HIGH: high}
        uses = [np.bincount(others.experts[:, i].ravel(), minlength=N_EXPERTS) for i in range(N_LAYERS)]
        self.uses = np.array(uses) / len(others.sequences)
        for kind in LOW:
            with evaluator(models.tiny_tiers(HIGH, kind)) as opened:
                some = self.halves[0][:N_COST_CHUNKS]
                part = seen.first(sum(map(len, some)))
                runs = CostRuns(opened, some, first[:N_COST_CHUNKS], part)
                self.costs[kind] = np.reshape(runs.by_expert().low, (N_LAYERS, N_EXPERTS))
                self.n_bytes[kind] = opened.expert_bytes[1]

    def prices(self, types: Sequence[str]) -> list[float]:
        """Prices at which some expert changes its type, ascending."""
        found = {0.0}
        for a, b in combinations(types, 2):
            changes = (self.costs[b] - self.costs[a]) / (self.n_bytes[a] - self.n_bytes[b])
            found |= set(changes[changes > 0].tolist())
        return [*sorted(found), 2 * max(found)]

    def chosen(self, types: Sequence[str], price: float) -> Types:
        best = np.argmin([self.costs[kind] + price * self.n_bytes[kind] for kind in types], axis=0)
        return [[types[i] for i in row] for row in best]

    def measured(self, types: Types, half: int) -> float:
        is_low = np.array(types) != HIGH
        low = [[LOW[-1] if each == HIGH else each for each in row] for row in types]
        model = write_mixed(low, models.folder() / "several-types.gguf")
        found = divergence(model, is_low, self.halves[half], self.references[half])
        model.unlink()
        return found

    def within(self, types: Sequence[str], limit: float) -> Types | None:
        """The cheapest within the limit on the first half, by bisection."""
        prices = self.prices(types)
        if self.measured(self.chosen(types, 0.0), 0) > limit:
            return None
        known, beyond = 0, len(prices)
        while beyond - known > 1:
            middle = (known + beyond) // 2
            holds = self.measured(self.chosen(types, prices[middle]), 0) <= limit
            known, beyond = (middle, beyond) if holds else (known, middle)
        return self.chosen(types, prices[known])

    def row(self, types: Sequence[str], limit: float) -> str:
        found = self.within(types, limit)
        if found is None:
            return f"| {' + '.join(types)} | {limit:g} | not reached | | |"
        counts = " / ".join(str(sum(row.count(kind) for row in found)) for kind in types)
        bytes_ = np.array([[self.n_bytes[each] for each in row] for row in found])
        n_bytes = float((self.uses * bytes_).sum())
        return (
            f"| {' + '.join(types)} | {limit:g} | {counts} | {n_bytes / 1024:.0f} | "
            f"{self.measured(found, 1):.2g} |"
        )


def main() -> None:
    widths = Widths()
    print("| types | limit | experts | KiB per token | KL on the second half |\n|---|---|---|---|---|")
    for n in (2, 3, 4):
        for types in combinations((HIGH, *LOW), n):
            for limit in (0.003, 0.01):
                print(widths.row(types, limit), flush=True)


if __name__ == "__main__":
    main()
