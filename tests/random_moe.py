# SPDX-License-Identifier: MIT
"""Random-weight MoE models of real llama.cpp architectures, as GGUF files, for tests and measurements.

The weights are noise, scaled so that activations keep their size from layer to layer and routers choose
varied experts with unsaturated weights.

    python tests/random_moe.py --arch qwen3moe --experts-type q4_0 --layers 24 \\
        --lib-dir build/stock/bin -o model.gguf
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from gguf import GGMLQuantizationType
from random_weights import Model, Shape, Tensor, write_model

GATING_SIGMOID = 2  # llama.cpp's LLAMA_EXPERT_GATING_FUNC_TYPE_SIGMOID


def _frame(m: Model, *, head_dim: int | None = None) -> None:
    """Keys and tensors that all architectures share."""
    s = m.shape
    head_dim = head_dim or s.n_embd // s.n_head
    for name, value in {
        "vocab_size": s.n_vocab, "context_length": s.n_ctx, "embedding_length": s.n_embd,
        "block_count": s.n_layer, "feed_forward_length": s.n_ff,
        "expert_count": s.n_expert, "expert_used_count": s.n_used,
        "attention.head_count": s.n_head, "attention.head_count_kv": s.n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": head_dim, "rope.freq_base": 10000.0,
    }.items():  # fmt: skip
        m.key(name, value)
    m.tensors.append(Tensor("token_embd.weight", (s.n_embd, s.n_vocab), m.dense_type, 1.0))
    m.norm("output_norm.weight", s.n_embd)
    m.matrix("output.weight", s.n_embd, s.n_vocab, gain=3.0)


def _attention(m: Model, i: int, *, bias: bool = False) -> None:
    s = m.shape
    n_kv = s.n_embd // s.n_head * s.n_head_kv
    m.norm(f"blk.{i}.attn_norm.weight", s.n_embd)
    for part, n_out in {"q": s.n_embd, "k": n_kv, "v": n_kv}.items():
        m.matrix(f"blk.{i}.attn_{part}.weight", s.n_embd, n_out, gain=1.5)
        if bias:
            m.vector(f"blk.{i}.attn_{part}.bias", n_out)
    m.matrix(f"blk.{i}.attn_output.weight", s.n_embd, s.n_embd)


def _moe(m: Model, i: int, *, fused: bool = False) -> None:
    s = m.shape
    m.router(i)
    if fused:
        m.experts(i, "gate_up", s.n_embd, 2 * s.n_ff)
    else:
        m.experts(i, "gate", s.n_embd, s.n_ff)
        m.experts(i, "up", s.n_embd, s.n_ff)
    m.experts(i, "down", s.n_ff, s.n_embd)


def _dense_ffn(m: Model, i: int, n_ff: int, suffix: str = "") -> None:
    n_embd = m.shape.n_embd
    for part, n_in, n_out in (("gate", n_embd, n_ff), ("up", n_embd, n_ff), ("down", n_ff, n_embd)):
        m.matrix(f"blk.{i}.ffn_{part}{suffix}.weight", n_in, n_out)


def _llama(m: Model) -> None:
    _frame(m)
    for i in range(m.shape.n_layer):
        _attention(m, i)
        m.norm(f"blk.{i}.ffn_norm.weight", m.shape.n_embd)
        _moe(m, i)


def _llama_scaled(m: Model) -> None:
    """Mixtral with a scale per expert and part."""
    _llama(m)
    for i in range(m.shape.n_layer):
        for part in ("gate", "up", "down"):
            m.vector(f"blk.{i}.ffn_{part}_exps.scale", m.shape.n_expert, mean=1.0, std=0.25)


def _qwen3moe(m: Model) -> None:
    _frame(m)
    m.key("expert_feed_forward_length", m.shape.n_ff)
    for i in range(m.shape.n_layer):
        _attention(m, i)
        for part in ("q", "k"):
            m.norm(f"blk.{i}.attn_{part}_norm.weight", m.shape.n_embd // m.shape.n_head)
        m.norm(f"blk.{i}.ffn_norm.weight", m.shape.n_embd)
        _moe(m, i)


def _qwen2moe(m: Model) -> None:
    _frame(m)
    s = m.shape
    m.key("expert_feed_forward_length", s.n_ff)
    m.key("expert_shared_feed_forward_length", s.n_ff_dense)
    for i in range(s.n_layer):
        _attention(m, i, bias=True)
        m.norm(f"blk.{i}.ffn_norm.weight", s.n_embd)
        _moe(m, i)
        m.vector(f"blk.{i}.ffn_gate_inp_shexp.weight", s.n_embd, std=s.n_embd**-0.5)
        _dense_ffn(m, i, s.n_ff_dense, "_shexp")


def _olmoe(m: Model) -> None:
    m.shape = replace(m.shape, n_head_kv=m.shape.n_head)  # its key norm spans all heads
    _frame(m)
    for i in range(m.shape.n_layer):
        _attention(m, i)
        for part in ("q", "k"):
            m.norm(f"blk.{i}.attn_{part}_norm.weight", m.shape.n_embd)
        m.norm(f"blk.{i}.ffn_norm.weight", m.shape.n_embd)
        _moe(m, i)


def _phimoe(m: Model) -> None:
    _frame(m)
    s = m.shape
    m.key("rope.scaling.original_context_length", s.n_ctx)
    m.vector("output_norm.bias", s.n_embd)
    m.vector("output.bias", s.n_vocab)
    for i in range(s.n_layer):
        _attention(m, i, bias=True)
        m.vector(f"blk.{i}.attn_norm.bias", s.n_embd)
        m.vector(f"blk.{i}.attn_output.bias", s.n_embd)
        m.norm(f"blk.{i}.ffn_norm.weight", s.n_embd)
        m.vector(f"blk.{i}.ffn_norm.bias", s.n_embd)
        _moe(m, i)


def _granitemoe(m: Model) -> None:
    _frame(m)
    s = m.shape
    m.key("logit_scale", 2.0)
    m.key("residual_scale", 0.8)
    m.key("embedding_scale", 1.5)
    m.key("expert_shared_feed_forward_length", s.n_ff_dense)
    for i in range(s.n_layer):
        _attention(m, i)
        m.norm(f"blk.{i}.ffn_norm.weight", s.n_embd)
        _moe(m, i)
        _dense_ffn(m, i, s.n_ff_dense, "_shexp")


def _mla_attention(m: Model, i: int, *, q_lora: int, kv_lora: int, nope: int, rope: int, v: int) -> None:
    s = m.shape
    m.norm(f"blk.{i}.attn_norm.weight", s.n_embd)
    m.norm(f"blk.{i}.attn_q_a_norm.weight", q_lora)
    m.norm(f"blk.{i}.attn_kv_a_norm.weight", kv_lora)
    m.matrix(f"blk.{i}.attn_q_a.weight", s.n_embd, q_lora)
    m.matrix(f"blk.{i}.attn_q_b.weight", q_lora, s.n_head * (nope + rope), gain=1.5)
    m.matrix(f"blk.{i}.attn_kv_a_mqa.weight", s.n_embd, kv_lora + rope)
    m.matrix(f"blk.{i}.attn_k_b.weight", nope, kv_lora, s.n_head)
    m.matrix(f"blk.{i}.attn_v_b.weight", kv_lora, v, s.n_head)
    m.matrix(f"blk.{i}.attn_output.weight", s.n_head * v, s.n_embd)


def _deepseek2(m: Model, *, fused: bool = False) -> None:
    """DeepSeek V3: MLA, a leading dense layer, a shared expert, expert groups, biased sigmoid gates."""
    mla = {"q_lora": 128, "kv_lora": 128, "nope": 64, "rope": 32, "v": 64}
    m.shape = replace(m.shape, n_head_kv=1)
    _frame(m, head_dim=mla["rope"])
    s = m.shape
    for name, value in {
        "feed_forward_length": s.n_ff_dense, "expert_feed_forward_length": s.n_ff,
        "leading_dense_block_count": 1,
        "attention.q_lora_rank": mla["q_lora"], "attention.kv_lora_rank": mla["kv_lora"],
        "attention.key_length": mla["kv_lora"] + mla["rope"], "attention.value_length": mla["kv_lora"],
        "attention.key_length_mla": mla["nope"] + mla["rope"], "attention.value_length_mla": mla["v"],
        "expert_shared_count": 1, "expert_group_count": 4, "expert_group_used_count": 2,
        "expert_gating_func": GATING_SIGMOID, "expert_weights_norm": True, "expert_weights_scale": 2.5,
    }.items():  # fmt: skip
        m.key(name, value)
    for i in range(s.n_layer):
        _mla_attention(m, i, **mla)
        m.norm(f"blk.{i}.ffn_norm.weight", s.n_embd)
        if i == 0:
            _dense_ffn(m, i, s.n_ff_dense)
            continue
        _moe(m, i, fused=fused)
        m.vector(f"blk.{i}.exp_probs_b.bias", s.n_expert, std=0.05)
        _dense_ffn(m, i, s.n_ff, "_shexp")


def _glm4moe(m: Model) -> None:
    _frame(m, head_dim=m.shape.n_embd // m.shape.n_head // 2)
    s = m.shape
    for name, value in {
        "feed_forward_length": s.n_ff_dense, "expert_feed_forward_length": s.n_ff,
        "leading_dense_block_count": 1,
        "expert_shared_count": 1, "expert_gating_func": GATING_SIGMOID, "expert_weights_norm": True,
        "expert_weights_scale": 1.0, "attention.key_length": s.n_embd // s.n_head,
        "attention.value_length": s.n_embd // s.n_head,
    }.items():  # fmt: skip
        m.key(name, value)
    for i in range(s.n_layer):
        _attention(m, i, bias=True)
        m.norm(f"blk.{i}.post_attention_norm.weight", s.n_embd)
        if i == 0:
            _dense_ffn(m, i, s.n_ff_dense)
            continue
        _moe(m, i)
        m.vector(f"blk.{i}.exp_probs_b.bias", s.n_expert, std=0.05)
        _dense_ffn(m, i, s.n_ff, "_shexp")


def _gpt_oss(m: Model) -> None:
    _frame(m)
    s = m.shape
    m.key("expert_feed_forward_length", s.n_ff)
    m.key("attention.sliding_window", 128)
    for i in range(s.n_layer):
        _attention(m, i, bias=True)
        m.vector(f"blk.{i}.attn_output.bias", s.n_embd)
        m.vector(f"blk.{i}.attn_sinks.weight", s.n_head)
        m.norm(f"blk.{i}.post_attention_norm.weight", s.n_embd)
        _moe(m, i)
        m.vector(f"blk.{i}.ffn_gate_inp.bias", s.n_expert)
        for part, n_out in {"gate": s.n_ff, "up": s.n_ff, "down": s.n_embd}.items():
            name = f"blk.{i}.ffn_{part}_exps.bias"
            m.tensors.append(Tensor(name, (n_out, s.n_expert), GGMLQuantizationType.F32, 0.1))


def _llama4(m: Model) -> None:
    """One expert per token, weighted before the matmuls; every second layer dense."""
    _frame(m)
    s = m.shape
    m.key("feed_forward_length", s.n_ff_dense)
    m.key("expert_feed_forward_length", s.n_ff)
    m.key("interleave_moe_layer_step", 2)
    for i in range(s.n_layer):
        _attention(m, i)
        m.norm(f"blk.{i}.ffn_norm.weight", s.n_embd)
        if i % 2 == 0:
            _dense_ffn(m, i, s.n_ff_dense)
            continue
        _moe(m, i)
        _dense_ffn(m, i, s.n_ff, "_shexp")


@dataclass(frozen=True)
class Arch:
    """A name for tests: llama.cpp's architecture, what it declares, and its default shape."""

    gguf_arch: str
    declare: Callable[[Model], None]
    shape: Shape = field(default_factory=Shape)


