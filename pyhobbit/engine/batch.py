# SPDX-License-Identifier: MIT
"""How many tokens the context has and one pass over a prompt computes, where nobody says so.

A longer context remembers more. Every pass reads the experts of its tokens, nearly all of them in a long
prompt, so fewer passes read less. But both take memory from the experts.
"""

import contextlib
from collections.abc import Iterator
from itertools import count, takewhile
from typing import Any

from pyhobbit.engine.llama import Model, SetContext
from pyhobbit.engine.session import Session
from pyhobbit.errors import HobbitError
from pyhobbit.native.ffi import Needs
from pyhobbit.native.machine import available_memory
from pyhobbit.settings.config import EngineConfig

_MOST_OF_POOLS = 0.1  # share that a larger context may take, and a larger pass
_LEAST_CONTEXT = 256
_MOST_OF_FREE = 0.5  # share of what a model without a cache leaves, for a larger context


def sized(set_context: SetContext, n_ctx: int, n_batch: int) -> SetContext:
    """The context with so many tokens, and as many of them in a pass."""

    def fill(params: Any, model: Model) -> None:
        set_context(params, model)
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_batch, n_batch

    return fill


def best_batch(session: Session, set_context: SetContext) -> int | None:
    """The largest of EngineConfig.batches that leaves the experts 90 % of what the session's own leaves.

    The session's own where all experts fit anyway; None where not even that leaves enough to compute.
    session: simulated.  set_context: of its context.
    """
    batches = _batches(session, set_context)
    n_tokens, first = next(batches, (None, Needs()))
    if first.holds_all:
        return n_tokens
    return [n_tokens, *(n for n, _ in takewhile(lambda batch: _spares(first, batch[1]), batches))][-1]


def best_context(session: Session, set_context: SetContext, config: EngineConfig) -> int:
    """The largest of EngineConfig.contexts that leaves the experts 90 % of what the session's own leaves.

    Where all experts fit, they still do, and a model without a cache leaves half of the free memory free. The
    session's own where no larger one is that good. session, set_context: as of best_batch().
    """
    own = session.context
    first = own.needs()
    free = available_memory() - first.weights

    def is_good(larger: Needs) -> bool:
        if not session.cache:
            return larger.of_context <= _MOST_OF_FREE * free
        if first.error or larger.error:
            return False
        if first.holds_all and config.cache.pools is None:
            return bool(larger.holds_all)
        return _spares(first, larger)

    for n_ctx in sorted(config.larger_contexts(session.model.n_ctx_train()), reverse=True):
        with contextlib.suppress(HobbitError):  # llama.cpp has no memory to simulate it
            if is_good(_needs(session, set_context, n_ctx, own.n_ubatch)):
                return n_ctx
    return own.n_ctx


def smaller_context(session: Session, set_context: SetContext) -> int | None:
    """The largest half, quarter and so on of the session's context that leaves the pools room, or None."""
    own = session.context
    for n_ctx in takewhile(lambda n: n >= _LEAST_CONTEXT, (own.n_ctx >> i for i in count(1))):
        if not _needs(session, set_context, n_ctx, min(own.n_ubatch, n_ctx)).error:
            return n_ctx
    return None


def _spares(first: Needs, larger: Needs) -> bool:
    """Returns True if the experts can spare the memory of a larger context or pass."""
    return bool(larger.of_context <= first.of_context + _MOST_OF_POOLS * first.pool_bytes)


def _batches(session: Session, set_context: SetContext) -> Iterator[tuple[int, Needs]]:
    """Tokens of a pass, the session's own first, as long as the smallest pools fit."""
    own = session.context
    sizes = sorted({own.n_ubatch, *(min(n, own.n_ctx) for n in EngineConfig.batches)})
    for n_tokens in sizes[sizes.index(own.n_ubatch) :]:
        needs = _needs(session, set_context, own.n_ctx, n_tokens)
        if needs.error:
            return
        yield n_tokens, needs


def _needs(session: Session, set_context: SetContext, n_ctx: int, n_batch: int) -> Needs:
    """Gives the session such a context, and returns its needs. Raises HobbitError."""
    if (n_ctx, n_batch) != (session.context.n_ctx, session.context.n_ubatch):
        session.replace_context(sized(set_context, n_ctx, n_batch))
    return session.context.needs()
