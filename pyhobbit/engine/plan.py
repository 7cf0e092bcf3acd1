# SPDX-License-Identifier: MIT
"""Where a model would lie in this machine's memory, by llama.cpp's and the engine's own arithmetic.

llama.cpp simulates the loading (no_alloc), which reads nothing but headers and the vocabulary; the engine
then divides what is left between its pools. Both say what does not fit before anything is loaded.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyhobbit._tables import DeviceInfo
from pyhobbit.engine.llama import KeepGoing, SetContext, SetModel
from pyhobbit.engine.session import Session, one_sequence, simulated
from pyhobbit.engine.stats import ModelInfo
from pyhobbit.errors import HobbitError
from pyhobbit.model.loading import load_failure, log, opening
from pyhobbit.native.ffi import check, lib, llama, multimodal, plan_of, projector_sizes
from pyhobbit.native.machine import available_memory, resident_memory
from pyhobbit.settings.config import CacheConfig, EngineConfig, format_size

_PYTHON_BYTES = 38 << 20  # Python and its modules, which llama-server's process does not hold
_PROCESS_BYTES = 58 << 20  # at least so much is counted: what the verbs import differs by some MiB
_LIBRARY_BYTES = 12 << 20  # libmtmd, its threads and a prepared picture, beside any projector
_MOST_OF_POOLS = 0.1  # share that a larger context may take, and a larger pass


class ShortOfMemory(HobbitError):  # noqa: N818 - what is short, not an error of the program
    """Less memory would be left than the model needs. least: the bound that works, where one is too small."""

    def __init__(self, text: str, least: int = 0) -> None:
        super().__init__(text)
        self.least = least


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of memory by what they are for. info: of the opened model, with its pools as they would be.

    available: that this process may take.  process: held before the model is opened.
    weights: of all but what stays on disk; of everything where the model runs without a cache.
    context: KV cache and the like.  compute: buffers of llama.cpp's graphs.  n_batch: prompt tokens per pass.
    chose_context: nobody said how large it is.  head: of context and compute, for a draft head.
    device: that computes the experts beside the CPU, or several.  devices: what each has. With memory of
    their own (info.on_device), available and the rest are the host's.
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
        """Bytes that this process will hold. Without a cache, nothing else bounds stacks and allocators."""
        slack = 0 if self.info.cached else 16 << 20
        return self.process + self.beside_pools + self.host_pools + self.info.snapshot_bytes + slack

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
        info, tiers = self.info, 2 if self.info.n_absent_high else 1
        here = (info.pool_bytes_high, info.pool_bytes_low), (info.host_bytes_high, info.host_bytes_low)
        return max(0, info.expert_bytes - max(sum(each[:tiers]) for each in here))

    @property
    def share_high(self) -> float:
        """Share of the high versions that need not be read again."""
        held = max(self.info.pool_slots_high, self.info.host_slots_high)
        return held / self.info.n_high_experts if self.info.cached else 1.0

    @property
    def share_low(self) -> float:
        """Share of the experts that need not be read again in low precision."""
        held = max(self.info.pool_slots_low, self.info.host_slots_low)
        return held / self.info.n_low_experts if self.info.cached else 0.0


def open_session(
    path: Path,
    config: EngineConfig,
    set_model: SetModel | None,
    on_loading: KeepGoing,
    aborted: Callable[[], bool],
) -> Session:
    """Opens a model that fits; the parameters are Session's. Raises HobbitError, KeyboardInterrupt."""
    with opening:
        plan = lay_out(path, config, model=set_model)
        config = replace(config, n_ctx=plan.info.n_ctx, n_batch=plan.n_batch)
        settings = {**config.overrides, **config.cache.settings(), "hobbit.process": plan.process}
        asked: dict[str, Any] = {"keep_going": on_loading, "aborted": aborted, "verbose": config.verbose}
        return Session(path, settings, one_sequence(config), set_model=set_model, **asked)


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
        allowed = f"{format_size(memory)} are allowed; raise --memory"
        raise HobbitError(f"{projector} takes {format_size(taken)} of memory, and {allowed}")
    return replace(cache, memory=memory - taken), taken


