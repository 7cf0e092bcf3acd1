# SPDX-License-Identifier: MIT
"""Random-weight MoE models of real shapes, written at about the speed of the disk.

Each kind of matrix has one pool of quantised random blocks. Every tensor is the pool, repeated, from a place
of its own: the weights of two experts differ, though their blocks are the same.
"""

import re
import subprocess
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
from gguf.constants import GGUFValueType, TokenType
from tqdm import tqdm

from bench.harness.system import ROOT
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.model import gguf_file as gguf
from pyhobbit.model.long_work import check_room
from pyhobbit.model.quantize import GgmlType, quantize, type_by_name
from pyhobbit.model.tiers import ALIGNMENT, LOW, routed_part, sidecar_metadata, tier_tensor_name
from pyhobbit.native.files import atomic_output

# These give random weights the routing of a real model: docs/measurements.md says how, and what was reached.
_COMMON = 0.7  # mean of the embeddings by their standard deviation: some experts are preferred
_FIRST_ATTENTION = 2.4  # the first layer adds much of the tokens just before, so that choices last
_ATTENTION, _EXPERTS = 0.35, 0.6  # further layers add little, so that the next choice can be predicted
_COMMON_QUERY, _OWN_QUERY = 1.1, 0.55  # the common part of queries and keys looks at the nearest tokens
_SHARPER = 1.5  # where norms take the size from queries and keys

_MODEL_ALIGNMENT = 32  # GGUF's default: what most published files have
_POOL_ROWS, _ROW = 2039, 2048  # a prime number of rows, which no expert's size divides
_SEED = 1
_BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
_DELTA_NET = {  # Qwen3-Next's, where a shape is hybrid
    "ssm.conv_kernel": 4, "ssm.inner_size": 4096, "ssm.state_size": 128, "ssm.time_step_rank": 32,
    "ssm.group_count": 16,
}  # fmt: skip
_NUMBERS = {int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}


