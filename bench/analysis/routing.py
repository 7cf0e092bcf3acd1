# SPDX-License-Identifier: MIT
"""Parts that follow from a model's routing of a text: similarity, predictions, uses, policies, skipping."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bench.analysis import figures
from bench.analysis.part import Figure, Run, by_layer, figure, table
from pyhobbit.engine.engine import Engine
from pyhobbit.errors import HobbitError
from pyhobbit.model.router import Router
from pyhobbit.quality import evaluate
from pyhobbit.quality.calibration import profile, routes
from pyhobbit.routing.observe import Observations, Recorder, observed
from pyhobbit.routing.rules import unimportance
from pyhobbit.routing.trace import BELADY, Simulation, policy_names, read_trace, simulate, use_rates
from pyhobbit.settings.config import SamplingConfig
from pyhobbit.settings.papers import PAPERS
from pyhobbit.settings.table import OPTIONS

T1, T2 = (PAPERS["hobbit"].settings[name] for name in ("t1", "t2"))
CAPACITIES = (0.1, 0.25, 0.5)
_MAX_INPUT_BYTES = 256 << 20  # bytes of routers' inputs
_OWN_ROUTING = 0.99  # below, a layer's router is not understood
_MAX_ROUTES = 100_000  # replayed at once
_MAX_POINTS = 1500
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)  # shares of selections, replaced or skipped
_N_PROMPTS, _PROMPT_CHARS, _ANSWER = 4, 600, 64
_CTX = 2048  # enough for tokens of bytes


def routing(run: Run) -> list[Figure]:
    """One run of the text in high precision."""
    with run.evaluator() as evaluator:
        chunks = run.chunks(evaluator)
        recorder = Recorder(len(chunks), evaluator.n_ctx, evaluator.info.n_layers, _MAX_INPUT_BYTES)
        with evaluator.observing(recorder):
            reference = evaluator.reference(chunks)
    seen = recorder.observations()
    blocks = [run.file.blocks[layer] for layer in seen.layers]
    values = {
        "tokens": len(seen.sequences),
        "perplexity, all high": evaluate.perplexity(reference, chunks),
        "experts of a token, and of a layer": f"{seen.experts.shape[2]} of {run.file.n_experts}",
    }
    rows = [{"what": name, "value": value} for name, value in values.items()]
    text = table("The text", "what the model makes of it", rows)
    n_experts = run.file.n_experts
    own = (*_gates(seen), *_uses(seen, n_experts), *_policies(seen, n_experts))
    return [text, *own, *_ahead(seen, blocks, run.file.routers(blocks))]


def _gates(seen: Observations) -> Iterator[Figure]:
    """Figures of gate weights, where the engine sees them and a token has several experts."""
    if seen.weights is None or seen.experts.shape[2] == 1:
        return
    if seen.output_norms is not None:
        later = np.flatnonzero(seen.sequences[1:] == seen.sequences[:-1]) + 1  # a first token's may be huge
        gate, output = figures.relative_importance(seen.weights[later], seen.output_norms[later])
        some = np.random.default_rng(0).permutation(np.flatnonzero(~np.isnan(output)))[:_MAX_POINTS]
        of_layers, r = figures.importance(gate, output)
        low, high = np.nanmin(of_layers), np.nanmax(of_layers)
        title = f"gate weight and output, by layers' means: r {r:.3f}, by layer {low:.2f} to {high:.2f}"
        axes = {"x_label": "|G|", "y_label": "|G E(x)|"}
        yield figure("points", "HOBBIT Fig. 5a", title, x=gate.flat[some], y=output.flat[some], **axes)


def _uses(seen: Observations, n_experts: int) -> Iterator[Figure]:
    of_paths = np.cumsum(figures.path_shares(seen.experts))
    share = (np.searchsorted(of_paths, 0.99) + 1) / len(of_paths)
    some = np.unique(np.linspace(0, len(of_paths) - 1, 60).astype(int))
    title = f"{len(of_paths)} paths of best experts; {share:.0%} of them carry 99 % of the tokens"
    places, label = (some + 1) / len(of_paths), "share of the paths, the most frequent first"
    series = {"tokens": of_paths[some]}
    yield figure("lines", "EdgeMoE Fig. 4", title, x=places, series=series, x_label=label)
    uses = np.stack([np.bincount(each.ravel(), minlength=n_experts) for each in seen.by_layer().values()])
    hits = [(share, *figures.placement_hits(uses, share)) for share in (56 / 256, 125 / 256)]
    title = "uses by the most used; hits of the most used, random and least used: " + "; ".join(
        f"{n:.0%} placed: {best:.1%}, {n:.1%}, {worst:.1%}" for n, best, worst in hits
    )
    axes = {"x_label": "expert", "y_label": "layer"}
    yield figure("map", "Twiddler Fig. 8", title, values=uses / uses.max(), **axes)


def _policies(seen: Observations, n_experts: int) -> Iterator[Figure]:
    """Loads of each policy, replayed as decoding."""
    n_layers, n_used = seen.layers[-1] + 1, seen.experts.shape[2]
    kept = routes(seen, slice(0, max(1, _MAX_ROUTES // (n_layers * n_used))))
    base = Simulation(n_layers, n_experts, n_used, floors=True, low_share=0.3)

    def replayed(capacity: float, policy: str, **given: Any) -> Any:
        own = replace(base, policy=policy, **given)
        pools = replace(own, bits_low=4.0).with_slots(capacity)
        return simulate(kept, replace(pools, bits_low=own.bits_low))

    def row(policy: str, given: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"policy": policy}
        for capacity in CAPACITIES:
            result, random = (replayed(capacity, each, **given) for each in (policy, "random"))
            relative = result.penalty / random.penalty if random.penalty else None
            found[f"penalty at {capacity:.0%} by random's"] = relative
            found[f"hits at {capacity:.0%}"] = result.hit_rate
        return found

    names = policy_names(has_prior=False)
    rows = [row(name, {}) for name in (*names, BELADY)]
    title = "eviction policies, all high; alike where each layer has room for one token's experts alone"
    yield table("EdgeMoE Fig. 14", title, rows)
    rows = [row(name, {"t1": T1, "t2": T2}) for name in names]
    yield table("HOBBIT Fig. 11b, HOBBIT Fig. 18a", f"eviction policies at {T1} and {T2}", rows)
    rows = []
    for capacity in CAPACITIES:
        own = replayed(capacity, "hobbit", weights=(0.0, 1.0, 0.0, 0.0)).hit_rate
        model = replayed(capacity, "lfu").hit_rate
        ratio = own / model if model else None
        rows.append({"in memory": f"{capacity:.0%}", "by sequence": own, "by model": model, "ratio": ratio})
    yield table("HOBBIT Fig. 18b", "hits of LFU with records of the sequence or model", rows)


def _ahead(seen: Observations, blocks: list[int], routers: list[Router] | None) -> Iterator[Figure]:
    """Similarity of routers' inputs, and what they predict."""
    if seen.inputs is None or routers is None or len(seen.layers) < 2:
        return

    def by_distance(rows: np.ndarray) -> dict[str, Any]:
        return {f"{i} ahead": row for i, row in enumerate(rows) if i and not np.isnan(row).all()}

    best, chosen = figures.prediction(seen, routers)
    if np.mean(chosen[0]) < _OWN_ROUTING:
        return
    n_experts = max(len(each.weight) for each in routers)
    for papers, rows, n_chosen, what in (
        ("HOBBIT Fig. 7b", best, 1, "the best expert"),
        ("DAOP Fig. 5", chosen, seen.is_used.sum(axis=1).mean(), "the chosen experts"),
    ):
        title = f"share of {what} that a router names on an earlier layer's input"
        series = {**by_distance(rows), "by chance": [n_chosen / n_experts] * len(blocks)}
        yield by_layer(papers, title, blocks, series, x_label="layer whose input is used")
    recall = [{"predictor": "router", "recall": np.nanmean(chosen[1])}]
    shape = seen.layers[-1] + 1, n_experts, seen.experts.shape[2]
    for name in (each for each in OPTIONS["predictor"][0].choices if each != "router"):
        judged = Simulation(*shape, slots_high=0, predictor=name)
        recall.append({"predictor": name, "recall": simulate(routes(seen, slice(None)), judged).recall})
    yield table("EdgeMoE Fig. 8", "experts of the next layer that are named, learning on", recall)


