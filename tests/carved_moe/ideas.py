# SPDX-License-Identifier: MIT
"""Ideas for fewer bytes, tried in numpy before any is built: docs/results/ideas-for-fewer-bytes.md.

    python tests/carved_moe/ideas.py carved-f16.gguf --text unseen.txt [--parts fewer low price pairs]

The carved model computes parts of a text with experts in several versions. A use of an expert gets the
version with the least loss + price * bytes, as by the rule price: the loss is the squared weight by a cost of
the layer, which was measured on a part of its own. Bytes are those of all uses, and those that one LRU cache
for all versions reads.
"""

import argparse
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, dequantize, quantize
from numpy.typing import NDArray

from bench.results import read_lines
from pyhobbit.quality.evaluate import Evaluator, compare
from pyhobbit.settings.config import CacheConfig, EngineConfig

WIDTHS = Path(__file__).parents[2] / "docs/results/carved-f16-widths-amd-epyc.jsonl"
HEADS, KV_HEADS, BASE, EPS = 9, 3, 100000.0, 1e-5
PARTS = ("gate", "up", "down")
N_COSTS = 128  # tokens on which costs are measured, at most
SHARES = (0.25, 0.5)  # shares of all experts in the first version that memory holds
LIMITS = (0.003, 0.01)  # nats
T1 = (0.9, 0.75, 0.6, 0.45, 0.3, 0.15)  # thresholds of Eq. 2
LOW_SHARES = (0.15, 0.3, 0.45, 0.6, 0.75, 0.9)  # shares of the experts that are low for all tokens
PARTS_OF = ("fewer", "low", "price", "pairs")  # parts of the script
SKIP = -1
Array = NDArray[Any]
Decide = Callable[[int, Array, Array], Array]
"""Layer, and chosen experts and their weights [T, k], to numbers of versions [T, k], or SKIP."""


def plain(kind: str) -> Callable[[Array], Array]:
    """Rows as the type stores them."""
    number = GGMLQuantizationType[kind.upper()]
    return lambda rows: dequantize(quantize(rows, number), number)


