# SPDX-License-Identifier: MIT
"""How many tokens of a prompt one pass computes.

Every pass reads the experts of its tokens, nearly all of them in a long prompt, so fewer passes read less.
But the buffers of a larger one take memory from the experts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from pyhobbit._tables import PoolPlan
from pyhobbit.engine.llama import Context, Model, SetContext
from pyhobbit.engine.session import Session
from pyhobbit.errors import HobbitError
from pyhobbit.native.ffi import HostMemory, host_memory
from pyhobbit.settings.config import EngineConfig

_MOST_OF_POOLS = 0.1  # that a larger pass may take


@dataclass(frozen=True)
class Batch:
    """A pass of n_tokens. memory: what the context then takes.  pools: what is left for the experts."""

    n_tokens: int
    memory: HostMemory
    pools: PoolPlan

    @property
    def computing(self) -> int:
        """Bytes that computing takes."""
        return self.memory.compute + self.memory.device_compute + self.pools.batch_bytes


Beside = Callable[[HostMemory], int]
"""What a model holds in host memory beside its pools, by the sizes of its context."""


def best_batch(session: Session, set_context: SetContext, beside: Beside) -> Batch | None:
    """The largest of EngineConfig.batches that leaves the experts 90 % of what the session's own leaves.

    The session's own where all experts fit anyway; None where not even that leaves enough to compute.
    session: simulated, and not yet prepared.  set_context: of its context.
    """
    batches = _batches(session, set_context, beside)
    first = next(batches, None)
    if first is None or first.pools.holds_all:
        return first
    most = first.computing + _MOST_OF_POOLS * first.pools.pool_bytes
    return [first, *takewhile(lambda batch: batch.computing <= most, batches)][-1]


def _batches(session: Session, set_context: SetContext, beside: Beside) -> Iterator[Batch]:
    """By size, the session's own first, as long as the smallest pools fit."""
    own = session.context
    sizes = sorted({own.n_ubatch, *(min(n, own.n_ctx) for n in EngineConfig.batches)})
    for n_tokens in sizes[sizes.index(own.n_ubatch) :]:
        memory = _memory(session, set_context, n_tokens)
        try:
            yield Batch(n_tokens, memory, session.cache.plan_pools(beside(memory), n_tokens))
        except HobbitError:
            return


def _memory(session: Session, set_context: SetContext, n_tokens: int) -> HostMemory:
    def fill(params: Any, model: Model) -> None:
        set_context(params, model)
        params.n_batch = params.n_ubatch = n_tokens

    if n_tokens == session.context.n_ubatch:
        return host_memory(session.context.pointer)
    context = Context(session.model, fill, lambda: False)
    try:
        return host_memory(context.pointer)
    finally:
        context.close()
