# SPDX-License-Identifier: MIT
"""Finds a mixture of experts in SmolLM2-135M: carves it, heals it, and writes found.npz (README.md).

python find.py GGUF WORK --minutes 75     # WORK keeps texts and a state that a second run goes on from
    [--found found.npz --ranks 24 24 48 --near 1]    # heals what was found before
"""

import argparse
import math
import time
from pathlib import Path

import numpy as np
import texts
import torch
import torch.nn.functional as F
from carved import N_LAYERS, NEURONS, Carved, Model, Shape, load
from torch import Tensor
from transformers import AutoTokenizer

CHUNK, STEP = 512, 256  # tokens that are evaluated and trained on at a time
_SPREAD = (
    0.8  # deviation of the routers' logits: the chosen weights then have the entropy of a trained router
)
_RATES = (2e-3, 1e-3)  # learning rates of differences, and of routers and scales
_N_QUICK = 4  # chunks of an unseen text that are evaluated on the way
_USED, _FLATTER = 8, 0.7  # after healing more experts are used, and their weights are nearer each other
_FOLLOW = 0.3  # weight of the routers' own loss beside the divergence from the dense model


def tokens(gguf: Path, work: Path) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Chunks of each text that is trained on, and twelve chunks of each that is not."""
    kept = work / "tokens.pt"
    if not kept.exists():
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)

        def chunks(text: str) -> Tensor:
            ids = tokenizer(text, return_tensors="pt").input_ids[0]
            return ids[: len(ids) // CHUNK * CHUNK].view(-1, CHUNK).int()

        trained, chat = [], []
        for package, pattern in texts.TRAINED.items():
            text = texts.read(package, pattern)
            if package == "dict-gcide":
                chat = list(texts.conversations(text))[::12]
            pieces = [text[at : at + 50_000] for at in range(0, len(text), max(50_000, len(text) // 40))]
            trained.append(chunks("\n".join(pieces)))
        trained.append(
            chunks("".join(tokenizer.apply_chat_template(messages, tokenize=False) for messages in chat))
        )
        unseen = {p: chunks(texts.read(p, pattern)) for p, pattern in texts.UNSEEN.items()}
        unseen = {p: all_[:: max(1, len(all_) // 12)][:12] for p, all_ in unseen.items()}
        torch.save((trained, unseen), kept)
    return torch.load(kept)


@torch.no_grad()
def perplexity(model: Model, chunks: Tensor) -> float:
    losses = [F.cross_entropy(model.logits(c[None].long())[0, :-1], c[1:].long()).item() for c in chunks]
    return math.exp(sum(losses) / len(losses))


def sample(sources: list[Tensor], generator: torch.Generator) -> Tensor:
    """A chunk of a random source."""
    source = sources[int(torch.randint(len(sources), (1,), generator=generator))]
    return source[int(torch.randint(len(source), (1,), generator=generator))][None].long()


#
# carving
#


@torch.no_grad()
def carve(
    dense: Model, shape: Shape, sources: list[Tensor], n_clustered: int = 8, n_fitted: int = 12
) -> list[Carved]:
    """Experts of neurons that matter for the same tokens; routers and differences of down by regression.

    A layer reads what the carved layers before it made, and is fitted to lead back to the dense model.
    """
    generator = torch.Generator().manual_seed(0)
    importance: list[list[Tensor]] = [[] for _ in range(N_LAYERS)]
    dense.seen = lambda n, _y, h, down, _l: importance[n].append(_importance(h, down)[::2].half())
    for _ in range(n_clustered):
        dense(sample(sources, generator))
    dense.seen = None
    layers = [Carved(shape, _order(torch.cat(values).float(), shape)) for values in importance]
    print("clustered", flush=True)
    model = Model(dense.weights, layers)
    ids = torch.cat([sample(sources, generator) for _ in range(n_fitted)])
    wanted = got = F.embedding(ids, dense.weights["token_embd.weight"]).float()
    for n, layer in enumerate(layers):
        wanted = torch.cat([_block(dense, n, x[None]) for x in wanted])
        got = torch.cat([model.attended(n, x[None]) for x in got])
        _fit(model, n, layer, got.flatten(0, 1), wanted.flatten(0, 1))
        got = got + model.fed(n, got)
        error = ((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).mean()
        print(f"layer {n}: error {error:.3f}", flush=True)
    return layers


def _block(model: Model, n: int, x: Tensor) -> Tensor:
    x = model.attended(n, x)
    return x + model.fed(n, x)


def _fit(model: Model, n: int, layer: Carved, x: Tensor, wanted: Tensor) -> None:
    """The layer's router and difference of down, for the residual stream after attention, (tokens, width)."""
    seen: list[Tensor] = []
    model.seen = lambda _n, y, h, down, _l: seen.extend((y, h.float(), down.float()))
    model.fed(n, x)
    model.seen = None
    y, h, down = seen
    mass = _mass(_importance(h, down), layer.shape)
    layer.spread.fill_(_SPREAD / mass.pow(2).mean().sqrt())
    layer.router.data = _regression(y, mass, 0.02).T * layer.spread
    h = h * layer.gates(F.linear(y, layer.router))
    weight = 1 / wanted.norm(dim=1, keepdim=True)  # the next layer's norm divides by it
    full = _regression(h * weight, (wanted - x - h @ down.T) * weight, 0.1)
    _, _, directions = torch.linalg.svd((h * weight) @ full, full_matrices=False)
    outer = directions[: layer.shape.ranks[2]]
    size = ((full @ outer.T).norm() / outer.norm()).sqrt()
    layer.inner["down"].data, layer.outer["down"].data = full @ outer.T / size, outer * size


