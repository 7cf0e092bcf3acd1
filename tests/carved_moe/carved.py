# SPDX-License-Identifier: MIT
"""SmolLM2-135M in torch, dense and carved into a shared expert and routed ones.

Neurons of a carved layer stand in its order: the shared expert, then expert after expert. Queries and
keys are rotated in pairs of neighbours, as llama.cpp stores them.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from gguf import GGUFReader, dequantize
from torch import Tensor, nn

N_LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, NEURONS = 30, 576, 9, 3, 64, 1536
_BASE, _EPS = 100000.0, 1e-5


@dataclass(frozen=True)
class Shape:
    shared: int = 896
    experts: int = 20
    used: int = 6
    ranks: tuple[int, int, int] = (8, 8, 32)  # differences of gate, up and down

    @property
    def rows(self) -> int:
        return (NEURONS - self.shared) // self.experts


def load(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of the GGUF; norms stay in 32 bits."""
    tensors = {
        t.name: torch.from_numpy(dequantize(t.data, t.tensor_type).copy()) for t in GGUFReader(path).tensors
    }
    return {name: values if values.ndim == 1 else values.to(dtype) for name, values in tensors.items()}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + _EPS) * weight


class Carved(nn.Module):
    """The trained part of a layer: router, scales of experts and norms, differences of gate, up and down."""

    def __init__(self, shape: Shape, order: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("order", order)
        self.register_buffer("spread", torch.ones(()))  # logits per logarithm of an expert's output
        self.router = nn.Parameter(torch.zeros(shape.experts, WIDTH))
        self.scale = nn.Parameter(torch.ones(shape.experts))
        self.attn_norm, self.ffn_norm = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        sizes = {"gate": (WIDTH, NEURONS), "up": (WIDTH, NEURONS), "down": (NEURONS, WIDTH)}
        ranks = dict(zip(sizes, shape.ranks, strict=True))
        self.inner = nn.ParameterDict({k: torch.randn(n, ranks[k]) / n**0.5 for k, (n, _) in sizes.items()})
        self.outer = nn.ParameterDict({k: torch.zeros(ranks[k], n) for k, (_, n) in sizes.items()})

    def changed(self, part: str, x: Tensor, weight: Tensor) -> Tensor:
        dtype = weight.dtype
        return F.linear(x, weight) + x @ self.inner[part].to(dtype) @ self.outer[part].to(dtype)

    def gates(self, logits: Tensor) -> Tensor:
        """Weight of each neuron: 1 in the shared expert, 0 in experts that were not chosen."""
        best, chosen = logits.topk(self.shape.used, -1)
        weights = torch.zeros_like(logits).scatter(-1, chosen, torch.softmax(best, -1) * self.shape.used)
        routed = (weights * self.scale).repeat_interleave(self.shape.rows, -1)
        return F.pad(routed, (self.shape.shared, 0), value=1.0)


class Model:
    """The dense model, or with `carved` the other.

    seen: called with a layer's number, input of its feed-forward part, activations, down, and router logits.
    """

    def __init__(self, weights: dict[str, Tensor], carved: list[Carved] | None = None) -> None:
        self.weights, self.carved, self.seen = dict(weights), carved, None
        for n, layer in enumerate(carved or []):
            for part in ("gate", "up", "down"):
                name = f"blk.{n}.ffn_{part}.weight"
                rows = weights[name].T[layer.order].T if part == "down" else weights[name][layer.order]
                self.weights[name] = rows.contiguous()
        self.dtype = weights["token_embd.weight"].dtype

    def __call__(self, ids: Tensor, streams: list[Tensor] | None = None) -> Tensor:
        """Hidden states before the output matrix, for ids of shape (sequences, tokens).

        streams: gets the residual stream after each layer.
        """
        x = F.embedding(ids, self.weights["token_embd.weight"]).float()
        for n in range(N_LAYERS):
            x = self.attended(n, x)
            x = x + self.fed(n, x)
            if streams is not None:
                streams.append(x)
        return norm(x, self.weights["output_norm.weight"]).to(self.dtype)

    def logits(self, ids: Tensor) -> Tensor:
        return F.linear(self(ids), self.weights["token_embd.weight"]).float()

    def attended(self, n: int, x: Tensor) -> Tensor:
        """The residual stream after the layer's attention."""
        y = self._normed(n, "attn_norm", x).to(self.dtype)
        angle = torch.arange(x.shape[1])[:, None] * _BASE ** (-torch.arange(0, HEAD, 2) / HEAD)
        turn = torch.polar(torch.ones_like(angle), angle)

        def heads(part: str, n_heads: int) -> Tensor:
            z = F.linear(y, self.weights[f"blk.{n}.attn_{part}.weight"])
            return z.view(*y.shape[:2], n_heads, HEAD).transpose(1, 2)

        def turned(z: Tensor) -> Tensor:
            pairs = torch.view_as_complex(z.float().reshape(*z.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * turn).flatten(-2).to(self.dtype)

        k, v = (
            z.repeat_interleave(HEADS // KV_HEADS, 1)
            for z in (turned(heads("k", KV_HEADS)), heads("v", KV_HEADS))
        )
        out = F.scaled_dot_product_attention(turned(heads("q", HEADS)), k, v, is_causal=True)
        return x + F.linear(out.transpose(1, 2).flatten(2), self.weights[f"blk.{n}.attn_output.weight"])

    def fed(self, n: int, x: Tensor) -> Tensor:
        """The output of the layer's feed-forward part."""
        y = self._normed(n, "ffn_norm", x)
        z, own = y.to(self.dtype), self.carved[n] if self.carved else None
        gate, up, down = (self.weights[f"blk.{n}.ffn_{part}.weight"] for part in ("gate", "up", "down"))
        if own is None:
            h = F.silu(F.linear(z, gate)) * F.linear(z, up)
            if self.seen:
                self.seen(n, y, h, down, None)
            return F.linear(h, down)
        logits = F.linear(y, own.router)
        h = F.silu(own.changed("gate", z, gate)) * own.changed("up", z, up)
        if self.seen:
            self.seen(n, y, h, down, logits)
        return own.changed("down", h * own.gates(logits).to(self.dtype), down)

    def _normed(self, n: int, part: str, x: Tensor) -> Tensor:
        weight = self.weights[f"blk.{n}.{part}.weight"]
        return norm(x, weight * getattr(self.carved[n], part) if self.carved else weight)
