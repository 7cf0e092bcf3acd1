# SPDX-License-Identifier: MIT
"""Train, export and report on the tiny MoE model; README.md beside this file gives the commands."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import sentencepiece as spm
import torch
import torch.nn.functional as F
from torch import Tensor

import corpus
from evaluate import build_report, perplexity
from model import ModelConfig, TinyMixtral, export_hf, load_hf

HERE = Path(__file__).resolve().parent
SHAPE = {
    "layers": "number of layers",
    "hidden": "width of the model",
    "expert_ffn": "width of an expert",
    "experts": "experts per layer",
    "top_k": "experts per token",
}


@dataclass(frozen=True)
class TrainConfig:
    """Optimisation settings; exactly one of steps and minutes bounds the run."""

    steps: int | None
    minutes: float | None
    threads: int
    bfloat16: bool = True
    packages: bool = False
    batch: int = 8
    peak_lr: float = 2e-3
    final_lr: float = 5e-5
    warmup_steps: int = 100
    weight_decay: float = 0.4
    balance_coefficient: float = 0.004
    grad_clip: float = 1.0
    checkpoint_seconds: float = 300.0
    seed: int = 1


@dataclass
class Progress:
    """Progress so far, over all resumptions."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0

    def fraction(self, cfg: TrainConfig) -> float:
        if cfg.steps is not None:
            return self.step / cfg.steps
        return self.seconds / (60 * cfg.minutes)


def learning_rate(progress: Progress, cfg: TrainConfig) -> float:
    """Linear warm-up, then a cosine over the fraction of the run that is done."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress.fraction(cfg))))
    warmup = min(1.0, (progress.step + 1) / cfg.warmup_steps)
    return warmup * (cfg.final_lr + (cfg.peak_lr - cfg.final_lr) * cosine)


class Batches:
    """Batch number n, a pure function of seed and n: each epoch shuffles windows at a new offset."""

    def __init__(self, stream: np.ndarray, context: int, cfg: TrainConfig) -> None:
        self.stream, self.context, self.cfg = stream, context, cfg
        self.per_epoch = (len(stream) // context - 1) // cfg.batch
        self._epoch = -1
        self._starts = np.empty(0, dtype=np.int64)

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets [batch, context]; every window starts with BOS, as at inference."""
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng([self.cfg.seed, epoch])
            count = self.per_epoch * self.cfg.batch
            self._starts = rng.permutation(count) * self.context + rng.integers(self.context)
            self._epoch = epoch
        starts = self._starts[index * self.cfg.batch : (index + 1) * self.cfg.batch]
        targets = torch.from_numpy(self.stream[starts[:, None] + np.arange(self.context)])
        inputs = torch.full_like(targets, corpus.BOS_ID)
        inputs[:, 1:] = targets[:, :-1]
        return inputs, targets


def make_optimizer(model: TinyMixtral, cfg: TrainConfig) -> torch.optim.AdamW:
    """AdamW; norms, routers and embeddings are not decayed."""
    decayed, plain = [], []
    for name, weight in model.named_parameters():
        (plain if "norm" in name or "gate" in name or "embed" in name else decayed).append(weight)
    groups = [{"params": decayed, "weight_decay": cfg.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=cfg.peak_lr, betas=(0.9, 0.95), fused=True)


def train_step(
    model: TinyMixtral, optimizer: torch.optim.AdamW, batch: tuple[Tensor, Tensor], cfg: TrainConfig
) -> float:
    """One update; returns the language-model loss in nats per token."""
    inputs, targets = batch
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cfg.bfloat16):
        logits, routings = model(inputs)
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    balance = torch.stack([routing.balance_loss() for routing in routings]).sum()
    (loss + cfg.balance_coefficient * balance).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def save_checkpoint(
    path: Path, model: TinyMixtral, optimizer: torch.optim.AdamW, progress: Progress, cfg: TrainConfig
) -> None:
    """Replace the checkpoint file in one rename."""
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": asdict(progress),
        "train_config": asdict(cfg),
        "model_config": asdict(model.cfg),
    }
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.rename(path)


def load_checkpoint(path: Path) -> dict:
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}: train first with --steps or --minutes")
    return torch.load(path, weights_only=True)


