# SPDX-License-Identifier: MIT
"""Small models in place of those that llama-cpp-python's own tests download.

Each is of the kind that a test wants (transformer, recurrent, hybrid, embedding), with experts in the cache
wherever llama.cpp knows such an architecture with experts. Attention and experts add a little noise to the
embedding of the last token, and the output matrix maps that to the word that follows in SUCCESSORS: enough to
continue the prompts as the tests expect.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType

N_EMBD = 128
N_FF = 64
N_EXPERT = 8
N_USED = 2
N_LAYER = 2
N_HEAD = 2
N_CTX = 512
EXPERT_BYTES = 3 * N_EMBD * N_FF * 4
POOL_BYTES = 8 * (EXPERT_BYTES + 3 * 4096)  # half of the experts, so that some are evicted

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "The slow brown fox",
    "The capital of france is paris, 'true' or 'false'?:",
    "Pick a number from 1 to 10?:",
    "A different prompt. Hello World",
)
# (word, what follows, how strongly)
SUCCESSORS = (
    (" fox", " jumps", 12.0),
    (" jumps", " over", 12.0),
    (" over", " the", 12.0),
    (" the", " lazy", 12.0),
    (" lazy", " dog", 12.0),
    (" dog", ".", 12.0),
    ("\n", "t", 12.0),
    ("t", "r", 12.0),
    ("r", "u", 12.0),
    ("u", "e", 12.0),
    (" par", "r", 3.0),
    ("r", "o", 6.0),
    ("o", "t", 6.0),
)

_SPACE = "\u2581"


def _vocabulary() -> list[str]:
    """Control and byte tokens, then every beginning of every word: SentencePiece merges letter by letter."""
    words = {word for text in TEXTS for word in re.findall(r" ?\w+| ?[^\w\s]", text)}
    beginnings = {word[:n] for word in words for n in range(1, len(word) + 1)}
    pieces = sorted(beginning.replace(" ", _SPACE) for beginning in beginnings)
    return ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]


class _File:
    """A GGUF file in the making; matrices are noise, of a size that does not drown the embedding."""

    def __init__(self, path: Path, arch: str) -> None:
        self.arch = arch
        self.tokens = _vocabulary()
        self._writer = GGUFWriter(path, arch)
        self._rng = np.random.default_rng(2)  # two numbers that a test draws differ by it
        for key, value in {
            "context_length": N_CTX,
            "embedding_length": N_EMBD,
            "block_count": N_LAYER,
            "feed_forward_length": N_FF,
            "vocab_size": len(self.tokens),
        }.items():
            self.key(key, value)
        self._add_tokenizer()

    def _add_tokenizer(self) -> None:
        writer, n = self._writer, len(self.tokens)
        writer.add_tokenizer_model("llama")
        writer.add_token_list(self.tokens)
        writer.add_token_scores([0.0] * n)
        kinds = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * 256]
        writer.add_token_types([*kinds, *[TokenType.NORMAL] * (n - len(kinds))])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_space_prefix(False)
        writer.add_token_type_count(1)

    def key(self, name: str, value: bool | int | float | list[int]) -> None:
        writer, name = self._writer, f"{self.arch}.{name}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_float32(name, value)

    def matrix(self, name: str, *ne: int, gain: float = 1.0) -> None:
        """ne: in ggml's order."""
        noise = self._rng.standard_normal(tuple(reversed(ne)), np.float32)
        self.tensor(name, noise * np.float32(gain / ne[0] ** 0.5))

    def constant(self, name: str, n: int, value: float) -> None:
        self.tensor(name, np.full(n, value, np.float32))

    def tensor(self, name: str, values: np.ndarray) -> None:
        self._writer.add_tensor(name, values)

    def token(self, text: str) -> int:
        piece = text.replace(" ", _SPACE)
        return self.tokens.index(piece) if piece in self.tokens else 3 + ord(text)

    def language(self) -> None:
        """Embedding and output."""
        n = len(self.tokens)
        embedding = self._rng.standard_normal((n, N_EMBD), np.float32)
        output = 0.05 * self._rng.standard_normal((n, N_EMBD), np.float32)
        for word, following, strength in SUCCESSORS:
            output[self.token(following)] += strength / N_EMBD * embedding[self.token(word)]
        self.tensor("token_embd.weight", embedding)
        self.tensor("output.weight", output)

    def attention(self, i: int) -> None:
        for part in "qkv":
            self.matrix(f"blk.{i}.attn_{part}.weight", N_EMBD, N_EMBD)
        self.matrix(f"blk.{i}.attn_output.weight", N_EMBD, N_EMBD, gain=0.1)

    def experts(self, i: int, *parts: str) -> None:
        self.matrix(f"blk.{i}.ffn_gate_inp.weight", N_EMBD, N_EXPERT, gain=1.5)
        for part in parts:
            self.matrix(f"blk.{i}.ffn_{part}_exps.weight", N_EMBD, N_FF, N_EXPERT)
        self.matrix(f"blk.{i}.ffn_down_exps.weight", N_FF, N_EMBD, N_EXPERT, gain=0.1)

    def close(self) -> None:
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()


