# SPDX-License-Identifier: MIT
"""Where a model would lie in this machine's memory, by llama.cpp's and the engine's own arithmetic.

llama.cpp simulates the loading (no_alloc), which reads nothing but headers and the vocabulary; the engine
then divides what is left between its pools. Both say what does not fit before anything is loaded.
"""

import contextlib
import ctypes
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from pyhobbit.engine.cache import Cache
from pyhobbit.engine.llama import Log, log, opening
from pyhobbit.engine.stats import DeviceInfo, ModelInfo
from pyhobbit.engine.threads import computing_threads
from pyhobbit.errors import HobbitError
from pyhobbit.model.model_file import read_tensors
from pyhobbit.model.names import check_model_file
from pyhobbit.model.tiers import routed_part
from pyhobbit.native.ffi import last_error, lib, llama
from pyhobbit.native.memory import available_memory, resident_memory
from pyhobbit.settings.config import EngineConfig, Setting, format_size
from pyhobbit.settings.overrides import kv_overrides

_MIB = 1 << 20
_CONTEXT_SIZE = re.compile(r"^\w+: size = +([\d.]+) MiB \(", re.MULTILINE)
_COMPUTE_SIZE = re.compile(r"^\w+: +(\S+) compute buffer size = +([\d.]+) MiB", re.MULTILINE)
_CELL_BYTES = 64  # that llama.cpp keeps for a token of context beside the KV cache, even when it simulates
_PREDICTOR_BYTES = 2  # of a router's weight in the predictor's copy


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of memory by what they are for. info: of the opened model, with its pools as they would be.

    available: that this process may take.  process: held before the model is opened.
    weights: of all but what stays on disk; of everything where the model runs without a cache.
    context: KV cache and the like.  compute: buffers of llama.cpp's graphs.  n_all_experts: of all layers.
    n_ctx_train: tokens that the model was trained for.  device: that computes the experts, where it has
    memory of its own, or several; available and the rest are then the host's.  devices: what each has.
    """

    info: ModelInfo
    available: int
    process: int
    weights: int
    context: int
    compute: int
    n_all_experts: int
    n_ctx_train: int
    device: str | None = None
    devices: tuple[DeviceInfo, ...] = ()

    @property
    def beside_pools(self) -> int:
        """What opening the model takes, pools left out."""
        return self.weights + self.context + self.compute

    @property
    def pools(self) -> int:
        return self.info.pool_bytes_high + self.info.pool_bytes_low

    @property
    def host_pools(self) -> int:
        """What this process holds of them, or behind them."""
        return self.info.host_bytes_high + self.info.host_bytes_low if self.info.on_device else self.pools

    @property
    def missing(self) -> int:
        """What is missing to hold every expert in high precision, on the device or in host memory."""
        info = self.info
        held = max(info.pool_bytes_high, info.host_bytes_high)
        if info.high_is_residual:
            held = max(self.pools, info.host_bytes_high + info.host_bytes_low)
        return max(0, info.expert_bytes - held)

    @property
    def share_high(self) -> float:
        """Share of the experts that need not be read again in high precision."""
        held = max(self.info.pool_slots_high, self.info.host_slots_high)
        return held / self.n_all_experts if self.info.cached else 1.0

    @property
    def share_low(self) -> float:
        """Share of the experts that need not be read again in low precision."""
        held = max(self.info.pool_slots_low, self.info.host_slots_low)
        return held / self.n_all_experts if self.info.cached else 0.0


SetContext = Callable[[Any, int], None]
"""Fills in llama_context_params, given how many tokens the model was trained for. Raises HobbitError."""

SetModel = Callable[[Any], None]
"""Fills in llama_model_params, where they are not llama.cpp's own."""


def fitting_settings(
    path: Path,
    config: EngineConfig,
    context: SetContext | None = None,
    model: SetModel | None = None,
    **overrides: Setting,
) -> dict[str, Setting]:
    """What hobbit_open is told of config.cache, once it is known that the model fits. As lay_out().

    A bound on memory counts from what the process holds when the model is opened: what laying out left behind
    is added to it.
    """
    held = resident_memory()
    lay_out(path, config, context, model, **overrides)
    settings = config.cache.settings()
    if config.cache.memory is not None:
        settings["hobbit.memory"] = config.cache.memory + max(0, resident_memory() - held)
    return settings


