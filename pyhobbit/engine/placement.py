# SPDX-License-Identifier: MIT
"""The cache on a device, llama.cpp's placement of whole layers, or no device: the fastest, measured once.

Where RAM and a GPU's memory together hold a model, llama.cpp can keep the experts of its last layers on the
GPU and compute the others on the CPU (--n-cpu-moe). A device on another machine may be slower than none.
Link, CPU and model decide which is faster.
"""

import ctypes
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from pyhobbit.engine.llama import Sampler, SetModel
from pyhobbit.engine.plan import MemoryPlan, lay_out, open_session
from pyhobbit.engine.session import Session
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.model.model_file import expert_bytes, model_parts
from pyhobbit.native.devices import experts_on_cpu, gpus
from pyhobbit.native.ffi import llama
from pyhobbit.native.files import head_and_tail, write_text
from pyhobbit.native.machine import trimmed_heap
from pyhobbit.settings.config import CacheConfig, EngineConfig, SamplingConfig, format_size
from pyhobbit.settings.table import RESEARCH

PROMPTS = ("The ", "In the year 1969 ", "def main(", "Dear ", "1, 2, 3, ")
TEXT_TOKENS = 48  # a longer text may run in circles
_TEXTS, _STEADY = 3, 0.95  # at least so many; one above this share of the best is no faster
_MOST_S = 40.0  # no text begins later
_ALL_LAYERS = 0x7FFFFFFF
_LEFT_BEHIND = 256 << 20  # bytes that measuring may leave in this process
_now = time.perf_counter


@dataclass(frozen=True)
class Placed:
    """How a model is opened. cache: the settings of the expert cache.

    set_model: fills in llama.cpp's parameters.  n_cpu: first layers whose experts the CPU computes, in
    llama.cpp's placement; None: a cache has them.  text: why, for people; "" where nothing was to choose.
    is_told: the text is on standard error already.  is_alone: no other machine takes part.
    """

    cache: CacheConfig
    set_model: SetModel | None
    n_cpu: int | None = None
    text: str = ""
    is_told: bool = False
    is_alone: bool = False

    @property
    def name(self) -> str:
        """The placement, for people."""
        if self.is_alone:
            return "this machine alone"
        if self.n_cpu is None:
            return "the cache of experts"
        return f"whole layers as by llama.cpp's --n-cpu-moe {self.n_cpu}"

    @property
    def server_arguments(self) -> list[str]:
        """The placement as llama-server's options; those of the cache are apart."""
        if self.is_alone:
            return ["--n-gpu-layers", "0"]
        return [] if self.n_cpu is None else ["--n-cpu-moe", str(self.n_cpu)]

    def fill(self, params: Any) -> Any:
        """Returns llama_model_params, filled in."""
        if self.set_model is not None:
            self.set_model(params)
        return params


def choose(
    path: Path,
    config: EngineConfig,
    set_model: SetModel | None = None,
    keep_going: Callable[[], bool] = lambda: True,
) -> Placed:
    """The placement that the settings ask for, or else the faster one, where both are possible.

    Measures both at the first time, and tells so on standard error. Raises ConfigError, HobbitError,
    KeyboardInterrupt if keep_going() is False meanwhile.
    """
    cache, as_given = config.cache, Placed(config.cache, set_model)
    devices = [each for each in gpus() if not each.is_integrated]
    is_remote = bool(devices) and all(each.name.startswith("RPC") for each in devices)
    of_cache = [name for name in ("pools", *RESEARCH) if getattr(cache, name) is not None]
    is_asked, is_one = cache.placement == "layers", len(devices) == 1
    if is_asked and (of_cache or not is_one):
        wrong = f"needs one GPU, and {len(devices) or 'none'} can be used"
        if of_cache:
            wrong = f"has no {of_cache[0]}"
        raise ConfigError(f"--placement layers leaves the experts to llama.cpp and {wrong}; leave one out")
    if cache.placement == "cache" or of_cache or not (is_one or is_remote):
        return as_given
    config = replace(config, cache=replace(cache, placement="cache"))
    # Hobbit, unlike the others, puts no layer there by itself
    n_gpu_layers = None if cache.device is None else _ALL_LAYERS
    try:
        plan = lay_out(path, config, model=_layers(set_model, None, n_gpu_layers))
    except HobbitError:
        if is_asked:
            raise
        return as_given  # opening the model says what is wrong
    arms = {"cache": Placed(config.cache, set_model)}
    n_cpu = _layers_on_cpu(path, plan, is_asked) if is_one else None
    if n_cpu is None and is_asked:
        return as_given  # opening the model says what is wrong
    if n_cpu is not None:
        placed = Placed(replace(cache, placement="layers"), _layers(set_model, n_cpu, n_gpu_layers), n_cpu)
        if is_asked:
            return replace(placed, text=f"{placed.name}, as asked")
        arms = {"layers": placed, **arms}  # the first brings the file into memory
    if is_remote and plan.info.on_device and cache.device is None:
        here = replace(config.cache, device="CPU", device_memory=None)
        arms["alone"] = Placed(here, _layers(set_model, None, 0), is_alone=True)
    if len(arms) == 1:
        return as_given
    opened = replace(config, n_ctx=plan.info.n_ctx, n_batch=plan.n_batch)
    return _fastest(path, opened, plan, arms, keep_going) or as_given