@dataclass(frozen=True)
class Shape:
    """One model. n_ff: inner size of one routed expert.  qk_norm: what the norms of queries and keys span.

    sinks: attention sinks, biases of attention, router and experts, a sliding window of 128 tokens.
    hybrid: Qwen3-Next's gated delta nets in three of four layers, a gate of attention, a shared expert.
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
    hybrid: bool = False

    def scaled(self, n_layer: int | None) -> "Shape":
        """The same model with fewer layers, or more. Raises ConfigError."""
        if n_layer is not None and n_layer < 1:
            raise ConfigError(f"--layers is {n_layer}; it must be positive")
        return self if n_layer is None else replace(self, n_layer=n_layer)


SHAPES = {
    "mixtral-8x7b": Shape("llama", 32, 4096, 32, 8, 128, 14336, 8, 2, 32000),
    "phi-3.5-moe": Shape("llama", 32, 4096, 32, 8, 128, 6400, 16, 2, 32064),
    "qwen3-30b-a3b": Shape("qwen3moe", 48, 2048, 32, 4, 128, 768, 128, 8, 151936, qk_norm="head"),
    "qwen3-next-80b-a3b": Shape("qwen3next", 48, 2048, 16, 2, 256, 512, 512, 10, 151936, "head", hybrid=True),
    "gpt-oss-120b": Shape("gpt-oss", 36, 2880, 64, 8, 64, 2880, 128, 4, 201088, sinks=True),
    "olmoe": Shape("olmoe", 16, 2048, 16, 16, 128, 1024, 64, 8, 50304, qk_norm="all"),
    "tiny": Shape("qwen3moe", 12, 512, 4, 2, 64, 512, 32, 4, 1024, qk_norm="head"),  # to try the bench out
}  # fmt: skip
SHAPES["gpt-oss-20b"] = replace(SHAPES["gpt-oss-120b"], n_layer=24, n_expert=32)


@dataclass(frozen=True)
class RandomTensor:
    """A tensor to write: `ne` in ggml's order, values drawn from N(mean, std^2).

    type: empty if the file's kind says it.
    """

    name: str
    ne: tuple[int, ...]
    std: float
    mean: float = 0.0
    type: str = ""


# --- tensors


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
    if shape.sinks:
        common["attention.sliding_window"] = 128
    if shape.hybrid:
        common |= _DELTA_NET | {"rope.dimension_count": shape.head_dim // 4}
        common["expert_shared_feed_forward_length"] = shape.n_ff
    return {f"{shape.arch}.{name}": value for name, value in common.items()}


def tensors(shape: Shape) -> Iterator[RandomTensor]:
    """All tensors in file order."""
    yield RandomTensor("token_embd.weight", (shape.n_embd, shape.n_vocab), 1.0, _COMMON)
    yield _norm("output_norm", shape.n_embd)
    yield _matrix("output", shape.n_embd, shape.n_vocab)
    for i in range(shape.n_layer):
        mixer = _delta_net if shape.hybrid and (i + 1) % 4 else _attention
        for part in (*mixer(shape, _ATTENTION if i else _FIRST_ATTENTION), *_experts(shape)):
            yield replace(part, name=f"blk.{i}.{part.name}")


def _matrix(name: str, n_in: int, *n_out: int, gain: float = 1.0, mean: float = 0.0) -> RandomTensor:
    return RandomTensor(f"{name}.weight", (n_in, *n_out), gain * n_in**-0.5, mean)


def _norm(name: str, n: int, gain: float = 1.0) -> RandomTensor:
    return RandomTensor(f"{name}.weight", (n,), 0.02, gain, type="f32")


def _biases(s: Shape, **sizes: int | tuple[int, ...]) -> Iterator[RandomTensor]:
    for name, n in sizes.items() if s.sinks else ():
        yield RandomTensor(f"{name}.bias", n if isinstance(n, tuple) else (n,), 0.02, type="f32")


def _common_sum(s: Shape) -> float:
    """The sum of a normalised embedding's common part: what a matrix of ones gives."""
    return s.n_embd * _COMMON * float((1 + _COMMON**2) ** -0.5)


def _attention(s: Shape, gain: float) -> Iterator[RandomTensor]:
    n_q, n_kv = s.n_head * s.head_dim, s.n_head_kv * s.head_dim
    yield _norm("attn_norm", s.n_embd)
    for part, n_out in (("q", n_q * (1 + s.hybrid)), ("k", n_kv)):
        yield _matrix(f"attn_{part}", s.n_embd, n_out, gain=_OWN_QUERY, mean=_COMMON_QUERY / _common_sum(s))
    yield _matrix("attn_v", s.n_embd, n_kv)
    yield _matrix("attn_output", n_q, s.n_embd, gain=gain)
    yield from _biases(s, attn_q=n_q, attn_k=n_kv, attn_v=n_kv, attn_output=s.n_embd)
    if s.qk_norm != "none":
        yield _norm("attn_q_norm", n_q if s.qk_norm == "all" else s.head_dim, _SHARPER)
        yield _norm("attn_k_norm", n_kv if s.qk_norm == "all" else s.head_dim)
    if s.sinks:
        yield RandomTensor("attn_sinks.weight", (s.n_head,), 0.1, type="f32")


def _delta_net(s: Shape, gain: float) -> Iterator[RandomTensor]:
    heads, inner, size = (_DELTA_NET[f"ssm.{key}"] for key in ("time_step_rank", "inner_size", "state_size"))
    n_qkv = 2 * size * _DELTA_NET["ssm.group_count"] + inner
    yield _norm("attn_norm", s.n_embd)
    yield _matrix("attn_qkv", s.n_embd, n_qkv, gain=_OWN_QUERY, mean=_COMMON_QUERY / _common_sum(s))
    yield _matrix("attn_gate", s.n_embd, inner)
    yield RandomTensor("ssm_conv1d.weight", (_DELTA_NET["ssm.conv_kernel"], n_qkv), 0.1, 0.25, type="f32")
    # a state fades by some 3 % a token
    yield RandomTensor("ssm_dt.bias", (heads,), 0.5, -3.0, type="f32")
    yield RandomTensor("ssm_a", (heads,), 0.1, -1.0, type="f32")
    yield _matrix("ssm_ba", s.n_embd, 2 * heads, mean=-1 / _common_sum(s))
    yield _norm("ssm_norm", size)
    yield _matrix("ssm_out", inner, s.n_embd, gain=gain)


