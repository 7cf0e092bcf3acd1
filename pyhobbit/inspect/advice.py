# SPDX-License-Identifier: MIT
"""Tells people what a plan and an estimate of speed say, and what would make the model faster."""

import shlex
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from pyhobbit._tables import DeviceInfo, Latency
from pyhobbit.engine.plan import MemoryPlan
from pyhobbit.engine.stats import ModelInfo, Pool
from pyhobbit.inspect.speed import Speed
from pyhobbit.native.devices import gpu_backends, gpus, has_gpu
from pyhobbit.native.threads import processor_cores
from pyhobbit.quality.stored import low_tier_text
from pyhobbit.settings.config import CacheConfig, counted_tokens, format_size
from pyhobbit.settings.resolve import resolve
from pyhobbit.settings.table import KEYS, OPTIONS

_MUCH = 0.2  # share of a token's time, or of the memory
_POOLS = {"high": "experts in high precision", "low": "less important experts, in low precision"}
_SOURCES = {
    "all": "all experts fit; each is read once",
    "sample": "measured in the second half of the sample; other texts may repeat their experts less",
    "even": "assumed: all experts are used equally, the worst case",
}


def memory_rows(plan: MemoryPlan) -> dict[str, str]:
    """Memory by kind, with names for people."""
    info, weights = plan.info, format_size(plan.weights)
    held = f"{weights} in memory: all weights but the routed experts"
    mapped = f"{weights}, mapped: the system reads them when they are first used"
    rows = {
        "memory": plan.memory_text,
        "weights": held if info.cached else mapped,
        "context": f"{format_size(plan.context)} for {info.context_text(plan.chose_context)}, and "
        f"{format_size(plan.compute)} to compute prompts in passes of {plan.n_batch} tokens",
    }
    if not info.cached:
        return rows
    pools = {f"{pool.name} pool": _pool_text(pool, _POOLS[pool.name]) for pool in info.pools}
    rows |= {**_device_rows(plan), **pools, **_host_rows(plan)}
    if plan.missing and plan.share_high < 1:
        on_disk = f"{format_size(plan.missing)} of experts in high precision, read when they are chosen"
        rows["on disk"] = on_disk
    return rows


def serving_rows(plan: MemoryPlan) -> dict[str, str]:
    """The served model in short, with names for people."""
    info = plan.info
    context = f"context {info.context_text(plan.chose_context)}"
    rows = {
        "model": f"{Path(info.model).name}, {info.description}, {context}",
        "GPU": planned_gpu_text(plan) if has_gpu() else "",
        "memory": plan.memory_text,
    }
    if info.snapshot_bytes:
        rows["states"] = f"context checkpoints take up to {format_size(info.snapshot_bytes)}"
    if info.cached:
        rows["experts"] = f"{', '.join(info.pool_texts())}, on {plan.device or 'the CPU'}"
        rows["precision"] = info.precision or "all high"
    return rows


def gpu_text(devices: Collection[str] | None) -> str:
    """The GPUs in use, or why there is none. devices: names of those that compute experts; None: no cache."""
    found = gpus()
    if not found:
        if backends := " and ".join(gpu_backends()):
            return f"none that {backends} can use; check the driver"
        return "none: this build is for the CPU; make install GPU=vulkan or the wheel finds one"
    own = [each for each in found if devices and each.name in devices]
    names = ", ".join(f"{each.name} ({each.description})" for each in own or found)
    if devices is None:
        return names
    return f"{names}, with the experts" if own else f"{names}; the CPU computes the experts"


def planned_gpu_text(plan: MemoryPlan) -> str:
    """Text about the GPUs of a plan."""
    return gpu_text([each.name for each in plan.devices] if plan.info.cached else None)


def _device_rows(plan: MemoryPlan) -> dict[str, str]:
    if plan.device is None:
        return {}
    if len(plan.devices) < 2:
        return {"device": f"{plan.device} has the pools in its memory and computes the experts"}
    return {
        "devices": "each has pools in its memory for its layers, and computes their experts",
        **{device.name: _device_text(device, plan.info) for device in plan.devices},
    }


def _device_text(device: DeviceInfo, info: ModelInfo) -> str:
    size = format_size(device.pool_bytes_high + device.pool_bytes_low)
    n_experts = device.n_layers * info.n_experts
    layers = f"{device.n_layers} of {info.n_layers} layers with experts"
    return f"{layers}, {device.pool_slots_high} of their {n_experts} experts in {size}"


def _host_rows(plan: MemoryPlan) -> dict[str, str]:
    """Rows about host memory between the device and the disk."""
    if not plan.info.on_device:
        return {}
    text = f"no room for experts: each miss on {plan.device} reads from disk"
    if n_slots := plan.info.host_slots_high:
        why = f"experts missing on {plan.device} are uploaded from here; the others are read from disk"
        text = _pool_text(Pool("host", n_slots, plan.info.n_all_experts, plan.host_pools), why)
    return {"host memory": text}


def _pool_text(pool: Pool, why: str) -> str:
    return f"{format_size(pool.n_bytes)}: {pool.room} experts, {pool.n_slots / pool.n_experts:.0%}; {why}"


