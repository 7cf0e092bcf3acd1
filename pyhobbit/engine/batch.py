# SPDX-License-Identifier: MIT
"""How many tokens the context has and one pass over a prompt computes, where nobody says so.

A longer context remembers more. Every pass reads the experts of its tokens, nearly all of them in a long
prompt, so fewer passes read less. But both take memory from the experts.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

from pyhobbit._tables import PoolPlan
from pyhobbit.engine.llama import Context, Model, SetContext
from pyhobbit.engine.session import Session
from pyhobbit.errors import HobbitError
from pyhobbit.native.ffi import HostMemory
from pyhobbit.native.machine import available_memory
from pyhobbit.settings.config import EngineConfig

_MOST_OF_POOLS = 0.1  # share that a larger context may take, and a larger pass
_LEAST_CONTEXT = 256
_MOST_OF_FREE = 0.5  # share of what a model without a cache leaves, for a larger context


@dataclass(frozen=True)
class Batch:
    """A pass of n_tokens. memory: what the context then takes.  pools: what is left for the experts."""

    n_tokens: int
    memory: HostMemory
    pools: PoolPlan

    @property
    def taken(self) -> int:
        """Bytes that the context and computing take."""
        return _taken(self.memory) + self.pools.batch_bytes


Beside = Callable[[HostMemory], int]
"""Bytes that a model holds in host memory beside its pools, by the sizes of its context."""


def best_batch(session: Session, set_context: SetContext, beside: Beside) -> Batch | None:
    """The largest of EngineConfig.batches that leaves the experts 90 % of what the session's own leaves.

    The session's own where all experts fit anyway; None where not even that leaves enough to compute.
    session: simulated, and not yet prepared.  set_context: of its context.
    """
    batches = _batches(session, set_context, beside)
    first = next(batches, None)
    if first is None or first.pools.holds_all:
        return first
    most = first.taken + _MOST_OF_POOLS * first.pools.pool_bytes
    return [first, *takewhile(lambda batch: batch.taken <= most, batches)][-1]


def best_context(session: Session, set_context: SetContext, beside: Beside, config: EngineConfig) -> int:
    """The largest of EngineConfig.contexts that leaves the experts 90 % of what the session's own leaves.

    Where all experts fit, they still do, and a model without a cache leaves half of the free memory free. The
    session's own where no larger one is that good. session, set_context: as of best_batch().
    """
    own = session.context
    is_good = _judge(session, beside, config)
    for n_ctx in sorted(config.larger_contexts(session.model.n_ctx_train()), reverse=True):
        with contextlib.suppress(HobbitError):  # llama.cpp has no memory to simulate it
            if is_good(_memory(session, set_context, n_ctx, own.n_ubatch)):
                return n_ctx
    return own.n_ctx


def smaller_context(session: Session, set_context: SetContext, beside: Beside) -> int | None:
    """The largest half, quarter and so on of the session's context that leaves the pools room, or None."""
    own = session.context
    for n_ctx in takewhile(lambda n: n >= _LEAST_CONTEXT, (own.n_ctx >> i for i in count(1))):
        n_batch = min(own.n_ubatch, n_ctx)
        if _planned(session, n_batch, _memory(session, set_context, n_ctx, n_batch), beside):
            return n_ctx
    return None


def _judge(session: Session, beside: Beside, config: EngineConfig) -> Callable[[HostMemory], bool]:
    """Returns a test: true if the model can spare the memory of a larger context."""
    memory, n_batch = session.context.memory(), session.context.n_ubatch
    free = available_memory() - memory.model
    first = _planned(session, n_batch, memory, beside) if session.cache else None

    def is_good(larger: HostMemory) -> bool:
        if not session.cache:
            return _taken(larger) <= _MOST_OF_FREE * free
        batch = _planned(session, n_batch, larger, beside) if first else None
        if first is None or batch is None:
            return False
        if first.pools.holds_all and config.cache.pools is None:
            return batch.pools.holds_all
        return batch.taken <= first.taken + _MOST_OF_POOLS * first.pools.pool_bytes

    return is_good


def _batches(session: Session, set_context: SetContext, beside: Beside) -> Iterator[Batch]:
    """By size, the session's own first, as long as the smallest pools fit."""
    own = session.context
    sizes = sorted({own.n_ubatch, *(min(n, own.n_ctx) for n in EngineConfig.batches)})
    for n_tokens in sizes[sizes.index(own.n_ubatch) :]:
        memory = _memory(session, set_context, own.n_ctx, n_tokens)
        batch = _planned(session, n_tokens, memory, beside)
        if batch is None:
            return
        yield batch


def _planned(session: Session, n_tokens: int, memory: HostMemory, beside: Beside) -> Batch | None:
    """Plans a batch; None if no memory is left for the experts."""
    try:
        return Batch(n_tokens, memory, session.cache.plan_pools(beside(memory), n_tokens))
    except HobbitError:
        return None


def _memory(session: Session, set_context: SetContext, n_ctx: int, n_batch: int) -> HostMemory:
    """Raises HobbitError where llama.cpp cannot make such a context."""

    def fill(params: Any, model: Model) -> None:
        set_context(params, model)
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_batch, n_batch

    if (n_ctx, n_batch) == (session.context.n_ctx, session.context.n_ubatch):
        return session.context.memory()
    context = Context(session.model, fill, lambda: False)
    try:
        return context.memory()
    finally:
        context.close()


def _taken(memory: HostMemory) -> int:
    return memory.context + memory.compute + memory.device_compute