def _experts(s: Shape) -> Iterator[RandomTensor]:
    yield _norm("post_attention_norm" if s.sinks or s.hybrid else "ffn_norm", s.n_embd)
    yield replace(_matrix("ffn_gate_inp", s.n_embd, s.n_expert, gain=1.1), type="f32")
    if s.hybrid:
        yield replace(_matrix("ffn_gate_inp_shexp", s.n_embd), type="f32")
    yield from _biases(s, ffn_gate_inp=s.n_expert)
    inner, outer = (s.n_embd, s.n_ff), (s.n_ff, s.n_embd)
    for part, (n_in, n_out), gain in (("gate", inner, 1.0), ("up", inner, 1.0), ("down", outer, _EXPERTS)):
        yield _matrix(f"ffn_{part}_exps", n_in, n_out, s.n_expert, gain=gain)
        if s.hybrid:
            yield _matrix(f"ffn_{part}_shexp", n_in, n_out, gain=gain)
        yield from _biases(s, **{f"ffn_{part}_exps": (n_out, s.n_expert)})


def _tokenizer(n_vocab: int) -> list[gguf.KeyValue]:
    """A vocabulary of all bytes and of pieces that no text contains."""
    tokens = ["<unk>", "<s>", "</s>", *_BYTE_TOKENS]
    types = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * len(_BYTE_TOKENS)]
    n_more = n_vocab - len(tokens)
    types += [TokenType.NORMAL] * n_more
    tokens += [f"\u2581piece{i}\u2581" for i in range(n_more)]
    return [
        gguf.string_entry("tokenizer.ggml.model", "llama"),
        gguf.array_entry("tokenizer.ggml.tokens", GGUFValueType.STRING, tokens),
        gguf.array_entry("tokenizer.ggml.scores", GGUFValueType.FLOAT32, [0.0] * n_vocab),
        gguf.array_entry("tokenizer.ggml.token_type", GGUFValueType.INT32, types),
        gguf.scalar_entry("tokenizer.ggml.bos_token_id", GGUFValueType.UINT32, 1),
        gguf.scalar_entry("tokenizer.ggml.eos_token_id", GGUFValueType.UINT32, 2),
    ]


# --- files


def model_path(folder: Path, name: str, shape: Shape, kind: str, *, holes: bool = False) -> Path:
    """The path of write_model's file, whose name tells what is in it."""
    return folder / f"{name}-{shape.n_layer}x-{kind}{'-holes' * holes}.gguf"


def low_path(model: Path, kind: str) -> Path:
    """The path of write_low_tier's sidecar."""
    return model.with_name(f"{model.stem}.low-{kind}.gguf")


def write_model(folder: Path, name: str, shape: Shape, kind: str, *, holes: bool = False) -> Path:
    """The model with all matrices in type `kind`, taken as it is where it exists. Raises HobbitError.

    kind: in capitals, like Q4_K_M, matrices have the types that stock's llama-quantize chooses for it.
    holes: its weights are zeros that take no place on the disk.
    """
    types = _quantized_types(name, shape, kind) if kind.isupper() else {}
    wanted = [replace(t, type=t.type or types.get(t.name, kind)) for t in tensors(shape)]
    path = model_path(folder, name, shape, kind, holes=holes)
    entries = [
        gguf.string_entry("general.architecture", shape.arch),
        # by the names of some models llama.cpp knows their vocabulary
        gguf.string_entry("general.name", "random weights"),
        *(gguf.scalar_entry(key, _NUMBERS[type(value)], value) for key, value in metadata(shape).items()),
        *_tokenizer(shape.n_vocab),
    ]
    _write(path, entries, wanted, _MODEL_ALIGNMENT, holes)
    return path