def _regression(x: Tensor, y: Tensor, ridge: float) -> Tensor:
    """The matrix that takes x to y, with a ridge beside inputs of a mean square of 1."""
    size = x.pow(2).mean(0).sqrt() + 1e-8
    x = x / size
    normal = x.T @ x / len(x) + ridge * torch.eye(x.shape[1])
    return torch.linalg.solve(normal, x.T @ y / len(x)) / size[:, None]


def _importance(h: Tensor, down: Tensor) -> Tensor:
    return (h.float().abs() * down.float().norm(dim=0)).reshape(-1, NEURONS)


def _mass(importance: Tensor, shape: Shape) -> Tensor:
    """Logarithm of what each expert adds, beside the mean of all, for importances in the layer's order."""
    mass = (
        importance[:, shape.shared :].pow(2).view(len(importance), shape.experts, -1).sum(-1) + 1e-8
    ).log()
    return mass - mass.mean(1, keepdim=True)


def _order(importance: Tensor, shape: Shape) -> Tensor:
    """Neurons of the shared expert, then of each routed one, by balanced k-means of when they matter."""
    ranked = importance.mean(0).argsort(descending=True)
    rest = ranked[shape.shared :]
    active = (importance[:, rest] > importance.quantile(0.75, dim=1, keepdim=True)).float()
    active = active / (active.norm(dim=0) + 1e-6)
    start = torch.randperm(len(rest), generator=torch.Generator().manual_seed(0))[: shape.experts]
    centres = active[:, start]
    for _ in range(8):
        near = active.T @ centres
        expert, room = np.full(len(rest), -1), [shape.rows] * shape.experts
        wishes = near.argsort(1, descending=True).tolist()
        for neuron in near.max(1)[0].argsort(descending=True).tolist():
            expert[neuron] = next(e for e in wishes[neuron] if room[e])
            room[expert[neuron]] -= 1
        members = F.one_hot(torch.from_numpy(expert), shape.experts).float()
        centres = active @ members / shape.rows
        centres = centres / (centres.norm(dim=0) + 1e-6)
    return torch.cat(
        [ranked[: shape.shared].sort()[0], rest[torch.from_numpy(np.argsort(expert, kind="stable"))]]
    )


#
# healing
#