def speed_rows(plan: MemoryPlan, speed: Speed) -> dict[str, str]:
    """The estimate and what it is made of."""
    rows = {
        "speed": f"about {_rate(speed.tokens_per_second)} token/s, estimated with a warm cache: per token "
        f"{1000 * speed.compute_s:.3g} ms computing and {1000 * speed.wait_s:.3g} ms waiting for the disk",
        "computing": f"measured over {speed.sample.n_tokens} tokens with {plan.info.n_threads} threads",
    }
    if plan.info.cached:
        high, low = speed.hits
        name = "high" if speed.source == "sample" else plan.info.pools[0].name
        hits = f"{high:.0%}" + (f" {name}, {low:.0%} low" if plan.info.pool_slots_low else "")
        rows["hits"] = f"{hits}: {_SOURCES[speed.source]}"
    if speed.disk is not None:
        disk = speed.disk
        how = f"{disk.n_threads} {'direct' if disk.direct else 'buffered'} reads at a time"
        hidden = 1 - speed.wait_s * disk.bytes_per_s / speed.read_bytes if speed.read_bytes else 0.0
        beside = f", {hidden:.0%} of it while computing" if hidden > 0 else ""
        rows["disk"] = (
            f"{format_size(disk.bytes_per_s)}/s by {how} of {format_size(disk.read_bytes)}; "
            f"{format_size(speed.read_bytes)} to read per token{beside}"
        )
    if link := speed.sample.link_bytes_per_s:
        rows["link"] = f"{format_size(link)}/s, {plan.pools / link:.3g} s to fill {format_size(plan.pools)}"
    for number, latency in enumerate(speed.sample.latencies):
        rows["one expert" if number == 0 else " " * (1 + number)] = _latency_text(latency)
    return rows


def _latency_text(of: Latency) -> str:
    times = {"CPU": of.cpu_s, "GPU": of.device_s, "upload": of.upload_s}
    measured = ", ".join(f"{name} {1000 * time:.3g} ms" for name, time in times.items() if time)
    return f"of {format_size(of.expert_bytes)} for {counted_tokens(of.n_tokens)}: {measured}"


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.0f}" if tokens_per_s >= 100 else f"{tokens_per_s:.3g}"


def quality_text(model: Path, cache: CacheConfig) -> str | None:
    """The meaning of the quality that is asked for; None where none is, or no experts. Raises HobbitError."""
    if cache.quality is None:
        return None
    note = resolve(model, cache.settings())["quality"].note
    return f"{cache.quality}: {note}" if note else None


def qualities(model: Path, cache: CacheConfig) -> str:
    """The meaning of each word of --quality. Raises HobbitError."""
    spec = OPTIONS["quality"][0]
    other = dict.fromkeys(name for name in OPTIONS if KEYS[name][0] in spec.replaced_by)
    texts = (quality_text(model, replace(cache, quality=word, **other)) for word in spec.choices)
    return "; ".join(filter(None, texts))


def advice(
    plan: MemoryPlan, speed: Speed | None, cache: CacheConfig, calibrated: bool, may_add_low: bool
) -> list[str]:
    """Advice for more speed, the most useful first. may_add_low: convert --sidecar works for the model."""
    waits = speed is not None and speed.wait_s > _MUCH * (speed.compute_s + speed.wait_s)
    unused = None if plan.info.precision else low_tier_text(Path(plan.info.model), plan.info, cache)
    found = [unused] if unused else []
    if waits or speed is None:
        found += _about_disk(plan, speed, cache, calibrated, may_add_low)
    if speed is not None and not waits:
        found.append(
            "computing takes nearly all the time: more or faster processor cores help, memory and disk do not"
        )
    return found + list(_about_machine(plan, speed))


def _about_disk(
    plan: MemoryPlan, speed: Speed | None, cache: CacheConfig, calibrated: bool, may_add_low: bool
) -> Iterator[str]:
    info = plan.info
    if not info.cached or plan.share_high >= 1:
        return
    model = shlex.quote(info.model)
    bound = "--memory" if cache.memory is not None else "--pools"
    spare = plan.available - plan.beside_pools - plan.host_pools
    much = _MUCH * (plan.host_pools or plan.available)  # no experts in host memory: all are on a device
    if (cache.memory is not None or cache.pools is not None) and spare > much:
        yield f"{format_size(spare)} of free memory are not used: raise {bound}, or leave it out"
    best = f", for {_rate(1 / speed.compute_s)} token/s" if speed is not None else ""
    missing = format_size(plan.missing)
    yield f"{missing} more memory would hold every expert{best}; any part of it raises the hits"
    if not info.has_low_tier and may_add_low:
        yield f"add a low tier, so that less is read: pyhobbit convert --sidecar {model}"
    if not calibrated and not info.n_absent_low:
        what = "thresholds and cache" if info.has_low_tier else "the cache"
        yield f"fit {what} to your text: pyhobbit calibrate {model} --text FILE"
    if speed is not None and speed.disk is not None:
        twice = 1 / (speed.compute_s + speed.wait_s / 2)
        yield f"a disk twice as fast would give {_rate(twice)} token/s"
    if cache.pools is None and plan.context > much:
        size = format_size(plan.context)
        yield f"the context takes {size}: a --ctx below {info.n_ctx} leaves more to the experts"


def _about_machine(plan: MemoryPlan, speed: Speed | None) -> Iterator[str]:
    if plan.info.cached and not plan.info.direct_io:
        yield (
            "the file system refuses direct I/O, so reads go through the page cache: "
            "keep the model on a local ext4 or xfs"
        )
    if speed is not None and plan.info.n_threads < processor_cores():
        yield f"{plan.info.n_threads} of {processor_cores()} cores are used: raise --threads"