def _attention_keys(file: _File) -> None:
    file.key("attention.head_count", N_HEAD)
    file.key("rope.dimension_count", N_EMBD // N_HEAD)
    file.key("rope.freq_base", 10000.0)


def _expert_keys(file: _File) -> None:
    file.key("expert_count", N_EXPERT)
    file.key("expert_used_count", N_USED)


def _transformer(path: Path) -> _File:
    """Mixtral."""
    file = _File(path, "llama")
    _attention_keys(file)
    _expert_keys(file)
    file.key("attention.head_count_kv", N_HEAD)
    file.key("attention.layer_norm_rms_epsilon", 1e-5)
    file.language()
    file.constant("output_norm.weight", N_EMBD, 1)
    for i in range(N_LAYER):
        file.constant(f"blk.{i}.attn_norm.weight", N_EMBD, 1)
        file.attention(i)
        file.constant(f"blk.{i}.ffn_norm.weight", N_EMBD, 1)
        file.experts(i, "gate", "up")
    return file


def _recurrent(path: Path) -> _File:
    """Mamba, which has no experts."""
    file = _File(path, "mamba")
    n_inner, n_state, n_conv, n_rank = 2 * N_EMBD, 8, 4, 8
    for name, value in {
        "ssm.conv_kernel": n_conv,
        "ssm.inner_size": n_inner,
        "ssm.state_size": n_state,
        "ssm.time_step_rank": n_rank,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }.items():
        file.key(name, value)
    file.language()
    file.constant("output_norm.weight", N_EMBD, 1)
    for i in range(N_LAYER):
        file.constant(f"blk.{i}.attn_norm.weight", N_EMBD, 1)
        file.matrix(f"blk.{i}.ssm_in.weight", N_EMBD, 2 * n_inner)
        file.matrix(f"blk.{i}.ssm_conv1d.weight", n_conv, n_inner)
        file.constant(f"blk.{i}.ssm_conv1d.bias", n_inner, 0)
        file.matrix(f"blk.{i}.ssm_x.weight", n_inner, n_rank + 2 * n_state)
        file.matrix(f"blk.{i}.ssm_dt.weight", n_rank, n_inner)
        file.constant(f"blk.{i}.ssm_dt.bias", n_inner, 0)
        file.tensor(f"blk.{i}.ssm_a", -np.ones((n_inner, n_state), np.float32))
        file.constant(f"blk.{i}.ssm_d", n_inner, 1)
        file.matrix(f"blk.{i}.ssm_out.weight", n_inner, N_EMBD, gain=0.1)
    return file


def _hybrid(path: Path) -> _File:
    """LFM2 with experts: a layer of short convolutions, which is recurrent, and one of attention."""
    file = _File(path, "lfm2moe")
    _attention_keys(file)
    _expert_keys(file)
    for name, value in {
        "attention.head_count_kv": [0, N_HEAD],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "shortconv.l_cache": 3,
        "leading_dense_block_count": 0,
        "expert_feed_forward_length": N_FF,
        "expert_gating_func": 2,
    }.items():
        file.key(name, value)
    file.language()
    file.constant("token_embd_norm.weight", N_EMBD, 1)
    for i in range(N_LAYER):
        file.constant(f"blk.{i}.attn_norm.weight", N_EMBD, 1)
        if i == 0:
            file.matrix(f"blk.{i}.shortconv.conv.weight", 3, N_EMBD)
            file.matrix(f"blk.{i}.shortconv.in_proj.weight", N_EMBD, 3 * N_EMBD)
            file.matrix(f"blk.{i}.shortconv.out_proj.weight", N_EMBD, N_EMBD, gain=0.1)
        else:
            file.attention(i)
            for part in "qk":
                file.constant(f"blk.{i}.attn_{part}_norm.weight", N_EMBD // N_HEAD, 1)
        file.constant(f"blk.{i}.ffn_norm.weight", N_EMBD, 1)
        file.experts(i, "gate", "up")
        file.constant(f"blk.{i}.exp_probs_b.bias", N_EXPERT, 0)
    return file


def _embedding(path: Path) -> _File:
    """Nomic's embedding model with experts in every second layer: no causal mask, mean over the tokens."""
    file = _File(path, "nomic-bert-moe")
    _attention_keys(file)
    _expert_keys(file)
    for name, value in {
        "attention.causal": False,
        "attention.layer_norm_epsilon": 1e-5,
        "pooling_type": 1,
        "moe_every_n_layers": 2,
    }.items():
        file.key(name, value)
    file.matrix("token_embd.weight", N_EMBD, len(file.tokens), gain=10)
    for name in (
        "token_embd_norm",
        *(f"blk.{i}.{x}_output_norm" for i in range(N_LAYER) for x in ("attn", "layer")),
    ):
        file.constant(f"{name}.weight", N_EMBD, 1)
        file.constant(f"{name}.bias", N_EMBD, 0)
    for i in range(N_LAYER):
        file.attention(i)
        if i % 2:
            file.experts(i, "up")
        else:
            file.matrix(f"blk.{i}.ffn_up.weight", N_EMBD, N_FF)
            file.matrix(f"blk.{i}.ffn_down.weight", N_FF, N_EMBD)
    return file


KINDS: dict[str, Callable[[Path], _File]] = {
    "transformer": _transformer,
    "recurrent": _recurrent,
    "hybrid": _hybrid,
    "embedding": _embedding,
}


def write(kind: str, path: Path) -> None:
    """Writes the model of a kind of KINDS."""
    KINDS[kind](path).close()