def widened(folder: Path, ffn: int, rng: torch.Generator) -> dict[str, Tensor]:
    """The exported weights of a folder with experts of another, larger width, which compute nearly the same.

    Neurons are split in two: both get a part of the outgoing weight, and a little noise makes them differ.
    """
    weights = {
        name: w.float() for name, w in safetensors.torch.load_file(folder / "model.safetensors").items()
    }
    for name, w in weights.items():
        if name.endswith((".w1.weight", ".w3.weight")):
            copies = w[: ffn - len(w)]
            weights[name] = torch.cat([w, copies * (1 + 0.05 * torch.randn(copies.shape, generator=rng))])
        elif name.endswith(".w2.weight"):
            n_more = ffn - w.shape[1]
            w[:, :n_more] *= 0.6
            weights[name] = torch.cat([w, w[:, :n_more] / 1.5], dim=1)
    return weights


def upcycled(folder: Path, shape: ModelConfig, rng: torch.Generator) -> dict[str, Tensor]:
    """The exported weights of a folder, of the default shape, for more layers and narrower experts.

    It computes nearly the same: an expert's pieces share its router's row, so a token chooses them together.
    Copies of a layer, and further neurons of a piece, add nothing at first.
    """
    old = load_hf(ModelConfig(), folder)
    n_pieces = shape.experts // old.cfg.experts
    width = old.cfg.expert_ffn // n_pieces
    weights = {name: w for name, w in old.state_dict().items() if ".layers." not in name}
    for layer in range(shape.layers):
        source, copy = divmod(layer * old.cfg.layers, shape.layers)
        moe, target = old.model.layers[source], f"model.layers.{layer}."
        for name, w in moe.state_dict().items():
            if name.endswith("gate.weight"):
                rows = w.repeat_interleave(n_pieces, 0)
                weights[target + name] = rows * (1 + 0.01 * torch.randn(rows.shape, generator=rng))
            elif ".experts." not in name:
                weights[target + name] = w * 0 if copy and "o_proj" in name else w
        for expert in range(shape.experts):
            parent, piece = divmod(expert, n_pieces)
            neurons = (piece * width + torch.arange(shape.expert_ffn)) % old.cfg.expert_ffn
            own, prefix = moe.block_sparse_moe.experts[parent], f"{target}block_sparse_moe.experts.{expert}."
            weights[f"{prefix}w1.weight"] = own.w1.weight[neurons]
            weights[f"{prefix}w3.weight"] = own.w3.weight[neurons]
            weights[f"{prefix}w2.weight"] = own.w2.weight[:, neurons] * (0 if copy else 0.8 * shape.top_k)
            weights[f"{prefix}w2.weight"][:, width:] = 0
    return {name: w.detach().clone() for name, w in weights.items()}