ARCHS: dict[str, Arch] = {
    "llama": Arch("llama", _llama),
    "llama-scaled": Arch("llama", _llama_scaled),
    "qwen3moe": Arch("qwen3moe", _qwen3moe, Shape(n_expert=16, n_used=4)),
    "qwen3moe-vocabulary": Arch("qwen3moe", _qwen3moe, Shape(n_vocab=33000)),  # its embedding stays on disk
    "qwen2moe": Arch("qwen2moe", _qwen2moe, Shape(n_used=4)),
    "olmoe": Arch("olmoe", _olmoe, Shape(n_expert=16, n_used=4)),
    "phimoe": Arch("phimoe", _phimoe),
    "granitemoe": Arch("granitemoe", _granitemoe),
    "deepseek2": Arch("deepseek2", _deepseek2, Shape(n_expert=16, n_used=4)),
    "deepseek2-fused": Arch("deepseek2", lambda m: _deepseek2(m, fused=True), Shape(n_expert=16, n_used=4)),
    "glm4moe": Arch("glm4moe", _glm4moe),
    "gpt-oss": Arch("gpt-oss", _gpt_oss, Shape(n_layer=4, n_used=4)),
    "llama4": Arch("llama4", _llama4, Shape(n_layer=4, n_used=1)),
}


