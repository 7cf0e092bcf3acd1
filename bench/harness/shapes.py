# SPDX-License-Identifier: MIT
"""The sizes of real MoE models, and the keys and tensors that llama.cpp wants to find in a file of each."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

Kind = Literal["expert", "matrix", "f32"]

# These give random weights the routing of a real model: docs/measurements.md says how, and what was reached.
_COMMON = 0.7  # mean of the embeddings by their standard deviation: some experts are preferred
_FIRST_ATTENTION = 2.4  # the first layer adds much of the tokens just before, so that choices last
_ATTENTION, _EXPERTS = 0.35, 0.6  # further layers add little, so that the next choice can be predicted
_COMMON_QUERY, _OWN_QUERY = 1.1, 0.55  # the common part of queries and keys looks at the nearest tokens
_SHARPER = 1.5  # where norms take the size from queries and keys


@dataclass(frozen=True)
class Shape:
    """One model. n_ff: inner size of one routed expert.  qk_norm: what the norms of queries and keys span.

    sinks: attention sinks, biases of attention, router and experts, a sliding window.
    """

    arch: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_expert: int
    n_used: int
    n_vocab: int
    qk_norm: Literal["none", "head", "all"] = "none"
    sinks: bool = False
    keys: dict[str, int | float] = field(default_factory=dict)

    def scaled(self, n_layer: int | None) -> "Shape":
        """The same model with fewer layers, or more."""
        return self if n_layer is None else replace(self, n_layer=n_layer)


SHAPES = {
    "mixtral-8x7b": Shape("llama", 32, 4096, 32, 8, 128, 14336, 8, 2, 32000),
    "qwen3-30b-a3b": Shape("qwen3moe", 48, 2048, 32, 4, 128, 768, 128, 8, 151936, qk_norm="head"),
    "gpt-oss-120b": Shape(
        "gpt-oss", 36, 2880, 64, 8, 64, 2880, 128, 4, 201088, sinks=True,
        keys={"attention.sliding_window": 128},
    ),
    "flash-next": Shape("qwen3moe", 48, 2560, 32, 4, 128, 640, 512, 10, 151936, qk_norm="head"),
    "olmoe": Shape("olmoe", 16, 2048, 16, 16, 128, 1024, 64, 8, 50304, qk_norm="all"),
    "tiny": Shape("qwen3moe", 12, 512, 4, 2, 64, 512, 32, 4, 1024, qk_norm="head"),  # to try the bench out
}  # fmt: skip


@dataclass(frozen=True)
class RandomTensor:
    """A tensor to write: `ne` in ggml's order, values drawn from N(mean, std^2)."""

    name: str
    ne: tuple[int, ...]
    kind: Kind
    std: float
    mean: float = 0.0


def metadata(shape: Shape) -> dict[str, int | float]:
    """The architecture's keys, without the tokenizer's."""
    common = {
        "vocab_size": shape.n_vocab, "context_length": 4096, "embedding_length": shape.n_embd,
        "block_count": shape.n_layer, "feed_forward_length": shape.n_ff,
        "expert_feed_forward_length": shape.n_ff, "expert_count": shape.n_expert,
        "expert_used_count": shape.n_used, "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv, "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim, "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": shape.head_dim, "rope.freq_base": 10000.0,
    }  # fmt: skip
    return {f"{shape.arch}.{name}": value for name, value in {**common, **shape.keys}.items()}


def tensors(shape: Shape) -> list[RandomTensor]:
    """All tensors in file order."""
    s = shape
    all_tensors = [
        RandomTensor("token_embd.weight", (s.n_embd, s.n_vocab), "matrix", 1.0, _COMMON),
        _norm("output_norm", s.n_embd),
        _matrix("output", s.n_embd, s.n_vocab),
    ]
    for i in range(s.n_layer):
        parts = (*_attention(s, _ATTENTION if i else _FIRST_ATTENTION), *_experts(s))
        all_tensors += [replace(part, name=f"blk.{i}.{part.name}") for part in parts]
    return all_tensors


def _matrix(
    name: str, n_in: int, *n_out: int, kind: Kind = "matrix", gain: float = 1.0, mean: float = 0.0
) -> RandomTensor:
    return RandomTensor(f"{name}.weight", (n_in, *n_out), kind, gain * n_in**-0.5, mean)


def _norm(name: str, n: int, gain: float = 1.0) -> RandomTensor:
    return RandomTensor(f"{name}.weight", (n,), "f32", 0.02, gain)


def _biases(wanted: bool, **sizes: int) -> Iterator[RandomTensor]:
    for name, n in sizes.items() if wanted else ():
        yield RandomTensor(f"{name}.bias", (n,), "f32", 0.02)


def _attention(s: Shape, gain: float) -> Iterator[RandomTensor]:
    n_q, n_kv = s.n_head * s.head_dim, s.n_head_kv * s.head_dim
    # factor of a matrix whose elements are all 1
    common_input = s.n_embd * _COMMON * (1 + _COMMON**2) ** -0.5
    yield _norm("attn_norm", s.n_embd)
    for part, n_out in (("q", n_q), ("k", n_kv)):
        common = _COMMON_QUERY / common_input
        yield _matrix(f"attn_{part}", s.n_embd, n_out, gain=_OWN_QUERY, mean=common)
    yield _matrix("attn_v", s.n_embd, n_kv)
    yield _matrix("attn_output", n_q, s.n_embd, gain=gain)
    yield from _biases(s.sinks, attn_q=n_q, attn_k=n_kv, attn_v=n_kv, attn_output=s.n_embd)
    if s.qk_norm != "none":
        yield _norm("attn_q_norm", n_q if s.qk_norm == "all" else s.head_dim, _SHARPER)
        yield _norm("attn_k_norm", n_kv if s.qk_norm == "all" else s.head_dim)
    if s.sinks:
        yield RandomTensor("attn_sinks.weight", (s.n_head,), "f32", 0.1)


def _experts(s: Shape) -> Iterator[RandomTensor]:
    yield _norm("post_attention_norm" if s.sinks else "ffn_norm", s.n_embd)
    yield _matrix("ffn_gate_inp", s.n_embd, s.n_expert, kind="f32", gain=1.1)
    yield from _biases(s.sinks, ffn_gate_inp=s.n_expert)
    for part, n_in, n_out, gain in (
        ("gate", s.n_embd, s.n_ff, 1.0),
        ("up", s.n_embd, s.n_ff, 1.0),
        ("down", s.n_ff, s.n_embd, _EXPERTS),
    ):
        yield _matrix(f"ffn_{part}_exps", n_in, n_out, s.n_expert, kind="expert", gain=gain)
        if s.sinks:
            yield RandomTensor(f"ffn_{part}_exps.bias", (n_out, s.n_expert), "f32", 0.02)
