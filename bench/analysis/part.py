# SPDX-License-Identifier: MIT
"""One part of the report: the figures that come of it, as values for JSON."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench.harness.system import ROOT
from pyhobbit.errors import HobbitError
from pyhobbit.model.file_names import calibration_path
from pyhobbit.model.model_file import ModelFile
from pyhobbit.quality.evaluate import Chunk, Evaluator
from pyhobbit.settings.config import CacheConfig, CalibrationConfig, EngineConfig
from pyhobbit.settings.resolve import resolve

Figure = dict[str, Any]
"""One figure: kind, papers, title, theirs (what the paper shows) and its values."""

NAMES = {"gate": "gate (Eq. 2)", "price": "price", "edgemoe": "static widths (EdgeMoE)"}

SHARE = 0.25
"""Share of the experts in high precision that the pools hold where no memory is given."""


@dataclass(frozen=True)
class Run:
    """A model and a text. memory: bytes, None for pools of SHARE.

    n_chunks: parts of the text, of n_ctx tokens.  reps: repetitions of what is timed.  max_kl: limits.
    """

    model: Path
    text: str
    file: ModelFile
    folder: Path
    memory: int | None = None
    n_chunks: int = 8
    n_threads: int | None = None
    reps: int = 3
    n_ctx: int = CalibrationConfig.default_n_ctx
    max_kl: Sequence[float] = (1e-3, 3e-3, 1e-2)

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts in high precision."""
        return next(tier.n_bytes for tier in self.file.tiers if tier.name == "high")

    @property
    def has_low(self) -> bool:
        return len(self.file.tiers) > 1

    def engine(self, **settings: Any) -> EngineConfig:
        """How it is opened: with pools that the settings name, under the memory, or with pools of SHARE."""
        n_used, n_experts = self.file.n_used, self.file.n_experts
        least = 4 * max(n_used.values()) / (n_experts * len(n_used))  # for small models
        bound: dict[str, Any] = {"pools": max(1, int(self.expert_bytes * max(SHARE, least)))}
        if self.memory is not None and "pools" not in settings:
            bound = {"memory": self.memory}
        cache = CacheConfig(**{**bound, **settings})
        return EngineConfig(cache, self.n_ctx, n_threads=self.n_threads)

    def evaluator(self, rule: str = "gate") -> Evaluator:
        """Strict: each token gets exactly what the rule decides."""
        return Evaluator(self.model, self.engine(), rule)

    def chunks(self, evaluator: Evaluator) -> list[Chunk]:
        """At most n_chunks parts, evenly spaced over the text. Raises HobbitError."""
        chunks = evaluator.chunks(self.text, self.n_chunks)
        if not chunks:
            raise HobbitError(f"the text has fewer than {evaluator.n_ctx} tokens; give a longer one")
        return chunks

    def need_low(self) -> None:
        """Raises HobbitError without a low tier."""
        if not self.has_low:
            raise HobbitError(f"the model has no low tier: pyhobbit convert --sidecar {self.model} adds one")


Part = Callable[[Run], list[Figure]]
"""Makes its figures; the report calls it by its name. Raises HobbitError where it cannot."""


def calibrated_rule(model: Path) -> str | None:
    """The rule of the calibration beside a model; None without one."""
    return resolve(model, {})["rule"].value if calibration_path(model).exists() else None


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as JSON holds them: NaN becomes None, and numbers keep five digits."""
    text = json.dumps(values, default=lambda each: each.tolist())  # numpy's
    return json.loads(text, parse_float=lambda n: float(f"{float(n):.5g}"), parse_constant=lambda _: None)


@cache
def results_of_papers() -> dict[str, str]:
    """Results of the papers by figure, as docs/results/figures.md lists them."""
    page = (ROOT / "docs/results/figures.md").read_text("utf-8")
    rows = re.findall(r"^\| ((\w+) [^|]+) \| ([^|]+) \|", page, re.MULTILINE)
    return {
        f"{paper} {name.removeprefix(f'{paper} ')}": shown
        for names, paper, shown in rows
        for name in names.split(", ")
    }


def figure(kind: str, papers: str, title: str, **values: Any) -> Figure:
    """A figure of the papers.  kind: table (rows), map (values), points (x, y) or lines (x, series)."""
    names, shown = papers.split(", "), results_of_papers()
    theirs = "; ".join(shown[name] for name in names if name in shown)
    return plain({"kind": kind, "papers": names, "title": title, "theirs": theirs, **values})


def table(papers: str, title: str, rows: Sequence[Mapping[str, Any]]) -> Figure:
    """A figure of rows by column."""
    return figure("table", papers, title, rows=rows)


def by_layer(papers: str, title: str, x: Sequence[int], series: Mapping[str, Any], **values: Any) -> Figure:
    """Lines over the layers' numbers."""
    return figure("lines", papers, title, x=x, series=series, **{"x_label": "layer", **values})
