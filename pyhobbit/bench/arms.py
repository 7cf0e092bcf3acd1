# SPDX-License-Identifier: MIT
"""What is compared. An arm is data: another one is another line here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pyhobbit.config import Setting

Build = Literal["stock", "ours"]


@dataclass(frozen=True)
class Arm:
    """One way to run the model.

    build: unpatched llama.cpp or this package's.  fits: everything in memory, without a limit.
    mmap: the model is mapped (stock).  repack: weights may be kept in ggml's repacked layouts.
    readahead_kb: of the model's disk, while the arm runs; None leaves it alone.
    low_tier: opened with the low tier and the thresholds of the run.  settings: of hobbit.h.
    """

    name: str
    summary: str
    build: Build
    fits: bool = False
    mmap: bool = False
    repack: bool = False
    readahead_kb: int | None = None
    low_tier: bool = False
    settings: Mapping[str, Setting] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.build == "stock" and (self.settings or self.low_tier):
            raise ValueError(f"{self.name}: stock llama.cpp knows no settings of the expert cache")


def _ours(name: str, summary: str, *, low_tier: bool = False, fits: bool = False, **settings: Setting) -> Arm:
    keys = {f"hobbit.{key}": value for key, value in settings.items()}
    return Arm(name, summary, "ours", fits=fits, repack=True, low_tier=low_tier, settings=keys)


ARMS = (
    Arm("stock-mmap", "llama.cpp, mmap, the disk's own readahead", "stock", mmap=True),
    Arm("stock-mmap-128k", "llama.cpp, mmap, readahead 128 KiB", "stock", mmap=True, readahead_kb=128),
    Arm("stock-ram", "llama.cpp, all in memory, plain layouts", "stock", fits=True),
    Arm("stock-repacked", "llama.cpp, all in memory, repacked", "stock", fits=True, repack=True),
    _ours("ours-resident", "expert cache that holds every expert", fits=True),
    _ours("ours", "expert cache, everything in high precision"),
    _ours("ours-mixed", "expert cache, high and low precision by Eq. 2", low_tier=True),
    _ours("ours-noprefetch", "as ours, without prefetch", prefetch=0),
    _ours("ours-mixed-noprefetch", "as ours-mixed, without prefetch", low_tier=True, prefetch=0),
    _ours("lru", "LRU, demand only, as mixtral-offloading", policy="lru", prefetch=0),
    _ours("lfu", "LFU, demand only", policy="lfu", prefetch=0),
    _ours("moe-infinity", "the policy of MoE-Infinity, demand only", policy="moe-infinity", prefetch=0),
    _ours("edgemoe", "the policy of EdgeMoE, demand only", policy="edgemoe", prefetch=0),
)

BY_NAME = {arm.name: arm for arm in ARMS}
