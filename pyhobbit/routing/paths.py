# SPDX-License-Identifier: MIT
"""EdgeMoE's activation paths (arXiv 2308.14352, III-C1) of a text, as in docs/format.md."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

TABLE_BYTES = 1 << 20
"""Most bytes of a table where nothing else is said."""

_MOST_TOKENS = 255
_LEAST_SHARE = 0.05  # experts that fewer of an entry's tokens chose are left out

Chosen = Mapping[int, NDArray[Any]]
"""The experts that tokens chose, by layer: [n_tokens, n_used]."""

_Entry = tuple[int, list[int]]


def path_table(by_layer: Chosen, n_experts: int, max_bytes: int = TABLE_BYTES) -> tuple[int, ...]:
    """The paths of tokens, as hobbit.paths stores them: 32 bits a number, at most max_bytes.

    The frequencies of each layer come first, then what follows single experts, then paths over two layers. In
    each kind those of the fewest tokens are left out.
    """
    chosen = {layer: np.sort(experts.astype(np.uint16), axis=1) for layer, experts in by_layer.items()}
    table: list[int] = []
    for kind in (_frequencies, _pairs, _paths):
        entries = [entry for layer in chosen for entry in kind(chosen, layer, n_experts, max_bytes)]
        for _, words in sorted(entries, key=lambda entry: -entry[0]):
            if 4 * (len(table) + len(words)) <= max_bytes:
                table += words
    return tuple(table)


def chosen_of(routes: NDArray[Any]) -> Chosen:
    """The experts in an array of trace.ROUTE, without layers that tokens skip."""
    token = routes["sequence"].astype(np.int64) << 32 | routes["token"]
    n_tokens = np.unique(token).size
    found = {}
    for layer in np.unique(routes["layer"]).tolist():
        of = routes["layer"] == layer
        if np.unique(token[of]).size == n_tokens:
            order = np.argsort(token[of], kind="stable")
            found[layer] = routes["expert"][of][order].reshape(n_tokens, -1)
    return found


def _entry(layer: int, now: Any, before: Any, next_: NDArray[Any], n_experts: int) -> _Entry:
    """An entry, and how many tokens it is of. next_: what they chose in `layer`, [n_tokens, n_used]."""
    n_tokens, counts = len(next_), np.bincount(next_.ravel(), minlength=n_experts)
    n = min(n_tokens, _MOST_TOKENS)
    kept = np.flatnonzero(counts >= max(1, _LEAST_SHARE * n_tokens))
    words = 256 * kept + np.rint(counts[kept] * n / n_tokens).astype(int)
    return n_tokens, [layer, n, len(now), len(before), len(words), *map(int, (*now, *before, *words))]


def _frequencies(chosen: Chosen, layer: int, n_experts: int, _max_bytes: int) -> Iterator[_Entry]:
    yield _entry(layer, (), (), chosen[layer], n_experts)


def _pairs(chosen: Chosen, layer: int, n_experts: int, _max_bytes: int) -> Iterator[_Entry]:
    if layer - 1 in chosen:
        for expert in np.unique(chosen[layer - 1]):
            is_it = (chosen[layer - 1] == expert).any(axis=1)
            yield _entry(layer, (expert,), (), chosen[layer][is_it], n_experts)


def _paths(chosen: Chosen, layer: int, n_experts: int, max_bytes: int) -> Iterator[_Entry]:
    """The most frequent ones, as many as a layer's share of the table may have room for."""
    if layer - 1 in chosen and layer - 2 in chosen:
        now, before = chosen[layer - 1], chosen[layer - 2]
        both = np.concatenate([now, before], axis=1)
        keys, of_token, counts = np.unique(both, axis=0, return_inverse=True, return_counts=True)
        tokens = np.split(np.argsort(of_token.ravel(), kind="stable"), np.cumsum(counts)[:-1])
        most = max_bytes // (4 * len(chosen) * (6 + both.shape[1]))
        for i in np.argsort(-counts, kind="stable")[:most]:
            key = keys[i]
            yield _entry(layer, key[: now.shape[1]], key[now.shape[1] :], chosen[layer][tokens[i]], n_experts)
