# SPDX-License-Identifier: MIT
"""The one way to open a model: weights, expert cache and context, for Engine, Evaluator and the plan."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pyhobbit.engine.cached import Closing
from pyhobbit.engine.llama import Context, KeepGoing, Model, SetContext, SetModel, ctrl_c_waits
from pyhobbit.engine.stats import ModelInfo
from pyhobbit.errors import HobbitError
from pyhobbit.model.loading import log, opening
from pyhobbit.model.names import check_model_file
from pyhobbit.model.quantize import type_by_name
from pyhobbit.native.ffi import last_error, lib
from pyhobbit.native.machine import trimmed_heap
from pyhobbit.settings.config import EngineConfig, Setting


class Session(Closing):
    """An open model with one context. A context manager.

    settings: of llama.cpp and the expert cache, by key.  set_model, set_context: fill in llama.cpp's own
    parameters.  keep_going: False raises KeyboardInterrupt.  aborted: asked while a prompt is computed.
    Raises HobbitError.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Setting],
        set_context: SetContext,
        *,
        set_model: SetModel | None = None,
        keep_going: KeepGoing = lambda _share: True,
        aborted: Callable[[], bool] = lambda: False,
        verbose: bool = False,
    ) -> None:
        check_model_file(path)
        with opening, contextlib.ExitStack() as stack:
            log.start(verbose)
            with ctrl_c_waits() as came:
                self.model = Model(path, settings, lambda share: keep_going(share) and not came(), set_model)
                stack.callback(self.model.close)
                self.cache = self.model.cache
                self.context = Context(self.model, set_context, aborted)
                stack.callback(self.context.close)
            stack.pop_all()

    def close(self) -> None:
        """Frees everything. Raises HobbitError where a trace is incomplete."""
        with opening:
            lib.hobbit_clear_last_error()
            self.context.close()
            self.model.close()
            if error := last_error():
                raise HobbitError(error)

    def info(self, memory: int | None) -> ModelInfo:
        """Figures of the opened model. memory: the bound on the process, in bytes."""
        return self.model.info(self.context.n_ctx, self.context.n_threads, memory)


@contextlib.contextmanager
def simulated(
    path: Path, settings: Mapping[str, Setting], set_model: SetModel | None = None, has_head: bool = False
) -> Iterator[Model]:
    """A model of which no weight is read and no buffer allocated. has_head: with the draft head (MTP)."""
    check_model_file(path)
    with opening, trimmed_heap(), ctrl_c_waits() as came:
        log.start(False)
        model = Model(path, settings, lambda _share: not came(), set_model, True, has_head)
        with contextlib.closing(model):
            yield model


def one_sequence(config: EngineConfig) -> SetContext:
    """The context in which an engine generates: the logits of one token of each sequence, or of drafts."""

    def fill(params: Any, model: Model) -> None:
        params.n_rs_seq = config.n_drafts if model.has_state() else 0
        params.n_ctx = config.context_tokens(model.n_ctx_train())
        n_batch = min(config.n_batch or config.batches[0], params.n_ctx)
        params.n_outputs_max = config.n_beams * (1 + config.n_drafts)
        params.n_batch = params.n_ubatch = max(n_batch, params.n_outputs_max)
        params.n_seq_max = config.n_beams
        params.type_k, params.type_v = (type_by_name(each).id for each in config.cache_types)
        params.kv_unified = config.n_beams > 1 and config.shares_context
        params.n_threads = params.n_threads_batch = config.computing_threads(config.n_threads)

    return fill