def skipping(run: Run) -> list[Figure]:
    """Perplexity with the least important selections low or skipped."""
    with run.evaluator() as evaluator:
        chunks = run.chunks(evaluator)
        reference, seen = profile(evaluator, chunks)
        scores = unimportance(observed(seen.weights))[:, seen.is_used]
        n_best = np.count_nonzero(scores == 0, axis=1).min()  # always high
        names = ("skipped", "low") if run.has_low else ("skipped",)
        perplexity = {name: [evaluate.perplexity(reference, chunks)] for name in names}
        divergence = {name: [0.0] for name in names}
        places = [share for share in _SHARES if share <= 1 - n_best / scores.shape[1]]
        for share, name in product(places, names):
            t = figures.threshold_for_share(scores, share)
            quality = evaluator.measure(chunks, reference, t1=t, t2=1.0 if name == "low" else t)
            perplexity[name].append(quality.perplexity)
            divergence[name].append(quality.mean_kl)
    label = "share of the selections, least important first"
    given: dict[str, Any] = {"x": [0.0, *places], "x_label": label}
    series = {"perplexity": perplexity, "KL divergence from all high": divergence}
    return [figure("lines", "HOBBIT Fig. 3b", title, series=each, **given) for title, each in series.items()]


def answers(run: Run) -> list[Figure]:
    """Uses of experts in prompts and in the answers to them."""
    cosines, text = [], run.text
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.csv"
        n_ctx = min(run.file.key("context_length", _CTX), _CTX)
        with Engine(run.model, replace(run.engine(trace=trace), n_ctx=n_ctx)) as engine:
            for i in range(_N_PROMPTS):
                start = i * len(text) // _N_PROMPTS
                prompt = text[start : start + _PROMPT_CHARS]
                list(engine.generate(prompt, _ANSWER, SamplingConfig(temp=0.8, seed=i)))
        found = read_trace(trace)
    for number in np.unique(found.routes["sequence"]):
        of = found.routes[found.routes["sequence"] == number]
        parts = (of[of["counted"] == counted] for counted in (0, 1))
        uses = [use_rates(part, found.n_layers, found.n_experts, 1) for part in parts]
        cosines.append(figures.alike(*(np.reshape(each, (found.n_layers, -1)) for each in uses)))
    if not cosines:
        raise HobbitError("the model gave no answer to any part of the text")
    mean = np.nanmean(cosines, axis=0)
    title = f"Eq. 1: prompt and answer use experts alike, mean cosine {np.nanmean(mean):.3f} over "
    title += f"{len(cosines)} answers of up to {_ANSWER} tokens"
    return [by_layer("DAOP Table II", title, list(range(found.n_layers)), {"cosine": mean})]