def train(
    cfg: TrainConfig, shape: ModelConfig, checkpoint: Path, out: Path, start: dict[str, Tensor] | None
) -> None:
    """Train from the checkpoint, or else from weights, or from scratch, until the budget is used."""
    torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    modules, held_out = corpus.read_modules()
    tokenizer = prepare_tokenizer(modules, out)
    if cfg.packages:
        modules |= corpus.read_packages()[0]
    model = TinyMixtral(shape)
    if start is not None:
        model.load_state_dict(start)
    optimizer = make_optimizer(model, cfg)
    progress = Progress()
    if checkpoint.is_file():
        state = load_checkpoint(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        progress = Progress(**state["progress"])
    batches = Batches(corpus.encode_modules(modules, tokenizer), model.cfg.context, cfg)
    held_out_ids = tokenizer.encode("".join(held_out.values()))
    print(f"{len(batches.stream)} training tokens, {batches.per_epoch} steps per epoch", flush=True)

    losses: list[float] = []
    saved_at = progress.seconds
    while progress.fraction(cfg) < 1:
        start = time.monotonic()
        lr = learning_rate(progress, cfg)
        for group in optimizer.param_groups:
            group["lr"] = lr
        losses.append(train_step(model, optimizer, batches(progress.step), cfg))
        progress.step += 1
        progress.tokens += cfg.batch * model.cfg.context
        progress.seconds += time.monotonic() - start
        if progress.step % 20 == 0:
            mean = sum(losses) / len(losses)
            print(f"step {progress.step} {progress.seconds:.0f}s loss {mean:.3f} lr {lr:.2e}", flush=True)
            losses.clear()
        if progress.seconds - saved_at > cfg.checkpoint_seconds or progress.fraction(cfg) >= 1:
            start = time.monotonic()
            save_checkpoint(checkpoint, model, optimizer, progress, cfg)
            held = perplexity(model, held_out_ids)
            print(f"checkpoint at step {progress.step}: held-out perplexity {held:.3f}", flush=True)
            progress.seconds += time.monotonic() - start
            saved_at = progress.seconds


def prepare_tokenizer(modules: dict[str, str], out: Path) -> spm.SentencePieceProcessor:
    """Load the tokenizer of the output folder, training it first where there is none."""
    out.mkdir(parents=True, exist_ok=True)
    model_file = out / "tokenizer.model"
    if not model_file.is_file():
        corpus.train_tokenizer(modules, model_file)
    corpus.write_tokenizer_configs(out, ModelConfig().context)
    return spm.SentencePieceProcessor(model_file=str(model_file))


def export(checkpoint: Path, out: Path) -> None:
    """Write the Hugging Face folder and the held-out text beside it."""
    modules, held_out = corpus.read_modules()
    prepare_tokenizer(modules, out)
    state = load_checkpoint(checkpoint)
    model = TinyMixtral(ModelConfig(**state["model_config"]))
    model.load_state_dict(state["model"])
    corpus.write_fast_tokenizer(out)
    export_hf(model, out)
    (out.parent / "heldout.txt").write_text("".join(held_out.values()), encoding="utf-8")


def report(checkpoint: Path, out: Path) -> None:
    """Write report.json beside the model folder."""
    result = build_report(load_checkpoint(checkpoint), out)
    (out.parent / "report.json").write_text(json.dumps(result, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--steps", type=int, help="train (or go on training) up to this many steps")
    action.add_argument(
        "--minutes", type=float, help="train for this long; the step count follows from the speed"
    )
    action.add_argument("--export", action="store_true", help="write the model folder from the checkpoint")
    action.add_argument("--report", action="store_true", help="measure the exported model, write report.json")
    parser.add_argument("--checkpoint", type=Path, required=True, help="file to save to and resume from")
    parser.add_argument(
        "--out", type=Path, default=HERE / "model", help="model folder (default: %(default)s)"
    )
    for name, what in SHAPE.items():
        option = "--" + name.replace("_", "-")
        value = getattr(ModelConfig, name)
        parser.add_argument(option, type=int, default=value, help=f"{what} (default: %(default)s)")
    what = "exported model to start from, whose experts are widened to --expert-ffn"
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument("--widen", type=Path, metavar="FOLDER", help=what)
    what = "exported model to start from, whose experts are split and whose layers are repeated"
    begin.add_argument("--upcycle", type=Path, metavar="FOLDER", help=what)
    what = "highest learning rate (default: %(default)s)"
    parser.add_argument("--peak-lr", type=float, default=TrainConfig.peak_lr, help=what)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument(
        "--float32", action="store_true", help="far faster on processors without bfloat16 instructions"
    )
    what = "train on the packages of corpus.py as well, as they are installed"
    parser.add_argument("--packages", action="store_true", help=what)
    args = parser.parse_args()
    try:
        if args.export:
            export(args.checkpoint, args.out)
        elif args.report:
            report(args.checkpoint, args.out)
        else:
            shape = ModelConfig(**{name: getattr(args, name) for name in SHAPE})
            of_time = args.steps, args.minutes, args.threads
            cfg = TrainConfig(*of_time, not args.float32, args.packages, peak_lr=args.peak_lr)
            start, rng = None, torch.Generator().manual_seed(cfg.seed)
            if args.widen:
                start = widened(args.widen, shape.expert_ffn, rng)
            elif args.upcycle:
                start = upcycled(args.upcycle, shape, rng)
            train(cfg, shape, args.checkpoint, args.out, start)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
