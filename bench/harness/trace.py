# SPDX-License-Identifier: MIT
"""Tokens and routing that every arm computes alike: drawn, recorded, or laid over a model of another shape.

docs/results/method.md states the rules. A replay overwrites the routers' choices while any build of llama.cpp
computes. Its callback is replay.c, compiled on first use: it is asked about every node of the graph, which
takes Python several milliseconds per token.
"""

import ctypes
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bench.harness.system import compiled
from pyhobbit.errors import HobbitError

if TYPE_CHECKING:
    from pyhobbit.routing.trace import Trace  # with our libraries: a process of stock has its own

_SEED = 1
_FIRST_PLAIN_TOKEN = 300  # after control tokens and bytes


@dataclass(frozen=True)
class MoeShape:
    """n_layers: of the whole model, those without routed experts included."""

    n_layers: int
    n_experts: int
    n_used: int


@dataclass(frozen=True)
class Routing:
    """Choices of each token in each layer, by rank: [tokens, layers, used]. Weights sum to 1."""

    experts: NDArray[np.int32]
    weights: NDArray[np.float32]


def random_tokens(n_vocab: int) -> Iterator[int]:
    """Without end, each of the plain tokens equally likely; the same in every run."""
    draw = random.Random(_SEED)
    while True:
        yield draw.randrange(min(_FIRST_PLAIN_TOKEN, n_vocab // 2), n_vocab)


def moe_shape(model: Path) -> MoeShape:
    """Reads the shape off a GGUF file. Raises HobbitError for a model without routed experts."""
    from pyhobbit.model.gguf_file import read_gguf  # takes a while, and a measuring process has no need of it

    file, names = read_gguf(model), ("block_count", "expert_count", "expert_used_count")
    arch = file.get("general.architecture", "")
    shape = MoeShape(*(file.get(f"{arch}.{name}", 0) for name in names))
    if shape.n_experts == 0 or shape.n_used == 0:
        raise HobbitError(f"{model} has no routed experts, so there is nothing to measure; use a MoE model")
    return shape


def weighted(experts: NDArray[np.int32], spread: float = 0.0) -> Routing:
    """HOBBIT's thresholds make 66 % of two experts high and 31 % low by a spread of 0.6; all alike by 0."""
    drawn = np.exp(spread * np.random.default_rng(_SEED).gumbel(size=experts.shape)).astype(np.float32)
    return Routing(experts, -np.sort(-drawn) / drawn.sum(axis=2, keepdims=True))


def sweep(shape: MoeShape) -> Routing:
    """As few tokens as choose every expert of every layer."""
    n_tokens = -(-shape.n_experts // shape.n_used)
    experts = np.arange(n_tokens * shape.n_used, dtype=np.int32).reshape(n_tokens, 1, -1) % shape.n_experts
    return weighted(np.repeat(experts, shape.n_layers, axis=1))


def seeded_routing(shape: MoeShape, n_tokens: int, n_further: int = 0) -> NDArray[np.int32]:
    """[tokens, layers, used]: preferred experts, of which those of the last tokens return more often.

    With 128 experts it has the reuse and the hits of LRU of a recorded trace (docs/modelled.md).
    n_further: tokens behind the others, which stay as they are without them.
    """
    rng = np.random.default_rng(_SEED)
    n = shape.n_experts
    spread = 0.7 if n <= 16 else 0.13 if n <= 128 else 0.25  # share of the experts that most choices fall on
    chosen = np.empty((n_tokens + n_further, shape.n_layers, shape.n_used), np.int32)
    liked, recent = np.empty((shape.n_layers, n)), np.zeros((shape.n_layers, n))
    for tokens in (range(n_tokens), range(n_tokens, len(chosen))):
        for layer in range(shape.n_layers):
            if tokens.start == 0:
                liked[layer] = rng.permutation(-np.arange(n) / (spread * n))
            for token in tokens:
                order = np.argsort(-(liked[layer] + 0.6 * recent[layer] + rng.gumbel(size=n)))
                chosen[token, layer] = order[: shape.n_used]
                recent[layer] *= 0.7
                recent[layer, order[: shape.n_used]] += 1
    return chosen


def n_complete(trace: "Trace") -> int:
    """Tokens of the trace that can be replayed: those with a row for each layer."""
    return len(_tables(trace)[0])


def lay_over(trace: "Trace", shape: MoeShape) -> Routing:
    """The trace's tokens in their order, prefill first, as choices of a model of this shape."""
    experts, weights = _tables(trace)
    if experts.shape[1:] == (shape.n_layers, shape.n_used) and trace.n_experts == shape.n_experts:
        return Routing(experts, weights / weights.sum(axis=2, keepdims=True))
    laid = weighted(np.empty((len(experts), shape.n_layers, shape.n_used), np.int32))
    for layer in range(shape.n_layers):
        source = layer % trace.n_layers
        further = (source + trace.n_layers // 2) % trace.n_layers
        renamed = _renaming(layer, trace.n_experts, shape.n_experts)
        for token in range(len(experts)):
            own, given = renamed[experts[token, source]].tolist(), weights[token, source]
            known = list(dict.fromkeys([*own, *renamed[experts[token, further, ::-1]].tolist()]))
            following = ((known[-1] + i) % shape.n_experts for i in range(1, shape.n_experts))
            chosen = list(dict.fromkeys([*known, *following]))[: shape.n_used]
            first = dict(zip(reversed(own), reversed(given), strict=True))  # an expert may come twice
            taken = np.array([first.get(expert, given.min()) for expert in chosen], np.float32)
            laid.experts[token, layer], laid.weights[token, layer] = chosen, taken / taken.sum()
    return laid


def _tables(trace: "Trace") -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """[tokens, layers, used]. Tokens of a prompt that lack rows, as in its last layer, are left out."""
    rows = trace.routes.reshape(-1, trace.n_used)
    token, layer = rows["token"][:, 0], rows["layer"][:, 0]
    shape = (int(token.max()) + 1, trace.n_layers, trace.n_used)
    experts, weights = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
    experts[token, layer], weights[token, layer] = rows["expert"], rows["weight"]
    complete = (experts >= 0).all(axis=(1, 2))
    return experts[complete], np.maximum(weights[complete], 1e-6)


def _renaming(layer: int, n_from: int, n_to: int) -> NDArray[np.int32]:
    """The expert that stands for each of the trace's: itself where both have as many."""
    if n_from == n_to:
        return np.arange(n_to, dtype=np.int32)
    order = np.random.default_rng([_SEED, layer]).permutation(max(n_from, n_to))
    return (order % n_to).astype(np.int32)


# --- replay


def library() -> Path:
    """The compiled callback. Raises HobbitError."""
    return compiled("replay", "CC=cc", [Path(__file__).with_name("replay.c")], flags=["-Wextra"])


class _State(ctypes.Structure):
    """struct hobbit_replay of replay.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("experts", "weights")),
        *((name, ctypes.c_int64) for name in ("n_layers", "n_used", "first_row", "n_tokens")),
        *((name, ctypes.c_void_p) for name in ("is_host", "get", "set", "probabilities")),
        ("error", ctypes.c_char_p),
    ]


class Replay:
    """The routing of one context: install() before it is made. Must outlive it."""

    def __init__(self, lib_dir: Path) -> None:
        """lib_dir: of the build of llama.cpp that computes."""
        self._library = ctypes.CDLL(str(library()))
        self._base = ctypes.CDLL(str(lib_dir / "libggml-base.so"))
        self._state = _State()
        self._state.is_host, self._state.get, self._state.set = (
            ctypes.cast(self._base[f"ggml_backend_{name}"], ctypes.c_void_p).value
            for name in ("buffer_is_host", "tensor_get", "tensor_set")
        )

    def install(self, llama: Any, params: Any) -> None:
        """Makes it the evaluation callback of a context with these llama_context_params."""
        function = ctypes.cast(self._library.hobbit_replay_eval, llama.ggml_backend_sched_eval_callback)
        params.cb_eval = self._callback = function
        params.cb_eval_user_data = ctypes.addressof(self._state)

    def use(self, experts: NDArray[np.int32], weights: NDArray[np.float32]) -> None:
        """Routes the next tokens by these arrays, [tokens, layers, used]. Weights are positive.

        Each token takes the next row, whatever its position; each row is replayed once.
        """
        self._arrays = np.ascontiguousarray(experts, np.int32), np.ascontiguousarray(weights, np.float32)
        self._state.experts, self._state.weights = (array.ctypes.data for array in self._arrays)
        _, self._state.n_layers, self._state.n_used = experts.shape
        self._state.first_row = self._state.n_tokens = 0

    def stop(self) -> None:
        """Leaves the next choices to the model."""
        self._state.experts = None

    def begin(self, n_tokens: int) -> None:
        """Announces tokens that are computed at once, of which only the last one's logits are wanted.

        Raises HobbitError.
        """
        self._state.first_row += self._state.n_tokens
        self._state.n_tokens = n_tokens
        if self._state.experts and self._state.first_row + n_tokens > len(self._arrays[0]):
            raise HobbitError("there are more tokens than the trace has rows")

    @property
    def error(self) -> str | None:
        """Why a choice could not be replayed: the first reason."""
        return self._state.error.decode() if self._state.error else None