def cut(n_bits: int) -> Callable[[Array], Array]:
    """Rows by the upper half of the bits of their codes, in blocks of 32: q4_0's 2 of 4, q8_0's 4 of 8."""

    def of(rows: Array) -> Array:
        blocks = rows.reshape(-1, 32)
        most, largest = 2.0 ** (n_bits - 1), np.abs(blocks).argmax(1)[:, None]
        scale = np.take_along_axis(blocks, largest, 1) / -most if n_bits == 4 else None
        if scale is None:
            scale = np.abs(np.take_along_axis(blocks, largest, 1)) / (most - 1)
        scale = scale.astype(np.float16).astype(np.float32)
        codes = np.clip(np.round(blocks / np.where(scale == 0, 1, scale)), -most, most - 1)
        step = 2.0 ** (n_bits // 2)
        return (
            ((np.floor(codes / step) * step + (step - 1) / 2) * scale).reshape(rows.shape).astype(np.float32)
        )

    return of


def two_bits(rows: Array) -> Array:
    """Rows by four levels at the least squared error: codes of their own beside those that were cut."""
    blocks = rows.reshape(-1, 32)
    best, error = np.zeros_like(blocks), np.full(len(blocks), np.inf)
    for factor in np.linspace(0.5, 1.0, 6):
        scale = (factor * np.abs(blocks).max(1, keepdims=True) / 1.5).astype(np.float16).astype(np.float32)
        found = (np.clip(np.floor(blocks / np.where(scale == 0, 1, scale)), -2, 1) + 0.5) * scale
        now = ((found - blocks) ** 2).sum(1)
        better = now < error
        best[better], error[better] = found[better], now[better]
    return best.reshape(rows.shape)


@dataclass(frozen=True)
class Version:
    """bits: per weight.  planes: of a cache, the names and bits that it consists of."""

    name: str
    bits: float
    rows: Callable[[Array], Array]
    planes: Mapping[str, float] = field(default_factory=dict)


F16 = Version("f16", 16.0, lambda rows: rows)
Q8 = Version("q8_0", 8.5, plain("q8_0"))
Q4 = Version("q4_0", 4.5, plain("q4_0"))
TWO = Version("2 bits of their own", 2.5, two_bits)
Q8_CUT = Version("q8_0's upper 4 bits", 4.5, cut(8), {"upper": 4.5})
Q8_BOTH = Version("q8_0", 8.5, Q8.rows, {"upper": 4.5, "lower": 4.0})
Q4_CUT = Version("q4_0's upper 2 bits", 2.5, cut(4), {"upper": 2.5})
Q4_BOTH = Version("q4_0", 4.5, Q4.rows, {"upper": 2.5, "lower": 2.0})


class Moe:
    """The carved model. versions: of the routed experts; decide: which each use has.

    n_run, n_mass: a token uses its best n_run experts, by the mass of its best n_mass.
    """

    def __init__(self, path: Path) -> None:
        reader = GGUFReader(path)
        self.tensors = {t.name: dequantize(t.data, t.tensor_type) for t in reader.tensors}
        self.n_layers = reader.fields["granitemoe.block_count"].contents()
        self.n_used = self.n_run = self.n_mass = reader.fields["granitemoe.expert_used_count"].contents()
        self.n_experts = reader.fields["granitemoe.expert_count"].contents()
        self.decide: Decide = lambda _layer, _experts, weights: np.zeros(weights.shape, int)
        self.seen: list[tuple[Array, Array]] = []  # by layer: experts and weights [T, k]
        self.states: list[Array] = []  # inputs of the layers
        self._made: dict[str, list[dict[str, Array]]] = {}
        self.use([F16])

    def use(self, versions: Sequence[Version]) -> None:
        self.versions = versions
        for version in versions:
            if version.name not in self._made:
                self._made[version.name] = [self._routed(n, version) for n in range(self.n_layers)]

    def _routed(self, n: int, version: Version) -> dict[str, Array]:
        found = {part: version.rows(self.tensors[f"blk.{n}.ffn_{part}_exps.weight"]) for part in PARTS}
        flat = {part: found[part].reshape(-1, found[part].shape[-1]) for part in ("gate", "up")}
        return {**flat, "down": found["down"].swapaxes(1, 2).reshape(-1, found["down"].shape[1])}

    def logits(self, ids: Sequence[int], first: int = 0, states: Sequence[Array] = ()) -> Array:
        """Logits after each token: [T, n_vocab]. first: layer to begin with; states: inputs of the layers."""
        self.seen, self.states = [], []
        x = states[first] if first else self.tensors["token_embd.weight"][list(ids)]
        for n in range(first, self.n_layers):
            self.states.append(x)
            x = x + self._attended(n, self._normed(f"blk.{n}.attn_norm", x))
            x = x + self._fed(n, self._normed(f"blk.{n}.ffn_norm", x))
        return self._normed("output_norm", x) @ self.tensors["token_embd.weight"].T

    def _normed(self, name: str, x: Array) -> Array:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * self.tensors[f"{name}.weight"]

    def _attended(self, n: int, y: Array) -> Array:
        weight = {part: self.tensors[f"blk.{n}.attn_{part}.weight"] for part in ("q", "k", "v", "output")}
        size, n_tokens = weight["q"].shape[0] // HEADS, len(y)
        angle = np.arange(n_tokens)[:, None] * BASE ** (-np.arange(0, size, 2) / size)
        turn = np.exp(1j * angle).astype(np.complex64)

        def heads(part: str, n_heads: int) -> Array:
            z = (y @ weight[part].T).reshape(n_tokens, n_heads, size).swapaxes(0, 1)
            if part != "v":
                z = (np.ascontiguousarray(z).view(np.complex64) * turn).view(np.float32)
            return np.repeat(z, HEADS // n_heads, axis=0)

        scores = heads("q", HEADS) @ heads("k", KV_HEADS).swapaxes(1, 2) / size**0.5
        scores = np.where(np.tri(n_tokens, dtype=bool), scores, -np.inf)
        return (softmax(scores) @ heads("v", KV_HEADS)).swapaxes(0, 1).reshape(n_tokens, -1) @ weight[
            "output"
        ].T

    def _fed(self, n: int, y: Array) -> Array:
        shared = [self.tensors[f"blk.{n}.ffn_{part}_shexp.weight"] for part in PARTS]
        out = silu(y @ shared[0].T) * (y @ shared[1].T) @ shared[2].T
        scores = y @ self.tensors[f"blk.{n}.ffn_gate_inp.weight"].T
        chosen = np.argsort(-scores, axis=1, kind="stable")[:, : self.n_mass]
        weights = softmax(np.take_along_axis(scores, chosen, 1))[:, : self.n_run]
        chosen = chosen[:, : self.n_run]
        self.seen.append((chosen, weights))
        versions = self.decide(n, chosen, weights)
        for i, version in enumerate(self.versions):
            if (versions == i).any():
                own = np.zeros((len(y), self.n_experts), np.float32)
                np.put_along_axis(own, chosen, np.where(versions == i, weights, 0), 1)
                made = self._made[version.name][n]
                hidden = silu(y @ made["gate"].T) * (y @ made["up"].T)
                out += hidden * np.repeat(own, len(made["gate"]) // self.n_experts, axis=1) @ made["down"]
        return out


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


@dataclass(frozen=True)
class Found:
    """Values by token: divergence, total variation, change of the likeliest token.  asked: bits a weight."""

    divergence: Array
    variation: Array
    changed: Array
    asked: float
    uses: list[list[tuple[Array, Array]]]  # by chunk and layer: experts and versions


class Trial:
    """One model on one text."""

    def __init__(self, path: Path, text: str, n_ctx: int, n_chunks: int) -> None:
        with Evaluator(path, EngineConfig(CacheConfig(pools=200 << 20), n_ctx, n_threads=1)) as opened:
            chunks, n = opened.chunks(text), n_chunks + 1
            first, *self.chunks = (chunks[i * len(chunks) // n] for i in range(n))
            self.engine = opened.reference([first])[0]
        self.whole, self.cost_chunk = first, first[:N_COSTS]
        self.moe = Moe(path)
        self._known: dict[tuple[str, str], Array] = {}
        _, by_part = read_lines(WIDTHS)
        self.alone = np.array(by_part["widths"]["figures"][0]["values"], float)  # nats, by layer and expert

    def all_first(self, chunks: Sequence[Sequence[int]]) -> list[Array]:
        self.moe.decide = lambda _layer, _experts, weights: np.zeros(weights.shape, int)
        return [self.moe.logits(chunk) for chunk in chunks]

    def measured(self, chunks: Sequence[Sequence[int]], references: Sequence[Array], decide: Decide) -> Found:
        moe, compared, uses = self.moe, [], []
        moe.decide = decide
        for chunk, reference in zip(chunks, references, strict=True):
            found = compare(reference[:-1], moe.logits(chunk)[:-1], np.asarray(chunk[1:]))
            compared.append((found.divergence, found.total_variation, ~found.same_top1))
            uses.append(
                [(experts, decide(n, experts, weights)) for n, (experts, weights) in enumerate(moe.seen)]
            )
        bits = np.array([*(version.bits for version in moe.versions), 0.0])
        asked = (
            np.mean([bits[versions].sum(1).mean() for chunk in uses for _, versions in chunk]) / moe.n_used
        )
        return Found(*map(np.concatenate, zip(*compared, strict=True)), float(asked), uses)

    def costs(self, versions: Sequence[Version]) -> Array:
        """Nats of a use of weight 1: [layer, version], the last one skipped."""
        first, names = versions[0], [*(version.name for version in versions[1:]), "skipped"]
        for name, version in zip(names, [*versions[1:], first], strict=True):
            if (first.name, name) not in self._known:
                self.moe.use([first, version])
                self._known[first.name, name] = self._costs_of(name == "skipped")
        columns = [self._known[first.name, name] for name in names]
        return np.stack([np.zeros(self.moe.n_layers), *columns], 1)

    def _costs_of(self, is_skipped: bool) -> Array:
        """By layer, of the second version, or of skipping the less important half."""
        (reference,) = self.all_first([self.cost_chunk])
        states, found = self.moe.states, []
        for layer in range(self.moe.n_layers):
            squares: list[float] = []

            def decide(
                n: int, _experts: Array, weights: Array, layer: int = layer, squares: list[float] = squares
            ) -> Array:
                is_own = np.full(weights.shape, n == layer)
                is_own[:, : weights.shape[1] // 2 if is_skipped else 0] = False
                squares.append(float((weights**2 * is_own).sum(1).mean()))
                return np.where(is_own, SKIP if is_skipped else 1, 0)

            self.moe.decide = decide
            changed = self.moe.logits(self.cost_chunk, layer, states)
            compared = compare(reference[:-1], changed[:-1], np.asarray(self.cost_chunk[1:]))
            found.append(max(float(compared.divergence.mean()), 0.0) / sum(squares))
        return np.array(found)

    def points(self, versions: Sequence[Version]) -> Iterator[Found]:
        """Prices from little loss to much."""
        costs = self.costs(versions)
        self.moe.use(versions)
        references = self.all_first(self.chunks)
        bits = np.array([*(version.bits for version in versions), 0.0])
        typical = np.median(costs[:, -2]) / 64  # the smallest version decides how far prices reach
        for price in typical / versions[0].bits * 4.0 ** np.arange(-1.5, 2.1, 0.7):

            def decide(n: int, _experts: Array, weights: Array, price: float = price) -> Array:
                best = np.argmin(weights[..., None] ** 2 * costs[n] + price * bits, -1)
                return np.where(best == len(versions), SKIP, best)

            yield self.measured(self.chunks, references, decide)

    def by_weight(self, versions: Sequence[Version]) -> Iterator[Found]:
        """Thresholds of Eq. 2 for two versions, from little loss to much."""
        self.moe.use(versions)
        references = self.all_first(self.chunks)
        for t1 in T1:

            def decide(_n: int, _experts: Array, weights: Array, t1: float = t1) -> Array:
                return (np.cumsum(weights, 1) - weights > t1).astype(int)

            yield self.measured(self.chunks, references, decide)

    def by_expert(self, versions: Sequence[Version]) -> Iterator[Found]:
        """Static widths of two versions, by each expert's divergence alone, from few low experts to most."""
        self.moe.use(versions)
        references = self.all_first(self.chunks)
        for share in LOW_SHARES:
            is_low = self.alone <= np.quantile(self.alone, share)

            def decide(n: int, experts: Array, _weights: Array, is_low: Array = is_low) -> Array:
                return is_low[n][experts].astype(int)

            yield self.measured(self.chunks, references, decide)


def read_bits(moe: Moe, uses: list[list[tuple[Array, Array]]], share: float) -> float:
    """Bits for each weight of a use that an LRU cache reads; share: of the first version that it can hold."""
    room = share * moe.n_layers * moe.n_experts * moe.versions[0].bits
    kept: OrderedDict[tuple[int, int, Any], float] = OrderedDict()
    held = read = 0.0
    n_uses = 0
    for chunk in uses:
        for token in range(len(chunk[0][0])):
            for layer, (experts, versions) in enumerate(chunk):
                n_uses += moe.n_used
                for expert, number in zip(experts[token].tolist(), versions[token].tolist(), strict=True):
                    for item, size in _needed(moe, layer, expert, number, kept):
                        if item in kept:
                            kept.move_to_end(item)
                            continue
                        kept[item], held, read = size, held + size, read + size
                while held > room:
                    held -= kept.popitem(last=False)[1]
    return read / n_uses


def _needed(
    moe: Moe, layer: int, expert: int, number: int, kept: Mapping[Any, float]
) -> list[tuple[Any, float]]:
    """Items of the cache that a use needs; a better version that is there serves."""
    if number == SKIP:
        return []
    if planes := moe.versions[number].planes:
        return [((layer, expert, plane), size) for plane, size in planes.items()]
    better = next((i for i in range(number) if (layer, expert, i) in kept), number)
    return [((layer, expert, better), moe.versions[better].bits)]


def at_limit(points: Sequence[tuple[float, float]], limit: float) -> float | None:
    """The value at a divergence, between the points (divergence, value); None beyond them."""
    found = sorted(points)
    kl, values = np.array([point[0] for point in found]), np.array([point[1] for point in found])
    return float(np.interp(np.log(limit), np.log(kl), values)) if kl[0] <= limit <= kl[-1] else None


def fewer_run(trial: Trial) -> None:
    """Idea (a): the best k1 experts, by the mass of the best k2."""
    moe = trial.moe
    moe.use([F16])
    references = trial.all_first(trial.chunks)
    print("\n| run | by the mass of | KL | total variation | changed, % |\n|---|---|---|---|---|")
    for n_run in (7, 6, 4):
        for n_mass in sorted({n_run, 8, 12}):
            moe.n_run, moe.n_mass = n_run, n_mass
            found = trial.measured(
                trial.chunks, references, lambda _n, _experts, weights: np.zeros(weights.shape, int)
            )
            print(f"| {n_run} | {n_mass} | {_figures(found)} |", flush=True)
    moe.n_run = moe.n_mass = moe.n_used


def _figures(found: Found) -> str:
    error = 1.96 * found.divergence.std(ddof=1) / len(found.divergence) ** 0.5
    of_tokens = f"{found.variation.mean():.4f} | {100 * found.changed.mean():.1f}"
    return f"{found.divergence.mean():.4f} ± {error:.4f} | {of_tokens}"


def all_low(trial: Trial) -> None:
    """Losses with all experts in one version."""
    print(
        "\n| all experts in | beside | bits | KL | total variation | changed, % |\n|---|---|---|---|---|---|"
    )
    for first, versions in ((F16, (Q8, Q4)), (Q8, (Q8_CUT, Q4)), (Q4, (Q4_CUT, TWO))):
        trial.moe.use([first])
        references = trial.all_first(trial.chunks)
        for version in versions:
            trial.moe.use([first, version])
            found = trial.measured(
                trial.chunks, references, lambda _n, _experts, weights: np.ones(weights.shape, int)
            )
            print(f"| {version.name} | {first.name} | {version.bits} | {_figures(found)} |", flush=True)


def _columns(trial: Trial, found: Sequence[Found]) -> list[list[float]]:
    """Bits that are asked for, and that a cache of each share reads."""
    return [
        [of.asked for of in found],
        *([read_bits(trial.moe, of.uses, share) for of in found] for share in SHARES),
    ]


def _cells(found: Sequence[Found], columns: Sequence[Sequence[float]], limit: float) -> list[str]:
    kl = [float(of.divergence.mean()) for of in found]
    cells = [at_limit([*zip(kl, column, strict=True)], limit) for column in columns]
    return ["-" if cell is None else f"{cell:.3g}" for cell in cells]


def _named(versions: Sequence[Version]) -> str:
    return " + ".join(each.name for each in versions) + (" as planes" if versions[0].planes else "")


def by_price(trial: Trial, sets: Sequence[Sequence[Version]]) -> None:
    """Bits at equal divergence, of all uses and with a cache."""
    heads = "".join(
        f" | KL {limit}: asked | " + " | ".join(f"read, {share:.0%}" for share in SHARES) for limit in LIMITS
    )
    print(f"\n| versions{heads} |\n|{'---|' * (1 + len(LIMITS) * (1 + len(SHARES)))}")
    for versions in sets:
        found = list(trial.points(versions))
        columns = _columns(trial, found)
        cells = [cell for limit in LIMITS for cell in _cells(found, columns, limit)]
        print(f"| {_named(versions)} | {' | '.join(cells)} |", flush=True)


def pairs(trial: Trial, sets: Sequence[Sequence[Version]]) -> None:
    """The rule price beside Eq. 2 and static widths, which two versions have, at the last limit."""
    reads = " | ".join(f"read, {share:.0%}" for share in SHARES)
    print(f"\n| versions | rule | asked | {reads} | total variation | changed, % |\n{'|---' * 7}|")
    for versions in sets:
        rules = [("price", trial.points), ("Eq. 2", trial.by_weight), ("static widths", trial.by_expert)]
        for rule, points in rules[: 1 if len(versions) > 2 else 3]:
            found = list(points(versions))
            changes = [[of.variation.mean() for of in found], [100 * of.changed.mean() for of in found]]
            cells = _cells(found, [*_columns(trial, found), *changes], LIMITS[-1])
            print(f"| {_named(versions)} | {rule} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="the carved model in f16 alone")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--ctx", type=int, default=256, help="tokens of a part (default: %(default)s)")
    parser.add_argument("--chunks", type=int, default=4, help="parts (default: %(default)s)")
    parser.add_argument("--parts", nargs="+", default=PARTS_OF, choices=PARTS_OF)
    args = parser.parse_args()
    trial = Trial(args.model, args.text.read_text(), args.ctx, args.chunks)
    own = trial.moe.logits(trial.whole)[args.ctx // 2 : -1]
    found = compare(trial.engine, own, np.asarray(trial.whole[args.ctx // 2 + 1 :]))
    print(f"beside the engine's logits: KL {found.divergence.mean():.2g}", flush=True)
    if "fewer" in args.parts:
        fewer_run(trial)
    if "low" in args.parts:
        all_low(trial)
    sets = [
        [Q4, TWO],
        [Q4_BOTH, Q4_CUT],
        [Q8, Q4],
        [Q8_BOTH, Q8_CUT],
        [F16, Q4],
        [Q8, Q4, TWO],
    ]
    if "price" in args.parts:
        by_price(trial, sets)
    if "pairs" in args.parts:
        pairs(trial, [[F16, Q4], [Q8, Q4], [F16, Q8, Q4]])


if __name__ == "__main__":
    main()
