# SPDX-License-Identifier: MIT
"""The cache or llama.cpp's placement of whole layers: the one that is faster here, measured once.

Where RAM and a GPU's memory together hold a model, llama.cpp can keep the experts of its last layers on the
GPU and compute the others on the CPU (--n-cpu-moe). Link, CPU and model decide which of both is faster.
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
    is_told: the text is on standard error already.
    """

    cache: CacheConfig
    set_model: SetModel | None
    n_cpu: int | None = None
    text: str = ""
    is_told: bool = False

    @property
    def name(self) -> str:
        """The placement, for people."""
        if self.n_cpu is None:
            return "the cache of experts"
        return f"whole layers as by llama.cpp's --n-cpu-moe {self.n_cpu}"

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
    n_gpus = sum(not each.is_integrated for each in gpus())
    of_cache = [name for name in ("pools", *RESEARCH) if getattr(cache, name) is not None]
    is_asked = cache.placement == "layers"
    if is_asked and (of_cache or n_gpus != 1):
        wrong = f"needs one GPU, and {n_gpus or 'none'} can be used"
        if of_cache:
            wrong = f"has no {of_cache[0]}"
        raise ConfigError(f"--placement layers leaves the experts to llama.cpp and {wrong}; leave one out")
    if cache.placement == "cache" or of_cache or n_gpus != 1:
        return as_given
    config = replace(config, cache=replace(cache, placement="cache"))
    on_gpu = cache.device is not None  # Hobbit, unlike the others, puts no layer there by itself
    try:
        plan = lay_out(path, config, model=_layers(set_model, None, on_gpu))
    except HobbitError:
        if is_asked:
            raise
        return as_given  # opening the model says what is wrong
    info, sizes = plan.info, expert_bytes(model_parts(path))
    if not sizes or info.n_tiers > 1 or info.precision:
        return as_given
    room = plan.pools if info.on_device and len(plan.devices) == 1 else 0
    n_cpu = next(n for n in range(len(sizes) + 1) if sum(sizes[n:]) <= room)
    layers = Placed(replace(cache, placement="layers"), _layers(set_model, n_cpu, on_gpu), n_cpu)
    # under a bound all that passes through host memory counts
    needed = sum(sizes[:n_cpu]) if info.memory is None else plan.process + sum(sizes) + _LEFT_BEHIND
    needed += plan.beside_pools
    if is_asked and needed > (info.memory or needed):
        allowed = f"--memory allows {format_size(info.memory or 0)}"
        raise ConfigError(
            f"--placement layers needs {format_size(needed)} of host memory, and {allowed}; leave one out"
        )
    if is_asked:
        return replace(layers, text=f"{layers.name}, as asked")
    if not room or needed > (info.memory or plan.available):
        return as_given
    opened = replace(config, n_ctx=info.n_ctx, n_batch=plan.n_batch)
    both = {"layers": layers, "cache": Placed(config.cache, set_model)}
    return _faster(path, opened, plan, both, keep_going) or as_given


def _layers(set_model: SetModel | None, n_cpu: int | None, on_gpu: bool) -> SetModel:
    """With all layers on the GPU, and the experts of the first n_cpu on the CPU; None: where they are."""
    overrides = experts_on_cpu(n_cpu or 0)  # lives as long as this function

    def fill(params: Any) -> None:
        if set_model is not None:
            set_model(params)
        if on_gpu:
            params.n_gpu_layers = _ALL_LAYERS
        if n_cpu is not None:
            params.tensor_buft_overrides = ctypes.addressof(overrides)

    return fill


#
# measuring
#


