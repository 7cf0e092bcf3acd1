# SPDX-License-Identifier: MIT
"""Arms of the comparisons. An arm is data: another one is another line here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pyhobbit.errors import ConfigError
from pyhobbit.settings.config import Setting
from pyhobbit.settings.papers import PAPERS


@dataclass(frozen=True)
class Arm:
    """One way to run the model.

    build: unpatched llama.cpp, ik_llama.cpp, or this package's.  fits: everything in memory, without a limit;
    None: without a limit and under each.  mmap: the model is mapped under a limit (stock, ik).  repack:
    weights may be kept in ggml's repacked layouts, by stock and ik without a limit alone.  readahead_kb: of
    the model's disk, while the arm runs; None leaves it alone.  low: opened with a low tier.  profiled: on a
    device, its pools hold what other tokens use.  settings: of hobbit.h.  n_batch: tokens of a pass.
    """

    name: str
    summary: str
    build: Literal["stock", "ik", "ours"] = "stock"
    fits: bool | None = False
    mmap: bool = False
    repack: bool = False
    readahead_kb: int | None = None
    low: bool = False
    profiled: bool = False
    settings: Mapping[str, Setting] = field(default_factory=dict)
    n_batch: int = 512


def kind(name: str) -> str:
    """The arm of which a name like ours@2048 is."""
    return name.partition("@")[0]


def ours(
    name: str, summary: str, *, fits: bool = False, low: bool = False, profiled: bool = False, **settings: Any
) -> Arm:
    """An arm of this package with these settings, without their prefix."""
    keys = {f"hobbit.{key}": value for key, value in settings.items()}
    return Arm(name, summary, "ours", fits=fits, repack=True, low=low, profiled=profiled, settings=keys)


def _of_paper(paper: str, name: str, summary: str, **settings: Any) -> tuple[Arm, ...]:
    """An arm with a paper's settings; none where a mechanism of the paper is not built."""
    return (ours(name, summary, **{**PAPERS[paper].settings, **settings}),) if paper in PAPERS else ()


def _by_name(*arms: Arm) -> Mapping[str, Arm]:
    return {arm.name: arm for arm in arms}


_EQ2: dict[str, Any] = {"t1": 0.6, "t2": 0.9}  # HOBBIT's for Mixtral-8x7B
BY_NAME = _by_name(
    Arm("stock", "llama.cpp: repacked, or mapped under a limit", fits=None, mmap=True, repack=True),
    Arm("stock-128k", "llama.cpp, mapped, readahead 128 KiB", mmap=True, readahead_kb=128),
    Arm("stock-plain", "llama.cpp, all in memory, plain layouts", fits=True),
    Arm("ik", "ik_llama.cpp (make ik), all in memory, the file's layouts", "ik", fits=True),
    Arm("ik-repacked", "ik_llama.cpp, all in memory, repacked", "ik", fits=True, repack=True),
    Arm("ik-128k", "ik_llama.cpp, mapped, readahead 128 KiB", "ik", mmap=True, readahead_kb=128),
    ours("ours-resident", "expert cache that holds every expert", fits=True),
    ours("ours", "expert cache, everything in high precision"),
    ours("ours-eq2", "expert cache, high and low precision by Eq. 2", low=True, **_EQ2),
    ours("ours-noprefetch", "as ours, without prefetch", prefetch=0),
)

# --- on a device

DEMAND = "demand"
_HOBBIT = dict(PAPERS["hobbit"].settings)
_DEMAND: dict[str, Any] = {"mode": "gpu", "prefetch": 0}
_DEMAND_RANK: dict[str, Any] = {"fits": True, "t1": 0.5, "t2": 0.5, **_DEMAND}  # the rule's own numbers
DEVICE_ARMS = _by_name(
    Arm("stock", "llama.cpp, --n-cpu-moe: as many layers' experts on the device as fit"),
    Arm("stock-repacked", "as stock, the others repacked for the CPU (--no-host)", repack=True),
    ours(DEMAND, "no cache: room for a token's experts of one layer", fits=True, **_DEMAND),
    ours("ours-gpu", "expert cache; missing experts are uploaded", mode="gpu"),
    ours("ours-cooperative", "expert cache; the CPU computes missing experts", mode="cooperative"),
    ours("ours-auto", "expert cache; missing experts take the faster of both ways", mode="auto"),
    *_of_paper("twiddler", "ours-twiddler", "Twiddler: placed by a profile, Algorithm 1", profiled=True),
    *_of_paper("daop", "ours-daop", "DAOP: placed by the prompt, computed a layer early, else replaced"),
    *_of_paper("mobile", "demand-rank", "as demand, a token's best half, unsure ones again", **_DEMAND_RANK),
    *_of_paper("mobile", "demand-half", "as demand, a token's best half", **_DEMAND_RANK, confidence=0.0),
    *(
        ours(
            f"hobbit-{mode}-{n}{name}", f"HOBBIT, {n} layers of prefetch{text}",
            low=not all_high, prefetch=n, **{**_HOBBIT, "mode": mode, **all_high},
        )
        for mode, n in (("cooperative", 2), *(("gpu", n) for n in range(4)))
        for name, text, all_high in (("", "", {}), ("-high", ", all high", {"t1": 1.0, "t2": 1.0}))
    ),
    ours("ours-eq2", "as ours-auto, high and low precision by Eq. 2", low=True, mode="auto", **_EQ2),
)  # fmt: skip
MODELLED = ("stock", DEMAND, "ours-gpu", "ours-cooperative", "ours-auto", "ours-twiddler")


def choose_arms(
    names: Sequence[str] | None, has_low: bool, arms: Mapping[str, Arm] = BY_NAME
) -> tuple[Arm, ...]:
    """The arms of these names, NAME@N with N tokens per pass; None: all that the files allow, but ik's."""
    allowed = (arm.name for arm in arms.values() if (has_low or not arm.low) and arm.build != "ik")
    chosen = {}
    for name in allowed if names is None else names:
        _, has_batch, n_batch = name.partition("@")
        if kind(name) not in arms or (has_batch and not (n_batch.isdecimal() and int(n_batch))):
            raise ConfigError(f"unknown arm '{name}'; choose one of {', '.join(arms)}")
        chosen[name] = replace(arms[kind(name)], name=name, n_batch=int(n_batch or Arm.n_batch))
    return tuple(chosen.values())
