# SPDX-License-Identifier: MIT
"""Rules for missing experts, on a torch copy of a trained model: divergence against bytes.

Eq. 2 ("gate"), the price rule, and near ties: a missing expert is replaced by a resident one whose router
score is nearly as good. tests/tiny_moe/README.md says how to train a model of 64 experts.

    python bench/many_experts.py build/many-experts/model

Both versions of an expert are made by ggml's quantisers. The text is the tiny model's held-out text: costs
are measured on its first half, everything else on the second. Experts are computed in float32.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sentencepiece as spm
import torch
from cached_rules import ALL_HIGH, LOW, SKIPPED, Costs, Policy, gate, only, price
from torch import Tensor, nn

from pyhobbit.bench.script import option_parser, table_head, table_row
from pyhobbit.model.quantize import dequantize, quantize, type_by_name

TINY = Path(__file__).resolve().parent.parent / "tests/tiny_moe"
sys.path.insert(0, str(TINY))

from model import Mixture, ModelConfig, Routing, SparseMoe, load_hf  # noqa: E402

#
# the model
#


class TwoTierMoe(nn.Module):
    """A layer's experts in both precisions, used as a policy decides."""

    def __init__(self, layer: int, moe: SparseMoe, high: str, low: str) -> None:
        super().__init__()
        self.layer, self.moe, self.n_experts = layer, moe, moe.cfg.experts
        up = torch.stack([torch.cat([e.w1.weight, e.w3.weight]) for e in moe.experts]).detach()
        down = torch.stack([e.w2.weight for e in moe.experts]).detach()
        self.up = torch.cat([rounded(up, high), rounded(up, low)])
        self.down = torch.cat([rounded(down, high), rounded(down, low)])
        self.low_bytes = bytes_per_value(low) / bytes_per_value(high)
        self.policy = Policy(ALL_HIGH)
        self.weights = np.empty(0)

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        flat = x.reshape(-1, x.shape[-1])
        routing = self.moe.route(flat)
        given = (t.numpy() for t in (routing.probs, routing.ids, routing.weights))
        ids, weights, precisions = self.policy.decide(self.layer, *given, self.low_bytes)
        self.weights = weights
        version = torch.from_numpy(ids + self.n_experts * (precisions == LOW))
        scale = torch.from_numpy(weights * (precisions != SKIPPED)).float()
        return Mixture.apply(flat, version, scale, self.up, self.down).view_as(x), routing


def bytes_per_value(name: str) -> float:
    kind = type_by_name(name)
    return kind.size / kind.block


def rounded(weights: Tensor, name: str) -> Tensor:
    """The weights as this type of ggml's holds them."""
    kind, rows = type_by_name(name), weights.reshape(-1, weights.shape[-1]).numpy()
    return torch.from_numpy(dequantize(kind, quantize(kind, rows, None), rows.shape[1])).view_as(weights)