def projector_bytes(model: Path, projector: Path) -> int:
    """Bytes that a projector (mmproj) takes with a usual image; loads nothing. Raises HobbitError."""
    if not projector.is_file():
        raise HobbitError(f"there is no file {projector}; --mmproj takes the model's projector, a GGUF file")
    with simulated(model, {}) as opened:
        multimodal().mtmd_helper_log_set(log.callback, None)
        log.start(False)
        n_bytes, n_embd = projector_sizes(bytes(projector))
        reason = "" if n_bytes else log.reason() or "it holds no projector"
        if n_bytes and n_embd != llama.llama_model_n_embd_inp(opened.pointer):
            reason = f"it makes {n_embd} numbers of a part of an image, the model takes another number"
        if reason:
            hint = f"give the projector that comes with {model.name}"
            raise HobbitError(f"{projector} cannot be loaded: {reason}; {hint}")
    return n_bytes + _LIBRARY_BYTES


def lay_out(
    path: Path,
    config: EngineConfig,
    context: SetContext | None = None,
    model: SetModel | None = None,
) -> MemoryPlan:
    """The plan for a model with these settings. Raises HobbitError: it does not fit, or cannot be opened.

    context: None takes the context from config, and chooses its size by memory where config.n_ctx is None.
    The batch is chosen only where config.n_batch is None.
    model: None takes llama.cpp's defaults.
    """
    cache = config.cache
    check_limit(cache.memory)
    available, process = available_memory(), max(resident_memory(), _PROCESS_BYTES)
    process -= _PYTHON_BYTES if config.serves else 0
    settings = {**config.overrides, **cache.settings(), "hobbit.process": process}
    with simulated(path, settings, model, config.draft_head) as opened:
        params = llama.llama_context_default_params()
        (context or one_sequence(config))(params, opened)
        chooses = context is None and config.n_ctx is None
        contexts = sorted(config.larger_contexts(opened.n_ctx_train())) if chooses else ()
        batches = config.batches if config.n_batch is None else ()
        how = available, _MOST_OF_POOLS, cache.pools is not None, config.draft_head
        needs, error = plan_of(opened.pointer, params, contexts, batches, *how)
        devices = tuple(each for each in opened.cache.devices() if each.name != "CPU")
        info = opened.info(params.n_ctx, params.n_threads, cache.memory)
        names = ",".join(each.name for each in devices) or None
        sizes = needs.weights, needs.context, needs.compute
        plan = MemoryPlan(
            info, available, process, *sizes, params.n_ubatch, chooses, needs.head, names, devices
        )
        _check(path, plan, needs, error, "the server" if config.serves else "Python and libraries")
        if opened.has_state() and not config.serves and needs.n_rollback < config.n_drafts:
            hint = "leave draft_model out, or --drafts"
            raise HobbitError(f"{path.name} has layers whose state cannot go back, as drafts need; {hint}")
        return plan


def check_limit(memory: int | None) -> None:
    """Raises HobbitError for a bound above what this process may hold."""
    check(lib.hobbit_check_limit, memory or 0)


def _check(path: Path, plan: MemoryPlan, needs: Any, error: str | None, program: str) -> None:
    """Raises HobbitError where it does not fit. program: holds the memory that the process has before."""
    # the weights of a model without a cache are mapped: they need not fit
    needed = plan.beside_pools - (0 if plan.info.cached else plan.weights)
    if needed > plan.available:
        raise ShortOfMemory(
            f"{plan.info.model} does not fit into memory: {_needs(plan)}, and "
            f"{format_size(plan.available)} are free; free some memory, or use a smaller context"
        )
    if needs.pools.shortage == lib.HOBBIT_SHORT_OF_MEMORY:
        prefetch = f"{format_size(n)} to prefetch, " if (n := needs.pools.prefetch_bytes) else ""
        parts = f"{_needs(plan)}, {prefetch}{format_size(plan.process)} for {program}"
        rest = "the rest is for work buffers and the smallest pools"
        less = f"; --ctx {needs.n_ctx_less} would do" if needs.n_ctx_less else ""
        raise ShortOfMemory(f"{error} ({plan.info.model} takes {parts}; {rest}){less}", needs.pools.least)
    if error is not None:
        raise HobbitError(error or load_failure(path, "a smaller context needs less memory"))


def _needs(plan: MemoryPlan) -> str:
    weights = f"{format_size(plan.weights)} of weights other than experts, " if plan.info.cached else ""
    context = f"{format_size(plan.context)} for a context of {plan.info.n_ctx} tokens"
    return f"{weights}{context}, {format_size(plan.compute)} to compute"