def _type(name: str) -> GGMLQuantizationType:
    try:
        return GGMLQuantizationType[name.upper()]
    except KeyError:
        raise ValueError(f"{name!r} is no type of ggml") from None


def declare(arch: str, shape: Shape | None = None, experts: str = "f16", dense: str = "f16") -> Model:
    """The keys and tensors of `arch`; `experts` is one ggml type name or several, separated by commas."""
    kinds = [_type(name) for name in experts.split(",")]
    entry = ARCHS[arch]
    model = Model(entry.gguf_arch, shape or entry.shape, kinds, _type(dense))
    entry.declare(model)
    return model


def hybrid() -> Model:
    """One layer with a recurrent state, the others with attention: LFM2's experts, short convolutions."""
    m = Model("lfm2moe", Shape(), [_type("q8_0")], _type("f16"))
    _frame(m)
    s = m.shape
    m.tensors = [t for t in m.tensors if t.name != "output_norm.weight"]
    m.norm("token_embd_norm.weight", s.n_embd)
    for name, value in {
        "attention.head_count_kv": [0, *[s.n_head_kv] * (s.n_layer - 1)], "shortconv.l_cache": 3,
        "expert_feed_forward_length": s.n_ff, "expert_gating_func": GATING_SIGMOID,
    }.items():  # fmt: skip
        m.key(name, value)
    for i in range(s.n_layer):
        if i == 0:
            m.norm(f"blk.{i}.attn_norm.weight", s.n_embd)
            m.tensors.append(Tensor(f"blk.{i}.shortconv.conv.weight", (3, s.n_embd), _type("f32"), 0.5))
            m.matrix(f"blk.{i}.shortconv.in_proj.weight", s.n_embd, 3 * s.n_embd)
            m.matrix(f"blk.{i}.shortconv.out_proj.weight", s.n_embd, s.n_embd)
        else:
            _attention(m, i)
            for part in ("q", "k"):
                m.norm(f"blk.{i}.attn_{part}_norm.weight", s.n_embd // s.n_head)
        m.norm(f"blk.{i}.ffn_norm.weight", s.n_embd)
        _moe(m, i)
        m.vector(f"blk.{i}.exp_probs_b.bias", s.n_expert, std=0.05)
    return m


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Write a random-weight MoE model as a GGUF file.")
    parser.add_argument("--arch", choices=sorted(ARCHS), required=True)
    parser.add_argument(
        "--experts-type", default="f16", help="ggml types of the experts, taken in turn: q4_0,q8_0"
    )
    parser.add_argument("--dense-type", default="f16", help="ggml type of all other matrices")
    for option, name in {
        "layers": "n_layer", "embd": "n_embd", "heads": "n_head", "heads-kv": "n_head_kv", "ff": "n_ff",
        "ff-dense": "n_ff_dense", "experts": "n_expert", "used": "n_used", "vocab": "n_vocab", "ctx": "n_ctx",
    }.items():  # fmt: skip
        parser.add_argument(f"--{option}", dest=name, type=int, help="default: small, by architecture")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lib-dir", type=Path, required=True, help="folder with libggml-base.so")
    parser.add_argument("-o", "--output", type=Path, required=True)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    base = ARCHS[args.arch].shape
    given = {k: v for k, v in vars(args).items() if hasattr(base, k) and v is not None}
    try:
        model = declare(args.arch, replace(base, **given), args.experts_type, args.dense_type)
        write_model(model, args.output, args.lib_dir, args.seed, progress=True)
    except (ValueError, OSError) as error:
        print(f"random_moe: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
