# SPDX-License-Identifier: MIT
"""Parts about precision: what each rule costs at equal bytes, and what each expert costs.

Numbers and costs are fitted on the first half of the text's parts and measured on the second.
"""

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.analysis.figures import threshold_for_share
from bench.analysis.part import NAMES, Figure, Run, figure, table
from pyhobbit.convert.options import Options
from pyhobbit.convert.pipeline import convert
from pyhobbit.errors import HobbitError
from pyhobbit.model.quantize import type_by_name
from pyhobbit.quality.calibration import profile
from pyhobbit.quality.costs import CostRuns
from pyhobbit.quality.evaluate import Chunk, Costs, Evaluator, Quality
from pyhobbit.quality.search import Bound, Trials, cheapest_by_gate, cheapest_by_price
from pyhobbit.routing.observe import observed
from pyhobbit.routing.rules import unimportance

TYPES = ("q8_0", "q6_k", "q5_k", "q5_0", "iq4_nl", "q4_0", "q3_k", "q2_k")  # rows must suit


@contextlib.contextmanager
def _evaluators(run: Run, *rules: str) -> Iterator[dict[str, Evaluator]]:
    run.need_low()
    with contextlib.ExitStack() as stack:
        yield {rule: stack.enter_context(run.evaluator(rule)) for rule in rules}