def _layers_on_cpu(path: Path, plan: MemoryPlan, is_asked: bool) -> int | None:
    """The least first layers whose experts the CPU computes; None where memory or model do not allow it."""
    info, sizes = plan.info, expert_bytes(model_parts(path))
    if not sizes or info.has_low_tier or info.precision:
        return None
    room = plan.pools if info.on_device and len(plan.devices) == 1 else 0
    n_cpu = next(n for n in range(len(sizes) + 1) if sum(sizes[n:]) <= room)
    # under a bound all that passes through host memory counts
    needed = sum(sizes[:n_cpu]) if info.memory is None else plan.process + sum(sizes) + _LEFT_BEHIND
    needed += plan.beside_pools
    if is_asked and needed > (info.memory or needed):
        allowed = f"--memory allows {format_size(info.memory or 0)}"
        raise ConfigError(
            f"--placement layers needs {format_size(needed)} of host memory, and {allowed}; leave one out"
        )
    return n_cpu if is_asked or (room and needed <= (info.memory or plan.available)) else None


def _layers(set_model: SetModel | None, n_cpu: int | None, n_gpu_layers: int | None) -> SetModel:
    """With so many layers on the GPU, and the experts of the first n_cpu on the CPU; None: as they are."""
    overrides = experts_on_cpu(n_cpu or 0)  # lives as long as this function

    def fill(params: Any) -> None:
        if set_model is not None:
            set_model(params)
        if n_gpu_layers is not None:
            params.n_gpu_layers = n_gpu_layers
        if n_cpu is not None:
            params.tensor_buft_overrides = ctypes.addressof(overrides)

    return fill


# --- measuring


def _fastest(
    path: Path,
    config: EngineConfig,
    plan: MemoryPlan,
    arms: Mapping[str, Placed],
    keep_going: Callable[[], bool],
) -> Placed | None:
    """The fastest one, as it was kept or is measured now; None where none can be opened."""
    kept = _kept(path, config, plan, arms["cache"])
    with suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
        return _taken(json.loads(kept.read_text("utf-8")), arms, plan)
    what = " and ".join(each.name for each in arms.values())
    print(f"pyhobbit: measuring {what} on {plan.device}, once; that takes a minute or two", file=sys.stderr)
    found: dict[str, float | None] = {}
    for name, placed in arms.items():
        how = placed.set_model, lambda _share: keep_going(), lambda: not keep_going()
        try:
            with trimmed_heap(), open_session(path, replace(config, cache=placed.cache), *how) as session:
                found[name] = _token_s(session, keep_going)
        except HobbitError as e:
            print(f"pyhobbit: {name} cannot be measured: {e}", file=sys.stderr)
            found[name] = None
    if not any(found.values()):
        return None
    taken, where = _taken(found, arms, plan), f"kept in {kept}"
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_text(kept, json.dumps({"model": path.name, "device": plan.device, **found}))
    except (OSError, HobbitError) as e:
        where = f"not kept: {e}"
    print(f"pyhobbit: placement: {taken.text}; {where}", file=sys.stderr)
    return replace(taken, is_told=True)


def _taken(found: Mapping[str, float | None], arms: Mapping[str, Placed], plan: MemoryPlan) -> Placed:
    """The fastest placement. found: seconds of a token, None if it cannot be opened."""
    times = {name: 1e3 * (found[name] or math.inf) for name in arms}
    first, second = sorted(times, key=lambda name: times[name])[:2]
    where = "" if arms[first].is_alone else f" on {plan.device}"
    text = f"measured faster{where} than {arms[second].name}: {times[first]:.1f} ms a token"
    text += f", not {times[second]:.1f}" if times[second] < math.inf else ", and that cannot be opened"
    return replace(arms[first], text=f"{arms[first].name}, {text}")


def _kept(path: Path, config: EngineConfig, plan: MemoryPlan, cache: Placed) -> Path:
    """The file of a measurement: of this model, on these GPUs, with about this share of its memory."""
    from huggingface_hub import constants  # takes a while

    share = round(10 * plan.pools / max(1, plan.info.expert_bytes))
    devices = [(each.name, each.description) for each in gpus()]
    layers = cache.fill(llama.llama_model_default_params()).n_gpu_layers & _ALL_LAYERS  # -1: all
    key = (path.stat().st_size, devices, share, layers, config.n_threads, config.cache.memory)
    mark = hashlib.sha256(head_and_tail(path) + repr(key).encode()).hexdigest()
    return Path(constants.HF_HOME) / "pyhobbit-placements" / f"{mark[:32]}.json"


def _token_s(session: Session, keep_going: Callable[[], bool]) -> float:
    """Seconds of a decoded token; texts are written until one is no faster."""
    context, model = session.context, session.model
    best, end = math.inf, _now() + _MOST_S
    for seed in count():
        sampler = Sampler(SamplingConfig(seed=seed), model)
        context.truncate(0)
        context.evaluate(model.tokenize(PROMPTS[seed % len(PROMPTS)]))
        start = _now()
        for _ in range(TEXT_TOKENS):
            if not keep_going():
                raise KeyboardInterrupt
            context.evaluate([sampler.sample(context)])
        sampler.close()
        found = (_now() - start) / TEXT_TOKENS
        is_steady, best = found > _STEADY * best, min(best, found)
        if (is_steady and seed + 1 >= _TEXTS) or _now() > end:
            break
    return best
