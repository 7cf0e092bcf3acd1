# SPDX-License-Identifier: MIT
"""Where a model would lie in this machine's memory, by llama.cpp's and the engine's own arithmetic.

llama.cpp simulates the loading (no_alloc), which reads nothing but headers and the vocabulary; the engine
then divides what is left between its pools. Both say what does not fit before anything is loaded.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pyhobbit._tables import DeviceInfo
from pyhobbit.engine.batch import best_batch, best_context, sized, smaller_context
from pyhobbit.engine.llama import KeepGoing, Model, SetContext, SetModel
from pyhobbit.engine.projector import projector_bytes
from pyhobbit.engine.session import Session, one_sequence
from pyhobbit.engine.stats import ModelInfo
from pyhobbit.errors import HobbitError
from pyhobbit.model.loading import opening
from pyhobbit.native.ffi import Needs, lib, llama
from pyhobbit.native.machine import available_memory, memory_limit, resident_memory, trimmed_heap
from pyhobbit.settings.config import CacheConfig, EngineConfig, Setting, format_size

_CELL_BYTES = 64  # bytes of llama.cpp for a token of context beside the KV cache, even when it simulates


class ShortOfMemory(HobbitError):  # noqa: N818 - what is short, not an error of the program
    """Less memory would be left than the model needs."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of memory by what they are for. info: of the opened model, with its pools as they would be.

    available: that this process may take.  process: held before the model is opened.
    weights: of all but what stays on disk; of everything where the model runs without a cache.
    context: KV cache and the like.  compute: buffers of llama.cpp's graphs.  n_batch: prompt tokens per pass.
    chose_context: nobody said how large it is.  head: of context and compute,
    for a draft head.
    device: that computes the experts, where it has memory of its own, or several; available and the rest are
    then the host's.  devices: what each has.
    """

    info: ModelInfo
    available: int
    process: int
    weights: int
    context: int
    compute: int
    n_batch: int
    chose_context: bool = False
    head: int = 0
    device: str | None = None
    devices: tuple[DeviceInfo, ...] = ()

    @property
    def beside_pools(self) -> int:
        """Bytes that opening the model needs, without pools."""
        return self.weights + self.context + self.compute

    @property
    def pools(self) -> int:
        return self.info.pool_bytes_high + self.info.pool_bytes_low

    @property
    def host_pools(self) -> int:
        """Bytes of the pools in this process's memory, or of the cache behind them."""
        return self.info.host_bytes_high + self.info.host_bytes_low if self.info.on_device else self.pools

    @property
    def most(self) -> int:
        """Bytes that this process will hold."""
        return self.process + self.beside_pools + self.host_pools + self.info.snapshot_bytes

    @property
    def memory_text(self) -> str:
        """The memory that the process will take, for people."""
        if not self.info.cached:
            why = "the whole model fits" if self.info.has_experts else "a dense model has no experts to cache"
            return f"{why}, so it runs as in stock llama.cpp"
        bound = "" if self.info.memory is None else " by --memory"
        total, free = format_size(self.info.memory or self.most), format_size(self.available)
        return f"up to {total}{bound}; {free} are free"

    @property
    def missing(self) -> int:
        """Bytes missing to hold every expert in its best precision, on the device or in host memory."""
        info = self.info
        held = max(info.pool_bytes_high, info.host_bytes_high)
        if info.n_absent_high:
            held = max(self.pools, info.host_bytes_high + info.host_bytes_low)
        return max(0, info.expert_bytes - held)

    @property
    def share_high(self) -> float:
        """Share of the high versions that need not be read again."""
        held = max(self.info.pool_slots_high, self.info.host_slots_high)
        return held / self.info.n_high_experts if self.info.cached else 1.0

    @property
    def share_low(self) -> float:
        """Share of the experts that need not be read again in low precision."""
        held = max(self.info.pool_slots_low, self.info.host_slots_low)
        return held / self.info.n_all_experts if self.info.cached else 0.0


@dataclass(frozen=True)
class Fit:
    """How a model is opened. settings: for hobbit_open.  n_ctx: tokens.  n_batch: prompt tokens per pass."""

    settings: dict[str, Setting]
    n_ctx: int
    n_batch: int


def fit(
    path: Path,
    config: EngineConfig,
    context: SetContext | None = None,
    model: SetModel | None = None,
    **overrides: Setting,
) -> Fit:
    """How a model is opened, once it is known that it fits. As lay_out().

    A bound on memory counts from what the process holds when the model is opened: what laying out left behind
    is added to it.
    """
    held = resident_memory()
    plan = lay_out(path, config, context, model, **overrides)
    settings = {**config.overrides, **config.cache.settings()}
    if config.cache.memory is not None:
        further = max(0, resident_memory() - held)
        settings["hobbit.memory"] = min(config.cache.memory + further, memory_limit())
    if plan.head:
        settings["hobbit.further"] = plan.head
    return Fit(settings, plan.info.n_ctx, plan.n_batch)


def open_session(
    path: Path,
    config: EngineConfig,
    set_model: SetModel | None,
    on_loading: KeepGoing,
    aborted: Callable[[], bool],
) -> Session:
    """Opens a model that fits; the parameters are Session's. Raises HobbitError, KeyboardInterrupt."""
    with opening:
        how = fit(path, config, model=set_model)
        config = replace(config, n_ctx=how.n_ctx, n_batch=how.n_batch)
        return Session(
            path,
            how.settings,
            one_sequence(config),
            set_model=set_model,
            keep_going=on_loading,
            aborted=aborted,
            verbose=config.verbose,
        )


