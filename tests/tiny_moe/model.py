# SPDX-License-Identifier: MIT
"""A Mixtral-architecture language model whose state dict carries Hugging Face's tensor names."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus import BOS_ID, EOS_ID, VOCAB_SIZE


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model; the defaults are the committed one."""

    vocab: int = VOCAB_SIZE
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    expert_ffn: int = 256
    experts: int = 8
    top_k: int = 2
    context: int = 512
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


class Mixture(torch.autograd.Function):
    """Weighted sum of SwiGLU experts, one matrix product per expert and matrix.

    Rows [tokens * top_k] lie ordered by expert, each expert's padded to a multiple of ROWS: a product of a
    new shape costs oneDNN more than the product itself. Padding is zero in both directions.
    """

    ROWS = 64

    @staticmethod
    def forward(ctx, x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """x [tokens, hidden]; ids, weights [tokens, top_k]; up [experts, 2 ffn, hidden]: w1, w3; down: w2."""
        tokens, top_k = ids.shape
        chosen = ids.flatten()
        counts = torch.bincount(chosen, minlength=len(up))
        padded = (counts + Mixture.ROWS - 1) // Mixture.ROWS * Mixture.ROWS
        order = chosen.argsort(stable=True)
        place = torch.empty_like(order)
        shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
        place[order] = torch.arange(len(order)) + shift[chosen[order]]
        source = torch.full((int(padded.sum()),), tokens)
        source[place] = torch.arange(tokens).repeat_interleave(top_k)
        sizes = padded.tolist()
        rows = torch.cat([x, x.new_zeros(1, x.shape[1])]).index_select(0, source)
        both = _products(rows, sizes, up.transpose(1, 2))
        gate, linear = both.chunk(2, -1)
        out = _products(F.silu(gate).mul_(linear), sizes, down.transpose(1, 2))
        out = out.index_select(0, place).view(tokens, top_k, -1)
        ctx.sizes = sizes
        ctx.save_for_backward(rows, both, out, source, place, weights, up, down)
        return torch.bmm(weights.to(x.dtype)[:, None], out)[:, 0]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, Tensor, Tensor, Tensor]:
        rows, both, out, source, place, weights, up, down = ctx.saved_tensors
        grad = grad.to(rows.dtype)
        weights_grad = torch.bmm(out, grad[..., None])[..., 0].to(weights.dtype)
        scale = rows.new_zeros(len(source))
        scale[place] = weights.flatten().to(rows.dtype)
        padded = torch.cat([grad, grad.new_zeros(1, grad.shape[1])])
        grad = padded.index_select(0, source).mul_(scale[:, None])
        gate, linear = both.chunk(2, -1)
        active = F.silu(gate)
        down_grad = _outer_products(grad, active * linear, ctx.sizes)
        inner = _products(grad, ctx.sizes, down)
        both_grad = torch.cat([torch.ops.aten.silu_backward(inner * linear, gate), inner.mul_(active)], -1)
        up_grad = _outer_products(both_grad, rows, ctx.sizes)
        rows_grad = _products(both_grad, ctx.sizes, up).index_select(0, place)
        return rows_grad.view(*weights.shape, -1).sum(1), None, weights_grad, up_grad, down_grad


def _products(rows: Tensor, sizes: list[int], matrices: Tensor) -> Tensor:
    """Each expert's rows times its matrix."""
    out = rows.new_empty(len(rows), matrices.shape[2])
    for part, result, matrix in zip(rows.split(sizes), out.split(sizes), matrices, strict=True):
        torch.mm(part, matrix, out=result)
    return out


def _outer_products(left: Tensor, right: Tensor, sizes: list[int]) -> Tensor:
    """Each expert's left^T right: the gradients of its matrix."""
    out = left.new_empty(len(sizes), left.shape[1], right.shape[1])
    for a, b, result in zip(left.split(sizes), right.split(sizes), out, strict=True):
        torch.mm(a.T, b, out=result)
    return out


