# SPDX-License-Identifier: MIT
"""Measurements of the exported model: perplexity, routing, completions."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import sentencepiece as spm
import torch
import torch.nn.functional as F
from torch import Tensor

import corpus
from model import ModelConfig, Routing, TinyMixtral, load_hf

PROMPTS = (
    'def is_prime(n):\n    """Return True if n is a prime number."""\n',
    "class Stack:\n    def __init__(self):\n",
    "import os\nimport sys\n\ndef main():\n",
    "for i in range(",
)
COMPLETION_TOKENS = 64
TRAIN_SAMPLE_WINDOWS = 120


def windows(ids: list[int], context: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Non-overlapping windows as inputs and targets [1, <= context]; inputs start with BOS."""
    for start in range(0, len(ids), context):
        targets = torch.tensor([ids[start : start + context]])
        yield torch.cat([torch.tensor([[corpus.BOS_ID]]), targets[:, :-1]], 1), targets


@torch.no_grad()
def perplexity(model: TinyMixtral, ids: list[int]) -> float:
    """Perplexity per token; every token is scored once, with the window before it as context."""
    nats = 0.0
    for inputs, targets in windows(ids, model.cfg.context):
        logits, _ = model(inputs)
        nats += F.cross_entropy(logits[0], targets[0], reduction="sum").item()
    return math.exp(nats / len(ids))


@torch.no_grad()
def llama_cpp_perplexity(model: TinyMixtral, ids: list[int]) -> float:
    """llama-perplexity's figure: whole windows, BOS over the first token, the second half scored."""
    context = model.cfg.context
    ids = [corpus.BOS_ID, *ids]
    nats, count = 0.0, 0
    for start in range(0, len(ids) - context + 1, context):
        window = torch.tensor([ids[start : start + context]])
        window[0, 0] = corpus.BOS_ID
        logits, _ = model(window)
        nats += F.cross_entropy(
            logits[0, context // 2 : -1], window[0, context // 2 + 1 :], reduction="sum"
        ).item()
        count += context // 2 - 1
    return math.exp(nats / count)


@torch.no_grad()
def routing_statistics(model: TinyMixtral, ids: list[int]) -> list[dict[str, object]]:
    """Each expert's share of first and of all choices, and the first choice's mean weight, by layer."""
    by_layer: list[list[Routing]] = [[] for _ in range(model.cfg.layers)]
    for inputs, _ in windows(ids, model.cfg.context):
        for seen, routing in zip(by_layer, model(inputs)[1], strict=True):
            seen.append(routing)
    result = []
    for layer, seen in enumerate(by_layer):
        chosen = torch.cat([routing.ids for routing in seen])
        weights = torch.cat([routing.weights for routing in seen])
        result.append(
            {
                "layer": layer,
                "top_1_share": _shares(chosen[:, 0], model.cfg.experts),
                f"top_{model.cfg.top_k}_share": _shares(chosen.flatten(), model.cfg.experts),
                "mean_first_gate_weight": round(weights[:, 0].mean().item(), 4),
                "share_first_gate_weight_above_0.6": round((weights[:, 0] > 0.6).float().mean().item(), 4),
            }
        )
    return result


def _shares(chosen: Tensor, experts: int) -> list[float]:
    share = torch.bincount(chosen, minlength=experts) / chosen.numel()
    return [round(value, 4) for value in share.tolist()]


@torch.no_grad()
def complete(model: TinyMixtral, tokenizer: spm.SentencePieceProcessor, prompt: str) -> str:
    """Greedy continuation of the prompt, without the prompt."""
    ids = [corpus.BOS_ID, *tokenizer.encode(prompt)]
    length = len(ids)
    while len(ids) < length + COMPLETION_TOKENS and ids[-1] != corpus.EOS_ID:
        logits, _ = model(torch.tensor([ids]))
        ids.append(int(logits[0, -1].argmax()))
    return tokenizer.decode(ids[length:])


def machine() -> dict[str, object]:
    """Processor model where the system tells it, and the versions that decide the arithmetic."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sentencepiece": spm.__version__,
    }


def text_scores(model: TinyMixtral, ids: list[int], n_bytes: int) -> dict[str, float | int]:
    per_token = perplexity(model, ids)
    return {
        "tokens": len(ids),
        "bytes": n_bytes,
        "perplexity_per_token": round(per_token, 4),
        "bits_per_byte": round(math.log2(per_token) * len(ids) / n_bytes, 4),
    }


def build_report(state: dict, folder: Path) -> dict[str, object]:
    """All figures of report.json: from the checkpoint's state and the exported folder."""
    tokenizer = spm.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    modules, held_out = corpus.read_modules()
    further, of_packages = corpus.read_packages() if state["train_config"].get("packages") else ({}, {})
    modules |= further
    other_text = "".join(of_packages.values())
    other_ids = tokenizer.encode(other_text)
    held_out_text = "".join(held_out.values())
    held_out_ids = tokenizer.encode(held_out_text)
    stream = corpus.encode_modules(modules, tokenizer).tolist()

    shape = ModelConfig(**state["model_config"])
    exported = load_hf(shape, folder)
    unrounded = TinyMixtral(shape)
    unrounded.load_state_dict(state["model"])
    context = exported.cfg.context
    spacing = len(stream) // TRAIN_SAMPLE_WINDOWS
    sample = [
        token
        for start in range(0, len(stream) - context, spacing)
        for token in stream[start : start + context]
    ]
    return {
        "model": {**asdict(exported.cfg), "parameters": sum(p.numel() for p in exported.parameters())},
        "corpus": {
            "modules": len(modules),
            "tokens": len(stream),
            "sha256": corpus.digest(modules),
            "held_out_modules": list(held_out),
        },
        "training": {
            **state["train_config"],
            **state["progress"],
            "epochs": state["progress"]["tokens"] / len(stream),
        },
        "machine": machine(),
        "train_sample": text_scores(exported, sample, len(tokenizer.decode(sample).encode())),
        "held_out": {
            **text_scores(exported, held_out_ids, len(held_out_text.encode())),
            "perplexity_before_rounding_to_float16": round(perplexity(unrounded, held_out_ids), 4),
            "perplexity_as_llama_perplexity_c512": round(llama_cpp_perplexity(exported, held_out_ids), 4),
        },
        "held_out_packages": other_ids and text_scores(exported, other_ids, len(other_text.encode())),
        "held_out_routing": routing_statistics(exported, held_out_ids),
        "completions": [
            {"prompt": prompt, "greedy": complete(exported, tokenizer, prompt)} for prompt in PROMPTS
        ],
    }