def _halves(chunks: list[Chunk]) -> tuple[list[Chunk], list[Chunk]]:
    if len(chunks) < 2:
        raise HobbitError("the text has one part only; give a longer one")
    return chunks[: len(chunks) // 2], chunks[len(chunks) // 2 :]


def _row(name: str, quality: Quality) -> dict[str, Any]:
    q = quality
    mix = " / ".join(f"{100 * share:.1f}" for share in (q.share_high, q.share_low, q.share_skipped))
    setting = ", ".join(f"{name} {number:.4g}" for name, number in q.numbers.items())
    return {
        "experts": name, "setting": setting, "high / low / skipped, %": mix,
        "KiB per token": q.bytes_per_token / 1024, "perplexity": q.perplexity, "ratio": q.perplexity_ratio,
        "mean KL": q.mean_kl, "at most": q.kl_at_most, "99 % KL": q.p99_kl,
        "total variation": q.total_variation, "same top-1": q.same_top1,
    }  # fmt: skip


class _Fitted:
    """The searches of the opened rules on one text, each setting measured once."""

    def __init__(self, opened: dict[str, Evaluator], chunks: list[Chunk]) -> None:
        self.reference, self.seen = profile(opened["gate"], chunks)
        self._opened = opened
        self._trials = {rule: Trials(opened[rule], chunks, self.reference) for rule in opened}
        self.costs: dict[str, Costs] = {}
        for rule in set(opened) & {"price", "edgemoe"}:
            runs = CostRuns(opened[rule], chunks, self.reference, self.seen)
            self.costs[rule] = runs.by_layer() if rule == "price" else runs.by_expert()

    def cheapest(self, rule: str, max_kl: float) -> Quality:
        bound = Bound(max_kl)
        if rule == "gate":
            return cheapest_by_gate(self._trials[rule], bound, unimportance(observed(self.seen.weights)))
        return cheapest_by_price(self._trials[rule], bound, self.costs[rule], self.seen)

    def measured(self, rule: str, max_kl: float, chunks: list[Chunk], reference: np.ndarray) -> Quality:
        """The cheapest setting on other chunks."""
        q = self.cheapest(rule, max_kl)
        return self._opened[rule].measure(chunks, reference, **q.numbers)


def rules(run: Run) -> list[Figure]:
    """Bytes at equal divergence: gate and price, beside random choices and skipping."""
    with _evaluators(run, "gate", "price") as opened, run.evaluator("random") as random:
        gate = opened["gate"]
        chunks, kept = _halves(run.chunks(gate))
        reference, seen = profile(gate, kept)
        scores = unimportance(observed(seen.weights))
        found = {
            "all high": gate.measure(kept, reference),
            "all low": random.measure(kept, reference, t1=0.0),
            "HOBBIT's thresholds, 0.6 and 0.9": gate.measure(kept, reference, t1=0.6, t2=0.9),
            "convert's thresholds, 0.6 and 1": gate.measure(kept, reference, t1=0.6),
        }
        rows = [_row(name, quality) for name, quality in found.items()]
        fitted = _Fitted(opened, chunks)
        for bound in run.max_kl:
            fits = {rule: fitted.measured(rule, bound, kept, reference) for rule in opened}
            rows += [_row(f"{NAMES[rule]}, KL at most {bound:g}", quality) for rule, quality in fits.items()]
            share = fits["gate"].bytes_per_token / found["all high"].bytes_per_token
            high_bytes, low_bytes = gate.info.mean_expert_bytes
            at_bytes = max(0.0, (share - low_bytes / high_bytes) / (1 - low_bytes / high_bytes))
            t = threshold_for_share(scores, 1 - share)
            rows.append(_row("- random, at gate's bytes", random.measure(kept, reference, t1=at_bytes)))
            rows.append(_row("- skipping, at gate's bytes", gate.measure(kept, reference, t1=t, t2=t)))
    return [table("Precision rules, HOBBIT Fig. 5b", "bytes at equal divergence", rows)]


def widths(run: Run) -> list[Figure]:
    """Each expert alone in low precision, and the widths that follow for each bound."""
    with _evaluators(run, "gate", "edgemoe") as opened:
        chunks, kept = _halves(run.chunks(opened["gate"]))
        fitted = _Fitted(opened, chunks)
        reference = opened["gate"].reference(kept)
        found = {bound: fitted.measured("edgemoe", bound, kept, reference) for bound in run.max_kl}
        low = np.reshape(fitted.costs["edgemoe"].low, (opened["gate"].info.n_layers, -1))
    rows = [_row(f"{NAMES['edgemoe']}, KL at most {bound:g}", quality) for bound, quality in found.items()]
    used = low[low > 0]
    title = "divergence with one expert alone in low precision, nats: "
    title += f"{used.min():.2g} to {used.max():.2g}, median {np.median(used):.2g}"
    return [
        figure("map", "EdgeMoE Fig. 7a", title, values=low, x_label="expert", y_label="layer"),
        table("EdgeMoE Fig. 17, EdgeMoE Table II", "widths by the loss that is allowed", rows),
    ]


def types(run: Run) -> list[Figure]:
    """All experts in each smaller type, and EdgeMoE's bounds of the widths (III-B).

    For each limit these are the smallest type that keeps it, and the next smaller one.
    """
    high = next(tier for tier in run.file.tiers if tier.name == "high")
    fewer = [each for each in map(type_by_name, TYPES) if each.bits_per_weight < high.bits_per_weight]
    smaller = [each for each in fewer if any(t.ne[0] % each.block == 0 for t in run.file.routed_tensors())]
    if not smaller:
        raise HobbitError(f"the experts have {high.bits_per_weight:.3g} bits, and no usual type has fewer")
    found, rows = {"keep": (0.0, run.expert_bytes)}, []
    for each in smaller:
        quality, n_bytes = _all_in(run, each.name)
        found[each.name] = (quality.mean_kl, n_bytes)
        rows.append({**_row(each.name, quality), "of the model's bytes": n_bytes / run.expert_bytes})
    pairs = []
    for bound in run.max_kl:
        n_bytes, within = min(
            (n_bytes, name) for name, (mean_kl, n_bytes) in found.items() if mean_kl <= bound
        )
        beyond = [(n, name) for name, (_, n) in found.items() if n < n_bytes]
        options = f" --low {max(beyond)[1]}" if beyond else ": all experts in it keep the limit"
        pairs.append({"KL at most": bound, "pyhobbit convert": f"--high {within}{options}"})
    return [
        table("EdgeMoE Fig. 6", "all experts in one smaller type", rows),
        table("EdgeMoE Fig. 6", "two types for each limit: the calibration then chooses by expert", pairs),
    ]


def _all_in(run: Run, name: str) -> tuple[Quality, int]:
    """The quality with all experts in a type, and their bytes."""
    sidecar = run.folder / f"{name}.hobbit.gguf"
    options = Options(run.model, low=name, sidecar=True, output=sidecar, force=True)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # it names commands for a file that goes again
            convert(options)
        with Evaluator(run.model, run.engine(sidecar=sidecar), "random") as evaluator:
            chunks = run.chunks(evaluator)
            quality = evaluator.measure(chunks, evaluator.reference(chunks), t1=0.0)
            return quality, evaluator.info.tier_bytes_low
    finally:
        sidecar.unlink(missing_ok=True)