def beside_projector(
    path: Path, projector: Path, cache: CacheConfig, plan_without: Callable[[CacheConfig], MemoryPlan | None]
) -> tuple[CacheConfig, int]:
    """The cache with room for a projector, and its bytes. plan_without: may be None. Raises HobbitError."""
    memory, taken = cache.memory, projector_bytes(path, projector)
    if memory is None and cache.pools is None:
        plan = plan_without(cache)  # the engine would take what is free before the projector is there
        memory = plan.most if plan is not None and plan.info.cached else None
    if memory is None:
        return cache, taken
    if memory <= taken:
        sizes = f"{format_size(taken)} of memory, and {format_size(memory)} are allowed"
        raise HobbitError(f"{projector} takes {sizes}; raise --memory")
    return replace(cache, memory=memory - taken), taken


def lay_out(
    path: Path,
    config: EngineConfig,
    context: SetContext | None = None,
    model: SetModel | None = None,
    **overrides: Setting,
) -> MemoryPlan:
    """The plan for a model with these settings. Raises HobbitError: it does not fit, or cannot be opened.

    context: None takes the context from config, and chooses its size by memory where config.n_ctx is None.
    The batch is chosen only where config.n_batch is None.
    model: None takes llama.cpp's defaults.
    overrides: further settings of llama.cpp, by key.
    """
    check_limit(config.cache.memory)
    settings = {**config.overrides, **overrides, **config.cache.settings()}
    process, available = resident_memory(), available_memory()
    fill = _bounded(context or one_sequence(config))
    with (
        trimmed_heap(),
        Session(path, settings, fill, set_model=model, simulated=True, has_head=config.draft_head) as session,
    ):
        _check_rollback(session, config)
        chooses = context is None and config.n_ctx is None
        if chooses:
            fill = sized(fill, best_context(session, fill, config), session.context.n_ubatch)
            session.replace_context(fill)
        if session.cache and config.n_batch is None and (n_batch := best_batch(session, fill)):
            session.replace_context(sized(fill, session.context.n_ctx, n_batch))
        needs = session.context.needs()
        devices = session.cache.devices() if session.cache.info().get("on_device") else ()
        plan = MemoryPlan(
            info=session.info(config.cache.memory),
            available=available,
            process=process,
            weights=needs.weights,
            context=needs.context,
            compute=needs.compute,
            n_batch=session.context.n_ubatch,
            chose_context=chooses,
            head=needs.head,
            device=",".join(each.name for each in devices) or None,
            devices=devices,
        )
        _check(plan, needs, partial(smaller_context, session, fill))
        return plan


def _check_rollback(session: Session, config: EngineConfig) -> None:
    can_go_back = config.serves or llama.llama_n_rs_seq(session.context.pointer) >= config.n_drafts
    if session.model.has_state() and not can_go_back:
        name = session.model.path.name
        hint = "leave draft_model out, or --drafts"
        raise HobbitError(f"{name} has layers whose state cannot go back, as drafts need; {hint}")


def check_limit(memory: int | None) -> None:
    """Raises HobbitError for a bound above what this process may hold."""
    if memory is not None and memory > memory_limit():
        limit, most = format_size(memory), format_size(memory_limit())
        raise HobbitError(
            f"a limit of {limit} is above the {most} that this machine, or the memory cgroup, has for the "
            "process; lower it"
        )


def _bounded(set_context: SetContext) -> SetContext:
    """Refuses a context beyond free memory."""

    def fill(params: Any, model: Model) -> None:
        set_context(params, model)
        if params.n_ctx * _CELL_BYTES > available_memory():
            raise HobbitError(
                f"a context of {params.n_ctx} tokens does not fit into memory; use a smaller --ctx"
            )

    return fill


def _check(plan: MemoryPlan, needs: Needs, smaller: Callable[[], int | None]) -> None:
    """Raises HobbitError where it does not fit. smaller: finds a context that does."""
    # the weights of a model without a cache are mapped: they need not fit
    needed = plan.beside_pools - (0 if plan.info.cached else plan.weights)
    if needed > plan.available:
        raise ShortOfMemory(
            f"{plan.info.model} does not fit into memory: {_needs(plan)}, and "
            f"{format_size(plan.available)} are free; free some memory, or use a smaller context"
        )
    error = needs.error
    if needs.shortage == lib.HOBBIT_SHORT_OF_MEMORY:
        prefetch = f"{format_size(needs.prefetch_bytes)} to prefetch, " if needs.prefetch_bytes else ""
        parts = f"{_needs(plan)}, {prefetch}{format_size(plan.process)} for Python and libraries"
        error += f" ({plan.info.model} takes {parts}; the rest is for work buffers and the smallest pools)"
        n_ctx = smaller()
        raise ShortOfMemory(error + (f"; --ctx {n_ctx} would do" if n_ctx else ""))
    if error:
        raise HobbitError(error)


def _needs(plan: MemoryPlan) -> str:
    weights = f"{format_size(plan.weights)} of weights other than experts, " if plan.info.cached else ""
    return (
        f"{weights}{format_size(plan.context)} for a context of {plan.info.n_ctx} tokens, "
        f"{format_size(plan.compute)} to compute"
    )