def _faster(
    path: Path,
    config: EngineConfig,
    plan: MemoryPlan,
    both: Mapping[str, Placed],
    keep_going: Callable[[], bool],
) -> Placed | None:
    """The faster one, as it was kept or is measured now; None where neither can be opened."""
    kept = _kept(path, config, plan, both["cache"])
    with suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
        return _taken(json.loads(kept.read_text("utf-8")), both, plan)
    what = " and ".join(each.name for each in both.values())
    print(f"pyhobbit: measuring {what} on {plan.device}, once; that takes a minute or two", file=sys.stderr)
    found: dict[str, float | None] = {}
    for name, placed in both.items():  # the first brings the file into memory
        how = placed.set_model, lambda _share: keep_going(), lambda: not keep_going()
        try:
            with trimmed_heap(), open_session(path, replace(config, cache=placed.cache), *how) as session:
                found[name], found[f"{name}_prompt"] = _token_s(session, keep_going)
        except HobbitError as e:
            print(f"pyhobbit: {name} cannot be measured: {e}", file=sys.stderr)
            found[name] = None
    if not any(found.values()):
        return None
    taken, where = _taken(found, both, plan), f"kept in {kept}"
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_text(kept, json.dumps({"model": path.name, "device": plan.device, **found}))
    except (OSError, HobbitError) as e:
        where = f"not kept: {e}"
    print(f"pyhobbit: placement: {taken.text}; {where}", file=sys.stderr)
    return replace(taken, is_told=True)


def _taken(found: Mapping[str, float | None], both: Mapping[str, Placed], plan: MemoryPlan) -> Placed:
    """The faster placement. found: seconds of a token, None if it cannot be opened; a prompt's if known."""
    times = {name: 1e3 * (found[name] or math.inf) for name in both}
    first, second = sorted(times, key=lambda name: times[name])
    text = f"measured faster on {plan.device} than {both[second].name}: {times[first]:.1f} ms a token"
    text += f", not {times[second]:.1f}" if times[second] < math.inf else ", and that cannot be opened"
    prompts = [1e3 * s for name in (first, second) if (s := found.get(f"{name}_prompt"))]
    text += "; of a prompt {:.1f}, not {:.1f}".format(*prompts) if len(prompts) == 2 else ""
    return replace(both[first], text=f"{both[first].name}, {text}")


def _kept(path: Path, config: EngineConfig, plan: MemoryPlan, cache: Placed) -> Path:
    """The file of a measurement: of this model, on this GPU, with about this share of its memory."""
    from huggingface_hub import constants  # takes a while

    share = round(10 * plan.pools / max(1, plan.info.expert_bytes))
    device = next(each for each in gpus() if each.name == plan.device)
    layers = cache.fill(llama.llama_model_default_params()).n_gpu_layers & _ALL_LAYERS  # -1: all
    key = (path.stat().st_size, device.name, device.description, share, layers, config.n_threads)
    mark = hashlib.sha256(head_and_tail(path) + repr(key).encode()).hexdigest()
    return Path(constants.HF_HOME) / "pyhobbit-placements" / f"{mark[:32]}.json"


def _token_s(session: Session, keep_going: Callable[[], bool]) -> tuple[float, float]:
    """Seconds of a decoded token, and of one of a prompt; texts are written until one is no faster."""
    context, model = session.context, session.model
    written: list[int] = []
    best, end = math.inf, _now() + _MOST_S
    for seed in count():
        sampler = Sampler(SamplingConfig(seed=seed), model.n_vocab())
        context.truncate(0)
        context.evaluate(model.tokenize(PROMPTS[seed % len(PROMPTS)]))
        start = _now()
        for _ in range(TEXT_TOKENS):
            if not keep_going():
                raise KeyboardInterrupt
            context.evaluate([sampler.sample(context)])
        sampler.close()
        written += context.tokens
        found = (_now() - start) / TEXT_TOKENS
        is_steady, best = found > _STEADY * best, min(best, found)
        if (is_steady and seed + 1 >= _TEXTS) or _now() > end:
            break
    context.truncate(0)
    start, prompt = _now(), written[: context.n_ctx]
    if not context.evaluate(prompt):
        raise KeyboardInterrupt
    context.last_logits()
    return best, (_now() - start) / len(prompt)