class Copy:
    """A trained model in torch whose experts have two precisions, and chunks of text."""

    def __init__(self, folder: Path, high: str, low: str) -> None:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        self.shape = ModelConfig(
            layers=config["num_hidden_layers"],
            experts=config["num_local_experts"],
            top_k=config["num_experts_per_tok"],
        )
        self.model = load_hf(self.shape, folder)
        self.moes: list[TwoTierMoe] = []
        for i, layer in enumerate(self.model.model.layers):
            self.moes.append(TwoTierMoe(i, layer.block_sparse_moe, high, low))
            layer.block_sparse_moe = self.moes[-1]
        self.low_bytes = self.moes[0].low_bytes
        self.expert_bytes = 3 * self.shape.hidden * self.shape.expert_ffn * bytes_per_value(high)

    @torch.no_grad()
    def logits(self, chunks: Tensor, policy: Policy) -> Tensor:
        """Log probabilities [chunks, scored, vocab]; scored is each chunk's second half."""
        for moe in self.moes:
            moe.policy = policy
        scored = []
        for batch in chunks.split(8):
            scored.append(self.model(batch)[0][:, chunks.shape[1] // 2 : -1].log_softmax(-1))
        return torch.cat(scored)


@dataclass(frozen=True)
class Result:
    """share: bytes loaded by those of every use in high precision.  kl, p99: nats.  top1: same best token."""

    share: float
    kl: float
    p99: float
    top1: float


def measure(copy: Copy, chunks: Tensor, reference: Tensor, policy: Policy) -> Result:
    logits = copy.logits(chunks, policy)
    kl = (reference.exp() * (reference - logits)).sum(-1).flatten()
    same = (reference.argmax(-1) == logits.argmax(-1)).float().mean()
    return Result(policy.loaded / policy.n_uses, kl.mean().item(), kl.quantile(0.99).item(), same.item())


def measure_costs(copy: Copy, chunks: Tensor) -> Costs:
    """Two runs per layer: all of it in low precision; the lower half of the ranks skipped."""
    reference = copy.logits(chunks, Policy(ALL_HIGH))
    found: dict[int, list[float]] = {LOW: [], SKIPPED: []}
    for moe in copy.moes:
        for precision, ranks in ((LOW, slice(None)), (SKIPPED, slice(copy.shape.top_k // 2, None))):
            kl = measure(copy, chunks, reference, Policy(only(moe.layer, ranks, precision))).kl
            found[precision].append(kl / (moe.weights[:, ranks] ** 2).sum(-1).mean())
    return Costs(np.array(found[LOW]), np.array(found[SKIPPED]))


def halves(copy: Copy, folder: Path, n_chunks: int) -> tuple[Tensor, Tensor]:
    """Chunks as llama-perplexity cuts them, of the first and of the second half of the held-out text."""
    tokenizer = spm.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    ids = [1, *tokenizer.encode((TINY / "heldout.txt").read_text("utf-8"))]
    context = copy.shape.context
    chunks = torch.tensor(ids[: len(ids) // context * context]).view(-1, context)
    chunks[:, 0] = 1  # BOS
    middle = len(chunks) // 2
    return chunks[:n_chunks], chunks[middle : middle + n_chunks]


#
# tables
#

T1 = (0.0, 0.2, 0.35, 0.5, 0.65, 0.8)
T2 = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
PRICES = tuple(1e-5 * 2**i for i in range(12))
MARGINS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3)


def frontier(results: list[Result]) -> list[Result]:
    """Those that no other one beats in both divergence and bytes, by rising divergence."""
    kept: list[Result] = []
    for result in sorted(results, key=lambda r: (r.kl, r.share)):
        if not kept or result.share < kept[-1].share:
            kept.append(result)
    return kept


def at(results: list[Result], kl: float) -> str:
    """Bytes, 99th percentile and same top-1 at this divergence, between the frontier's points."""
    best = frontier(results)
    if not best[0].kl <= kl <= best[-1].kl:
        return "-"
    known = [math.log(max(result.kl, 1e-6)) for result in best]
    fields = ([getattr(result, name) for result in best] for name in ("share", "p99", "top1"))
    share, p99, top1 = (np.interp(math.log(kl), known, values) for values in fields)
    return f"{share:.3f} ({p99:.3f}, {top1:.1%})"


def curves(costs: Costs, low_bytes: float, share: float) -> dict[str, list[Policy]]:
    """The settings of each rule, with a cache of this share."""

    def by_price(costs: Costs, prices: Sequence[float] = PRICES, margin: float = 0) -> list[Policy]:
        return [Policy(price(p, costs, low_bytes), share, margin) for p in prices]

    no_low = Costs(np.full_like(costs.low, np.inf), costs.skip)
    found = {
        "gate": [Policy(gate(t1, t2), share) for t1 in T1 for t2 in T2 if t1 <= t2],
        "price": by_price(costs),
        "gate, no low tier": [Policy(gate(t, t), share) for t in (0.3, *T2)],
        "price, no low tier": by_price(no_low),
    }
    if share:
        found["near ties, no low tier"] = [Policy(ALL_HIGH, share, margin) for margin in MARGINS]
        for name, known in (("near ties, price", costs), ("near ties, price, no low tier", no_low)):
            found[name] = [p for margin in MARGINS[:3] for p in by_price(known, PRICES[::2], margin)]
    return found


def compare_rules(copy: Copy, costs: Costs, chunks: Tensor, args: argparse.Namespace) -> None:
    reference = copy.logits(chunks, Policy(ALL_HIGH))
    for share in args.shares:
        whole = measure(copy, chunks, reference, Policy(ALL_HIGH, share)).share
        print(f"\ncache of {share:.0%}: all high loads {whole:.3f} of all uses\n")
        print(table_head(("rule", *(f"KL {kl:g}" for kl in args.kl))))
        for name, policies in curves(costs, copy.low_bytes, share).items():
            results = [measure(copy, chunks, reference, policy) for policy in policies]
            print(table_row((name, *(at(results, kl) for kl in args.kl))), flush=True)


def compare_tokens(copy: Copy, fitted: Tensor, chunks: Tensor, args: argparse.Namespace) -> None:
    """The price rule without a cache, by how many tokens its costs were measured on."""
    reference = copy.logits(chunks, Policy(ALL_HIGH))
    print("\n" + table_head(("tokens", *(f"KL {kl:g}" for kl in args.kl))))
    for n_tokens in args.cost_tokens:
        part = fitted[: -(-n_tokens // copy.shape.context), :n_tokens]
        costs = measure_costs(copy, part)
        results = [measure(copy, chunks, reference, Policy(price(p, costs, copy.low_bytes))) for p in PRICES]
        print(table_row((str(n_tokens), *(at(results, kl) for kl in args.kl))), flush=True)


def add_copy_options(parser: argparse.ArgumentParser) -> None:
    """What a Copy is made of."""
    parser.add_argument("model", type=Path, help="folder that train.py --export wrote")
    parser.add_argument("--high", default="q8_0")
    parser.add_argument("--low", default="q2_k")


def main() -> None:
    parser = option_parser(__doc__)
    add_copy_options(parser)
    parser.add_argument("--chunks", type=int, default=6, help="of 512 tokens, for costs and to measure")
    parser.add_argument("--shares", type=float, nargs="+", default=[0, 0.2, 0.3, 0.4], help="0: no cache")
    parser.add_argument("--kl", type=float, nargs="+", default=[0.001, 0.003, 0.01], metavar="NATS")
    parser.add_argument("--cost-tokens", type=int, nargs="*", default=[64, 256, 512, 3072], metavar="N")
    args = parser.parse_args()
    torch.set_num_threads(1)
    copy = Copy(args.model, args.high, args.low)
    fitted, chunks = halves(copy, args.model, args.chunks)
    costs = measure_costs(copy, fitted)
    text = copy.logits(chunks, Policy(ALL_HIGH)).gather(-1, chunks[:, chunks.shape[1] // 2 + 1 :, None])
    print(f"{args.high} + {args.low}, perplexity {math.exp(-text.mean()):.3f}")
    print(f"costs of low: {costs.low.round(5)}, of skipping: {costs.skip.round(5)}")
    compare_rules(copy, costs, chunks, args)
    compare_tokens(copy, fitted, chunks, args)


if __name__ == "__main__":
    main()