class Attention(nn.Module):
    """Grouped-query causal self-attention with rotary positions (half-split layout)."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.q_proj = nn.Linear(cfg.hidden, cfg.heads * cfg.head_dim, bias=False)
        self.k_proj = nn.Linear(cfg.hidden, cfg.kv_heads * cfg.head_dim, bias=False)
        self.v_proj = nn.Linear(cfg.hidden, cfg.kv_heads * cfg.head_dim, bias=False)
        self.o_proj = nn.Linear(cfg.heads * cfg.head_dim, cfg.hidden, bias=False)
        frequency = cfg.rope_theta ** (-torch.arange(0, cfg.head_dim, 2) / cfg.head_dim)
        angle = torch.outer(torch.arange(cfg.context), frequency)
        self.register_buffer("cos", torch.cat([angle.cos()] * 2, -1), persistent=False)
        self.register_buffer("sin", torch.cat([angle.sin()] * 2, -1), persistent=False)

    def _rotate(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        first, second = x.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        return (x * self.cos[:length] + turned * self.sin[:length]).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        cfg = self.cfg

        def split(y: Tensor, heads: int) -> Tensor:
            return y.view(batch, length, heads, cfg.head_dim).transpose(1, 2)

        q = self._rotate(split(self.q_proj(x), cfg.heads))
        k = self._rotate(split(self.k_proj(x), cfg.kv_heads))
        v = split(self.v_proj(x), cfg.kv_heads)
        group = cfg.heads // cfg.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class Expert(nn.Module):
    """One SwiGLU feed-forward network: w2(silu(w1 x) * w3 x)."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(cfg.hidden, cfg.expert_ffn, bias=False)
        self.w2 = nn.Linear(cfg.expert_ffn, cfg.hidden, bias=False)
        self.w3 = nn.Linear(cfg.hidden, cfg.expert_ffn, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


@dataclass(frozen=True)
class Routing:
    """One layer's router decisions: probs [tokens, experts], expert ids and gate weights [tokens, top_k]."""

    probs: Tensor
    ids: Tensor
    weights: Tensor

    def balance_loss(self) -> Tensor:
        """Switch Transformer's balancing loss (arXiv 2101.03961, eq. 4) over all top-k choices; 1 if even."""
        experts = self.probs.shape[1]
        share = torch.bincount(self.ids.flatten(), minlength=experts) / self.ids.numel()
        return experts * (share * self.probs.mean(0)).sum()


class SparseMoe(nn.Module):
    """Top-k mixture of experts; gate weights are renormalised over the chosen experts."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.gate = nn.Linear(cfg.hidden, cfg.experts, bias=False)
        self.experts = nn.ModuleList(Expert(cfg) for _ in range(cfg.experts))

    def route(self, x: Tensor) -> Routing:
        with torch.autocast("cpu", enabled=False):
            probs = self.gate(x.float()).softmax(-1)
        weights, ids = probs.topk(self.cfg.top_k, -1)
        return Routing(probs, ids, weights / weights.sum(-1, keepdim=True))

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        flat = x.reshape(-1, x.shape[-1])
        routing = self.route(flat)
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        up = torch.stack([w.to(dtype) for e in self.experts for w in (e.w1.weight, e.w3.weight)])
        down = torch.stack([e.w2.weight.to(dtype) for e in self.experts])
        up = up.view(self.cfg.experts, -1, self.cfg.hidden)
        mixed = Mixture.apply(flat.to(dtype), routing.ids, routing.weights, up, down)
        return mixed.view_as(x), routing


class Layer(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(cfg.hidden, cfg.norm_eps)
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = nn.RMSNorm(cfg.hidden, cfg.norm_eps)
        self.block_sparse_moe = SparseMoe(cfg)

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        x = x + self.self_attn(self.input_layernorm(x))
        y, routing = self.block_sparse_moe(self.post_attention_layernorm(x))
        return x + y, routing


class Trunk(nn.Module):
    """Embeddings, layers and final norm: what Hugging Face calls `model`."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocab, cfg.hidden)
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg.layers))
        self.norm = nn.RMSNorm(cfg.hidden, cfg.norm_eps)


class TinyMixtral(nn.Module):
    """The whole model: ids [batch, length] -> logits [batch, length, vocab] and one Routing per layer."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.model = Trunk(cfg)
        self.lm_head = nn.Linear(cfg.hidden, cfg.vocab, bias=False)
        self.apply(self._init)
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "w2.weight")):  # they write into the residual stream
                nn.init.normal_(weight, std=0.02 * (2 * cfg.layers) ** -0.5)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor) -> tuple[Tensor, list[Routing]]:
        x = self.model.embed_tokens(ids)
        routings = []
        for layer in self.model.layers:
            x, routing = layer(x)
            routings.append(routing)
        return self.lm_head(self.model.norm(x)), routings


def hf_config(cfg: ModelConfig) -> dict[str, object]:
    """config.json of the exported model."""
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": cfg.vocab,
        "hidden_size": cfg.hidden,
        "intermediate_size": cfg.expert_ffn,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "num_local_experts": cfg.experts,
        "num_experts_per_tok": cfg.top_k,
        "max_position_embeddings": cfg.context,
        "rope_theta": cfg.rope_theta,
        "rms_norm_eps": cfg.norm_eps,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": "float16",
    }


def export_hf(model: TinyMixtral, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (float16); each file appears whole."""
    tensors = {name: value.half().contiguous() for name, value in model.state_dict().items()}
    broken = [name for name, value in tensors.items() if not value.isfinite().all()]
    if broken:
        raise ValueError(f"weights overflow float16: {', '.join(broken)}")
    weights = folder / "model.safetensors.tmp"
    safetensors.torch.save_file(tensors, weights, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(model.cfg), indent=2) + "\n")
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    weights.chmod(0o644)  # safetensors creates files that only the owner can read
    weights.rename(folder / "model.safetensors")


def load_hf(cfg: ModelConfig, folder: Path) -> TinyMixtral:
    """The exported model, its float16 weights widened to float32."""
    model = TinyMixtral(cfg)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    model.load_state_dict({name: value.float() for name, value in weights.items()})
    return model.eval()