class Follow:
    """The routers' own loss: logits beside the experts' shares of the output, which need all activations.

    near: weight of the residual streams' distance from the dense model's.
    """

    def __init__(self, layers: list[Carved], near: float) -> None:
        self.layers, self.losses, self.entropies, self.near = layers, [], [], near

    def __call__(self, n: int, y: Tensor, h: Tensor, down: Tensor, logits: Tensor) -> None:
        layer = self.layers[n]
        with torch.no_grad():
            wanted = torch.softmax(_mass(_importance(h, down), layer.shape) * layer.spread, -1)
            chosen = torch.softmax(logits.topk(layer.shape.used, -1)[0], -1)
            self.entropies.append(-(chosen * chosen.log()).sum(-1).mean().item() / math.log(layer.shape.used))
        own = F.linear(y.detach()[0], layer.router)
        self.losses.append(F.cross_entropy(own, wanted) / N_LAYERS)


def step(dense: Model, model: Model, chunk: Tensor, follow: Follow) -> float:
    """Adds the gradients of three losses, and returns the first: the divergence of next tokens.

    The others are the routers' own, and the distance of the residual streams from the dense model's.
    """
    output, led, leading = dense.weights["token_embd.weight"], [], []
    with torch.no_grad():
        wanted = torch.log_softmax(F.linear(dense(chunk, leading)[0], output).float(), -1)
    follow.losses.clear()
    follow.entropies.clear()
    hidden = model(chunk, led)[0]
    with torch.no_grad():
        got = torch.log_softmax(F.linear(hidden, output).float(), -1)
        probabilities = wanted.exp()
        loss = (probabilities * (wanted - got)).sum(-1).mean().item()
        gradient = ((got.exp() - probabilities) / len(got)).to(model.dtype) @ output
    away = [((x - y).pow(2).sum(-1) / y.pow(2).sum(-1)).mean() for x, y in zip(led, leading, strict=True)]
    own = torch.stack(follow.losses).sum() * _FOLLOW + torch.stack(away).mean() * follow.near
    torch.autograd.backward([hidden, own], [gradient, None])
    return loss


class Healing:
    """The state of a healing, which a later run goes on from."""

    def __init__(self, layers: list[Carved], kept: Path) -> None:
        self.module, self.kept = torch.nn.ModuleList(layers), kept
        named = list(self.module.named_parameters())
        matrices = [p for name, p in named if "ner." in name]  # factors of the differences
        others = [p for name, p in named if "ner." not in name]
        self.optimiser = torch.optim.AdamW(
            [{"params": matrices}, {"params": others}], betas=(0.9, 0.98), weight_decay=0.0
        )
        self.generator = torch.Generator().manual_seed(1)
        self.done, self.spent = 0, 0.0
        if kept.exists():
            state = torch.load(kept)
            self.module.load_state_dict(state["layers"])
            self.optimiser.load_state_dict(state["optimiser"])
            self.generator.set_state(state["generator"])
            self.done, self.spent = state["done"], state["spent"]

    def save(self) -> None:
        state = {"layers": self.module.state_dict(), "optimiser": self.optimiser.state_dict()}
        state |= {"generator": self.generator.get_state(), "done": self.done, "spent": self.spent}
        torch.save(state, self.kept.with_suffix(".new"))
        self.kept.with_suffix(".new").replace(self.kept)

    def update(self, pace: float) -> None:
        """One step by the gradient, at this share of the full rate."""
        for group, rate in zip(self.optimiser.param_groups, _RATES, strict=True):
            group["lr"] = rate * pace
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.done += 1


def heal(
    dense: Model,
    layers: list[Carved],
    sources: list[Tensor],
    unseen: dict[str, Tensor],
    work: Path,
    until: float,
    near: float,
) -> None:
    state, model = Healing(layers, work / "state.pt"), Model(dense.weights, layers)
    follow = Follow(layers, near)
    base = {p: perplexity(dense, chunks[:_N_QUICK]) for p, chunks in unseen.items()}
    began, before, last, losses = time.time(), state.spent, 0.0, []
    while (left := until - time.time()) > 0:
        start = int(torch.randint(2, (), generator=state.generator)) * STEP
        chunk = sample(sources, state.generator)[:, start : start + STEP]
        model.seen = follow
        losses.append(step(dense, model, chunk, follow))
        model.seen = None
        state.update(min(1.0, (state.done + 1) / 20) * max(0.05, min(1.0, 1.3 * left / (left + state.spent))))
        state.spent = before + time.time() - began
        if time.time() - last > 420:
            entropy = sum(follow.entropies) / len(follow.entropies)
            ratios = {
                p: round(perplexity(model, chunks[:_N_QUICK]) / base[p], 3) for p, chunks in unseen.items()
            }
            mean = sum(losses) / len(losses)
            print(
                f"{state.done} steps, {state.spent:.0f} s, KL {mean:.3f}, entropy {entropy:.3f}, {ratios}",
                flush=True,
            )
            state.save()
            last, losses = time.time(), []
    state.save()