def _quantized_types(name: str, shape: Shape, kind: str) -> dict[str, str]:
    with TemporaryDirectory() as folder:
        model = write_model(Path(folder), name, shape, "f16", holes=True)
        command = [str(ROOT / "build/stock/bin/llama-quantize"), "--dry-run", str(model), kind]
        try:
            run = subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as e:
            raise HobbitError(f"make stock builds no llama-quantize that knows {kind}; try Q4_K_M") from e
    return dict(re.findall(r"\] +(\S+) .*\((\w+)\)$", run.stdout + run.stderr, re.M))


def write_low_tier(model: Path, shape: Shape, kind: str, *, holes: bool = False) -> Path:
    """A sidecar with the experts in type `kind`, as random as those of the model. Raises HobbitError."""
    path = low_path(model, kind)
    parts = [(t, part) for t in tensors(shape) if (part := routed_part(t.name))]
    low = [replace(t, name=tier_tensor_name(part, LOW, 0), type=kind) for t, part in parts]
    _write(path, sidecar_metadata(gguf.read_gguf(model)), low, ALIGNMENT, holes)
    return path


def _write(
    path: Path, entries: Sequence[gguf.KeyValue], wanted: Sequence[RandomTensor], alignment: int, holes: bool
) -> None:
    # a file of other weights is not taken for this one
    entries = [*entries, gguf.string_entry("general.version", f"{zlib.crc32(repr(wanted).encode()):08x}")]
    placements, offset = [], 0
    for t in wanted:
        own = type_by_name(t.type)
        if t.ne[0] % own.block:
            raise ConfigError(
                f"{path.name} cannot be made: rows of {t.ne[0]} values are not whole blocks of {own.name} "
                f"({own.block} values); choose another type, like q4_0"
            )
        placements.append((t.name, own, t.ne, offset))
        offset = gguf.align(offset + gguf.tensor_nbytes(own, t.ne), alignment)
    header = gguf.pack_header(entries, placements, alignment)
    size = len(header) + offset
    if path.exists() and path.stat().st_size == size:
        with path.open("rb") as file:
            if file.read(len(header)) == header:
                return
    check_room(path.parent, len(header) if holes else size, "choose another --folder, or fewer --layers")
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_output(path) as temporary, temporary.open("wb") as file:
        file.write(header)
        if holes:
            file.truncate(size)
            return
        for t in tqdm(wanted, path.name, leave=False, disable=None):
            own = type_by_name(t.type)
            n_bytes = gguf.tensor_nbytes(own, t.ne)
            pool = _pool(own, t.std, t.mean)
            rows = np.roll(pool, -(zlib.crc32(t.name.encode()) % _POOL_ROWS), axis=0).ravel()
            for left in range(n_bytes, 0, -rows.size):
                file.write(rows[:left].data)
            file.write(bytes(gguf.align(n_bytes, alignment) - n_bytes))


@cache
def _pool(kind: GgmlType, std: float, mean: float) -> np.ndarray:
    """uint8 blocks of random values by row, reproducible from the arguments alone."""
    rng = np.random.default_rng([_SEED, kind.id, zlib.crc32(f"{std} {mean}".encode())])
    values = mean + std * rng.standard_normal((_POOL_ROWS, _ROW), np.float32)
    importance = np.ones(_ROW, np.float32) if kind.wants_imatrix else None
    rows = quantize(kind, values.astype(np.float32, copy=False), importance)
    return rows.view(np.uint8).reshape(_POOL_ROWS, -1)
