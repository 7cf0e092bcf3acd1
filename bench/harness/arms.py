# SPDX-License-Identifier: MIT
"""Arms of the comparison. An arm is data: another one is another line here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pyhobbit.settings.config import Setting

Build = Literal["stock", "ours"]
Tiers = Literal["high", "low", "priced"]


@dataclass(frozen=True)
class Arm:
    """One way to run the model.

    build: unpatched llama.cpp, or this package's.  fits: everything in memory, without a limit;
    None: without a limit and under each.  mmap: the model is mapped under a limit (stock).
    repack: weights may be kept in ggml's repacked layouts, by stock without a limit alone.
    readahead_kb: of the model's disk, while the arm runs; None leaves it alone.
    tiers: opened with "high" precision alone, or by the thresholds of the run with a "low" tier beside it, or
    "priced" by the model's calibration.  settings: of hobbit.h.
    n_batch: tokens of a prompt per pass; None leaves them to the arm's process (Job).
    """

    name: str
    summary: str
    build: Build
    fits: bool | None = False
    mmap: bool = False
    repack: bool = False
    readahead_kb: int | None = None
    tiers: Tiers = "high"
    settings: Mapping[str, Setting] = field(default_factory=dict)
    n_batch: int | None = None

    def __post_init__(self) -> None:
        if self.build != "ours" and (self.settings or self.tiers != "high"):
            raise ValueError(f"{self.name}: stock llama.cpp knows no settings of the expert cache")


def ours(name: str, summary: str, tiers: Tiers = "high", *, fits: bool = False, **settings: Setting) -> Arm:
    """An arm of this package with these settings, without their prefix."""
    keys = {f"hobbit.{key}": value for key, value in settings.items()}
    return Arm(name, summary, "ours", fits=fits, repack=True, tiers=tiers, settings=keys)


ARMS = (
    Arm("stock", "llama.cpp: repacked, or mapped under a limit", "stock", fits=None, mmap=True, repack=True),
    Arm("stock-128k", "llama.cpp, mapped, readahead 128 KiB", "stock", mmap=True, readahead_kb=128),
    Arm("stock-plain", "llama.cpp, all in memory, plain layouts", "stock", fits=True),
    ours("ours-resident", "expert cache that holds every expert", fits=True),
    ours("ours-resident-plain", "as ours-resident, plain layouts", fits=True, pack=False),
    ours("ours", "expert cache, everything in high precision"),
    ours("ours-eq2", "expert cache, high and low precision by Eq. 2", "low"),
    ours("ours-hobbit", "as ours-eq2, with HOBBIT's own thresholds", "low", t1=0.6, t2=0.9),
    ours("ours-price", "as ours-eq2, by the rule price and --calibration", "priced"),
    ours("ours-noprefetch", "as ours, without prefetch", prefetch=0),
    ours("ours-eq2-noprefetch", "as ours-eq2, without prefetch", "low", prefetch=0),
    ours("lru", "LRU, without prefetch, as mixtral-offloading", policy="lru", prefetch=0),
    ours("lfu", "LFU, without prefetch", policy="lfu", prefetch=0),
    ours("edgemoe", "the policy of EdgeMoE, without prefetch", policy="edgemoe", prefetch=0),
)


def with_batches(arms: Sequence[Arm], batches: Sequence[int]) -> tuple[Arm, ...]:
    """Each arm with each number of prompt tokens per pass; several make arms of their own, as ours@2048."""
    if not batches:
        return tuple(arms)
    names = ("{}@{}" if len(batches) > 1 else "{}",) * len(batches)
    return tuple(
        replace(arm, name=name.format(arm.name, n), n_batch=n)
        for arm in arms
        for name, n in zip(names, batches, strict=True)
    )


def kind(name: str) -> str:
    """The arm that a name of with_batches() was made of."""
    return name.partition("@")[0]


BY_NAME = {arm.name: arm for arm in ARMS}
