# SPDX-License-Identifier: MIT
"""Routers' choices in a run, collected layer by layer (hobbit_set_observer)."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pyhobbit.errors import HobbitError
from pyhobbit.native.ffi import ffi

_ABSENT = {"experts": -1, "output_norms": np.nan}


@dataclass(frozen=True)
class LayerEvent:
    """Choices of one layer's router for one batch (hobbit_layer_event). The arrays are valid during the call.

    positions: [n_tokens].  experts, weights, precisions, output_norms: [n_tokens, n_used].
    router_input: [n_tokens, n_embd].  None: not known.
    """

    layer: int
    positions: np.ndarray
    experts: np.ndarray
    weights: np.ndarray | None
    precisions: np.ndarray
    router_input: np.ndarray | None
    output_norms: np.ndarray | None


def observed(values: np.ndarray | None) -> np.ndarray:
    """For those who have made sure that the engine sees it."""
    assert values is not None
    return values


def layer_event(event: Any) -> LayerEvent:
    """Reads a hobbit_layer_event."""
    chosen = (event.n_tokens, event.n_used)

    def array(pointer: Any, dtype: type, shape: tuple[int, ...]) -> np.ndarray | None:
        if not pointer:
            return None
        n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        return np.frombuffer(ffi.buffer(pointer, n_bytes), dtype).reshape(shape)

    return LayerEvent(
        layer=event.layer,
        positions=observed(array(event.positions, np.int32, chosen[:1])),
        experts=observed(array(event.experts, np.int32, chosen)),
        weights=array(event.weights, np.float32, chosen),
        precisions=observed(array(event.precisions, np.uint8, chosen)),
        router_input=array(event.router_input, np.float32, (event.n_tokens, event.n_embd)),
        output_norms=array(event.output_norms, np.float32, chosen),
    )


@dataclass(frozen=True)
class Observations:
    """T tokens in the order of the run, L layers that ran, K experts per token, best first.

    layers: their numbers among the layers with routed experts.  sequences: [T].  experts, weights,
    output_norms: [T, L, K]; a layer that uses fewer than K has experts of -1, weights of 0 and norms of NaN
    at its end.  inputs: float32 [N, L, D], the routers' inputs of the tokens numbered
    `input_tokens` [N].  None: the engine does not see it in this architecture.
    """

    layers: list[int]
    sequences: np.ndarray
    experts: np.ndarray
    weights: np.ndarray | None
    output_norms: np.ndarray | None
    inputs: np.ndarray | None
    input_tokens: np.ndarray

    @property
    def is_used(self) -> np.ndarray:
        """False where a layer uses fewer than K experts: bool [L, K]."""
        return self.experts[0] >= 0

    def used(self, values: np.ndarray, i: int) -> np.ndarray:
        """A view of the values [T, k] of the i-th layer, which uses k experts, in [T, L, K]."""
        return values[:, i, : np.count_nonzero(self.is_used[i])]

    def by_layer(self) -> dict[int, np.ndarray]:
        """Views of the experts [T, k] by the number of their layer."""
        return {layer: self.used(self.experts, i) for i, layer in enumerate(self.layers)}

    def first(self, n_tokens: int) -> "Observations":
        """Observations of the first tokens of the run."""
        kept = self.input_tokens < n_tokens
        names = ("sequences", "experts", "weights", "output_norms")
        cut = {name: of[:n_tokens] for name in names if (of := getattr(self, name)) is not None}
        inputs = None if self.inputs is None else self.inputs[kept]
        return replace(self, **cut, inputs=inputs, input_tokens=self.input_tokens[kept])


class Recorder:
    """An observer for runs of whole sequences. max_input_bytes: of routers' inputs, evenly spaced."""

    def __init__(self, n_sequences: int, sequence_length: int, n_layers: int, max_input_bytes: int) -> None:
        self._sequences = np.repeat(np.arange(n_sequences), sequence_length)
        self._n_seen = np.zeros(n_layers, np.int64)  # tokens, by layer
        self._max_input_bytes = max_input_bytes
        self._stride = 1
        self._arrays: dict[str, np.ndarray] = {}

    def __call__(self, event: LayerEvent) -> None:
        """Takes one layer of one batch."""
        start = int(self._n_seen[event.layer])
        end = start + len(event.experts)
        for name in ("experts", "weights", "output_norms"):
            values = getattr(event, name)
            if values is not None:
                self._array(name, values)[start:end, event.layer, : values.shape[1]] = values
        if event.router_input is not None and self._max_input_bytes:
            if "inputs" not in self._arrays:
                n_bytes = 4 * event.router_input.shape[1] * len(self._n_seen) * len(self._sequences)
                self._stride = max(1, -(-n_bytes // self._max_input_bytes))
            kept = slice(-start % self._stride, None, self._stride)
            rows = slice(-(-start // self._stride), -(-end // self._stride))
            self._array("inputs", event.router_input)[rows, event.layer] = event.router_input[kept]
        self._n_seen[event.layer] = end

    def observations(self) -> Observations:
        """Everything so far. Raises HobbitError when a layer has not seen every token."""
        layers = np.flatnonzero(self._n_seen)
        n_tokens = len(self._sequences)
        if not len(layers) or (self._n_seen[layers] != n_tokens).any():
            counts = ", ".join(map(str, self._n_seen))
            raise HobbitError(
                f"the layers' routers saw {counts} of {n_tokens} tokens: an architecture that runs so cannot "
                "be inspected with a text"
            )
        arrays = {name: values[:, layers] for name, values in self._arrays.items()}
        return Observations(
            layers=layers.tolist(),
            sequences=self._sequences,
            experts=arrays["experts"],
            weights=arrays.get("weights"),
            output_norms=arrays.get("output_norms"),
            inputs=arrays.get("inputs"),
            input_tokens=np.arange(0, n_tokens, self._stride),
        )

    def _array(self, name: str, values: np.ndarray) -> np.ndarray:
        n_rows = -(-len(self._sequences) // (self._stride if name == "inputs" else 1))
        known = self._arrays.get(name, np.empty((n_rows, len(self._n_seen), 0), values.dtype))
        if (added := values.shape[1] - known.shape[2]) > 0:
            widths = ((0, 0), (0, 0), (0, added))
            known = self._arrays[name] = np.pad(known, widths, constant_values=_ABSENT.get(name, 0))
        return known