def write_found(layers: list[Carved], path: Path) -> None:
    """Writes what was found, 8 bits for a number of the differences, for carved_gguf.py."""
    arrays = {"shared": np.int32(layers[0].shape.shared), "used": np.int32(_USED)}
    arrays["order"] = np.stack([layer.order.numpy().astype(np.uint16) for layer in layers])
    flatter = _FLATTER if layers[0].shape.used < _USED else 1.0
    for name in ("router", "scale", "attn_norm", "ffn_norm"):
        values = np.stack([getattr(layer, name).detach().numpy() for layer in layers])
        arrays[name] = (values * (flatter if name == "router" else 1)).astype(np.float16)
    for part in layers[0].inner:
        for side, axis in (("inner", 2), ("outer", 1)):
            values = np.stack([getattr(layer, side)[part].detach().numpy() for layer in layers])
            step = np.maximum(abs(values).max(axis, keepdims=True) / 127, 1e-7).astype(np.float16)
            arrays |= {f"{part}_{side}": np.rint(values / step).astype(np.int8), f"{part}_{side}_step": step}
    np.savez_compressed(path, **arrays)


def read_found(path: Path, ranks: tuple[int, int, int], dense: Model, chunk: Tensor) -> list[Carved]:
    """Reads what write_found wrote, with room for differences of these ranks. chunk: of text."""
    found, layers = dict(np.load(path)), []
    for n, order in enumerate(found["order"]):
        layer = Carved(Shape(used=int(found["used"]), ranks=ranks), torch.from_numpy(order.astype(np.int64)))
        for name in ("router", "scale", "attn_norm", "ffn_norm"):
            getattr(layer, name).data = torch.from_numpy(found[name][n].astype(np.float32))
        for part in layer.inner:
            for side, kept in (("inner", layer.inner[part].data.T), ("outer", layer.outer[part].data)):
                step = found[f"{part}_{side}_step"][n].astype(np.float32)
                values = torch.from_numpy(found[f"{part}_{side}"][n] * step)
                values = values.T if side == "inner" else values
                kept[: len(values)] = values
        layers.append(layer)
    model = Model(dense.weights, layers)
    model.seen = lambda n, _y, h, down, _l: layers[n].spread.fill_(
        _SPREAD * _FLATTER / _mass(_importance(h, down), layers[n].shape).pow(2).mean().sqrt()
    )
    with torch.no_grad():
        model(chunk)
    return layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--found", type=Path)
    parser.add_argument("--ranks", type=int, nargs=3, default=Shape.ranks, help="with --found")
    parser.add_argument("--near", type=float, default=0.0, help="weight of the residual streams' distance")
    args = parser.parse_args()
    until = time.time() + args.minutes * 60
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    sources, unseen = tokens(args.gguf, args.work)
    dense = Model(load(args.gguf, torch.bfloat16))
    kept = args.work / "carved.pt"
    if args.found:
        layers = read_found(args.found, tuple(args.ranks), dense, sources[0][:1].long())
    else:
        if not kept.exists():
            torch.save(torch.nn.ModuleList(carve(dense, Shape(), sources)).state_dict(), kept)
        layers = [Carved(Shape(), torch.zeros(NEURONS, dtype=torch.int64)) for _ in range(N_LAYERS)]
        torch.nn.ModuleList(layers).load_state_dict(torch.load(kept))
    heal(dense, layers, sources, unseen, args.work, until, args.near)
    write_found(layers, args.work / "found.npz")


if __name__ == "__main__":
    main()