def lay_out(
    path: Path,
    config: EngineConfig,
    context: SetContext | None = None,
    model: SetModel | None = None,
    **overrides: Setting,
) -> MemoryPlan:
    """The plan for a model with these settings. Raises HobbitError: it does not fit, or cannot be opened.

    context: None takes the context from config.  model: None takes llama.cpp's defaults.
    overrides: further settings of llama.cpp, by key.
    """
    with opening:
        return _lay_out(path, config, (context or _engine_context(config), model), overrides)


def _engine_context(config: EngineConfig) -> SetContext:
    def fill(params: Any, n_ctx_train: int) -> None:
        params.n_ctx = config.context_tokens(n_ctx_train)
        params.n_batch = params.n_ubatch = min(config.n_batch, params.n_ctx)
        params.n_outputs_max = 1

    return fill


def _lay_out(
    path: Path,
    config: EngineConfig,
    fill: tuple[SetContext, SetModel | None],
    overrides: Mapping[str, Setting],
) -> MemoryPlan:
    check_model_file(path)
    process, available = resident_memory(), available_memory()
    tensors = read_tensors(path)
    parts = {each.name: routed_part(each.name) for each in tensors}
    n_experts = {part.layer: each.ne[2] for each in tensors if (part := parts[each.name])}
    with _simulated(path, config, fill, overrides, bool(n_experts)) as simulated:
        cached = simulated.info.cached
        cache = simulated.cache
        on_disk = {name for name, part in parts.items() if cached and (part or cache.owns(name))}
        weights = sum(each.nbytes for each in tensors if each.name not in on_disk)
        plan = MemoryPlan(
            info=simulated.info,
            available=available,
            process=process,
            weights=weights,
            context=simulated.context,
            compute=simulated.compute,
            n_all_experts=sum(n_experts.values()),
            n_ctx_train=simulated.n_ctx_train,
        )
        if not cached:
            return _checked(plan)
        if simulated.info.on_device:
            names = ",".join(device.name for device in cache.devices())
            return _with_pools(replace(plan, device=names), simulated, 0)
        routers = sum(prod(each.ne) for each in tensors if each.name.endswith("ffn_gate_inp.weight"))
        predictor = 0 if config.cache.prefetch == 0 else routers * _PREDICTOR_BYTES
        return _with_pools(plan, simulated, predictor)


def _checked(plan: MemoryPlan) -> MemoryPlan:
    # The weights are mapped: they need not fit.
    if plan.context + plan.compute > plan.available:
        raise HobbitError(_too_much(plan))
    return plan


def _with_pools(plan: MemoryPlan, simulated: "_Simulated", predictor: int) -> MemoryPlan:
    if plan.beside_pools > plan.available:
        raise HobbitError(_too_much(plan))
    cache = simulated.cache
    try:
        cache.prepare(plan.beside_pools + predictor, simulated.n_ubatch)
    except HobbitError as e:
        raise HobbitError(f"{e} ({plan.info.model} takes {_needs(plan)})") from e
    devices = cache.devices() if plan.device else ()
    return replace(plan, info=replace(plan.info, **cache.info()), devices=devices)


def _too_much(plan: MemoryPlan) -> str:
    return (
        f"{plan.info.model} does not fit into memory: {_needs(plan)}, and {format_size(plan.available)} are "
        "free; free some memory, or use a smaller context"
    )


def _needs(plan: MemoryPlan) -> str:
    weights = f"{format_size(plan.weights)} of weights beside its experts, " if plan.info.cached else ""
    return (
        f"{weights}{format_size(plan.context)} for a context of {plan.info.n_ctx} tokens, "
        f"{format_size(plan.compute)} to compute"
    )


#
# llama.cpp's part
#


@dataclass(frozen=True)
class _Simulated:
    """A model and a context that hold no memory, and their expert cache."""

    info: ModelInfo
    cache: Cache
    n_ubatch: int
    context: int
    compute: int
    n_ctx_train: int


