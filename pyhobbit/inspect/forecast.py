# SPDX-License-Identifier: MIT
"""Token/s with other memory, a low tier or a smaller KV cache: TokenTime fitted to what was measured."""

from dataclasses import dataclass, replace
from pathlib import Path

from pyhobbit.engine.plan import MemoryPlan, lay_out
from pyhobbit.errors import HobbitError
from pyhobbit.inspect.speed import Speed
from pyhobbit.model.model_file import ModelFile
from pyhobbit.model.tiers import default_low_types, tensor_nbytes
from pyhobbit.model.token_time import TokenTime
from pyhobbit.settings.config import EngineConfig, format_size

_ROWS = 9
_LOW_USES = 0.5  # share of the uses that a low tier is assumed to take
_BAR = 24  # characters


@dataclass(frozen=True)
class Point:
    """A speed by memory. memory: bytes of the process.  share: of the experts in memory.  speed: token/s."""

    memory: float
    share: float
    speed: float


@dataclass(frozen=True)
class Forecast:
    """by_memory: with own, the plan's.  low_tier, small_context: texts, or "".  fitted: it has the speeds."""

    by_memory: tuple[Point, ...]
    own: Point
    low_tier: str
    small_context: str
    fitted: TokenTime


def forecast(model: ModelFile, config: EngineConfig, plan: MemoryPlan, speed: Speed) -> Forecast | None:
    """A forecast; without a cache, and where the experts lie on a device, there is none."""
    if not plan.info.cached or plan.info.on_device:
        return None
    info = plan.info
    fixed, total = plan.most - plan.host_pools, info.expert_bytes
    least = min(1.0, info.token_bytes_high / total)
    time = _fitted(plan, speed)
    own = Point(plan.most, plan.share_high, time.rate(plan.share_high))
    shares = {least + (1 - least) * i / (_ROWS - 1) for i in range(_ROWS)}
    others = [Point(fixed + share * total, share, time.rate(share)) for share in shares]
    points = sorted([*others, own], key=lambda point: point.memory)
    low, small = _low_tier(model, plan, time), _small_context(model.path, config, plan, time)
    return Forecast(tuple(points), own, low, small, time)


def lines(found: Forecast) -> list[str]:
    """The forecast as lines for people."""
    most = max(point.speed for point in found.by_memory)
    texts = ["memory          token/s   experts in memory"]
    for point in found.by_memory:
        mark, bar = ">" if point is found.own else " ", "█" * max(1, round(_BAR * point.speed / most))
        texts.append(
            f"{mark}{format_size(point.memory):>10}  {point.speed:10.4g}   {point.share:4.0%}  {bar}"
        )
    return [*texts, f"a token takes {found.fitted}", *filter(None, (found.low_tier, found.small_context))]


def _fitted(plan: MemoryPlan, speed: Speed) -> TokenTime:
    high, low, _ = speed.sample.mix
    per_byte = 1 / speed.disk.bytes_per_s if speed.disk is not None else 0.0
    if speed.read_bytes:
        per_byte = speed.wait_s / speed.read_bytes
    wait_s = plan.info.used_bytes(high, low) * per_byte
    return TokenTime.fitted(speed.compute_s, wait_s, plan.share_high, speed.hits[0])


def _low_tier(model: ModelFile, plan: MemoryPlan, time: TokenTime) -> str:
    tensors = model.routed_tensors()
    types = default_low_types(tensors)
    if plan.info.has_low_tier or types is None or plan.share_high >= 1:
        return ""
    n_bytes = sum(tensor_nbytes(types[each.name], each.ne) for each in tensors)
    size = 1 - _LOW_USES * (1 - n_bytes / plan.info.expert_bytes)
    rate = time.rate(plan.share_high / size, size)
    names = "/".join(sorted({types[each.name].name for each in tensors}))
    return f"a low tier in {names}: {format_size(n_bytes)}; {rate:.3g} token/s if it takes half of the uses"


def _small_context(path: Path, config: EngineConfig, plan: MemoryPlan, time: TokenTime) -> str:
    if plan.share_high >= 1 or config.cache_types != ("f16", "f16"):
        return ""
    same = replace(config, n_ctx=plan.info.n_ctx, n_batch=plan.n_batch)
    try:
        small = lay_out(path, replace(same, cache_type_k="q8_0", cache_type_v="q8_0"))
    except HobbitError:
        return ""  # rows that its blocks do not divide
    saved = plan.context + plan.compute - small.context - small.compute
    if saved <= 0:
        return ""
    rate = time.rate(plan.share_high + saved / plan.info.expert_bytes)
    return (
        f"a KV cache in q8_0: {format_size(saved)} more for experts, about {rate:.3g} token/s "
        "(--cache-type-k q8_0 --cache-type-v q8_0)"
    )