class _Lines(Log):
    """Takes llama.cpp's log and keeps it, until restored."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        super().__init__()

    def _on_text(self, level: int, text: bytes, user_data: object) -> None:
        self.lines.append(text.decode("utf-8", "replace"))
        super()._on_text(level, text, user_data)

    def restore(self) -> None:
        llama.llama_log_set(log._callback, None)


@contextlib.contextmanager
def _simulated(
    path: Path,
    config: EngineConfig,
    fill: tuple[SetContext, SetModel | None],
    overrides: Mapping[str, Setting],
    has_experts: bool,
) -> Iterator[_Simulated]:
    set_context, set_model = fill
    # A trace would be opened, and emptied.
    settings = {**overrides, **replace(config.cache, trace=None).settings()}
    if config.cache.trace is not None:
        settings["hobbit.enable"] = True
    all_overrides = kv_overrides(llama, settings)
    params = llama.llama_model_default_params()
    if set_model is not None:
        set_model(params)
    params.kv_overrides, params.no_alloc = all_overrides, True
    params.load_mode = llama.LLAMA_LOAD_MODE_NONE  # a mapping cannot be simulated
    with contextlib.ExitStack() as stack:
        said = _Lines()
        stack.callback(said.restore)
        said.start(verbose=False)
        lib.hobbit_clear_last_error()
        model = llama.llama_model_load_from_file(bytes(path), params)
        if not model:
            hint = "if the file is incomplete or damaged, download or convert it again"
            raise _failure(path, said, hint)
        stack.callback(llama.llama_model_free, model)
        cache = stack.enter_context(contextlib.closing(Cache(model)))
        n_ctx_train = llama.llama_model_n_ctx_train(model)
        context_params = llama.llama_context_default_params()
        set_context(context_params, n_ctx_train)
        if context_params.n_ctx * _CELL_BYTES > available_memory():
            raise HobbitError(
                f"a context of {context_params.n_ctx} tokens does not fit into memory; use a smaller one"
            )
        context = llama.llama_init_from_model(model, context_params)
        if not context:
            raise _failure(path, said, "a smaller context needs less memory")
        stack.callback(llama.llama_free, context)
        n_context, n_compute = _sizes(path, "".join(said.lines), bool(llama.llama_get_memory(context)))
        yield _Simulated(
            info=_info(path, config, model, context_params.n_ctx, cache, has_experts),
            cache=cache,
            n_ubatch=context_params.n_ubatch,
            context=n_context,
            compute=n_compute,
            n_ctx_train=n_ctx_train,
        )


def _sizes(path: Path, text: str, has_memory: bool) -> tuple[int, int]:
    """Bytes of KV cache and compute buffers, by llama.cpp's log, the only place that tells both."""
    context = [float(size) for size in _CONTEXT_SIZE.findall(text)]
    compute = dict(_COMPUTE_SIZE.findall(text))  # of each backend the last one holds
    if not compute or (has_memory and not context):
        missing = "its KV cache" if compute else "its compute buffers"
        raise HobbitError(f"llama.cpp does not say how large {missing} are for {path}; reinstall pyhobbit")
    return _bytes(sum(context)), _bytes(sum(map(float, compute.values())))


def _bytes(mebibytes: float) -> int:
    return int(mebibytes * _MIB)


def _failure(path: Path, said: Log, hint: str) -> HobbitError:
    reason = said.reason() or "llama.cpp gave no reason"
    return HobbitError(last_error() or f"{path} cannot be loaded: {reason}; {hint}")


def _info(
    path: Path, config: EngineConfig, model: Any, n_ctx: int, cache: Cache, has_experts: bool
) -> ModelInfo:
    description = ctypes.create_string_buffer(256)
    llama.llama_model_desc(model, description, len(description))
    return ModelInfo(
        model=str(path),
        description=description.value.decode("utf-8", "replace"),
        n_ctx=n_ctx,
        n_threads=computing_threads(config.n_threads),
        cached=bool(cache),
        has_experts=has_experts,
        memory=config.cache.memory,
        **cache.info(),
    )
