# SPDX-License-Identifier: MIT
"""The rule price: decisions, costs and the search for a price."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import models
import numpy as np
import pytest

from pyhobbit.errors import HobbitError
from pyhobbit.quality.costs import less_important_half
from pyhobbit.quality.evaluate import Costs, Evaluator, Quality
from pyhobbit.quality.search import Bound, Trials, cheapest_by_price, price_candidates
from pyhobbit.routing.observe import Observations
from pyhobbit.routing.rules import losses, squared_weights
from pyhobbit.routing.trace import ROUTE, Simulation, simulate
from pyhobbit.settings.config import CacheConfig, EngineConfig

HELDOUT = Path(__file__).resolve().parent.parent / "tiny_moe/heldout.txt"
RNG = np.random.default_rng(1)
SKIPPED, LOW, HIGH = 0, 1, 2  # as in struct hobbit_layer_event


def observations(weights: np.ndarray, n_experts: int) -> Observations:
    n_tokens, n_layers, n_used = weights.shape
    experts = np.argsort(RNG.random((n_tokens, n_layers, n_experts)), axis=-1)[..., :n_used].astype(np.int32)
    return Observations(
        layers=list(range(n_layers)),
        sequences=np.zeros(n_tokens, np.int64),
        experts=experts,
        weights=weights.astype(np.float32),
        output_norms=None,
        inputs=None,
        input_tokens=np.arange(0),
    )


#
# decisions
#


def decide_by_price(
    loss: np.ndarray,
    low_cost: np.ndarray | float,
    skip_cost: np.ndarray | float,
    price: float,
    low_bytes: float,
) -> np.ndarray:
    """SKIPPED, LOW or HIGH by the rule price or edgemoe: uint8 of the shape of `loss`, see losses().

    Computed as if no version were resident, which would have no price.
    low_cost, skip_cost: [..., K].  low_bytes: of an expert in low precision by those of one in high.
    """
    is_first = np.arange(loss.shape[-1]) == loss.argmax(axis=-1)[..., None]
    with np.errstate(invalid="ignore"):  # 0 * inf
        low = loss * low_cost + price * low_bytes
        skip = np.where(is_first, np.inf, loss * skip_cost)
    low, skip = (np.nan_to_num(total, nan=np.inf, posinf=np.inf) for total in (low, skip))
    return np.where(np.minimum(low, skip) < price, np.where(skip < low, SKIPPED, LOW), HIGH).astype(np.uint8)


@pytest.mark.parametrize(
    ("price", "wanted"),
    [
        (0.0, (HIGH, HIGH, HIGH)),
        (0.06, (HIGH, HIGH, LOW)),
        (0.13, (HIGH, LOW, LOW)),
        (0.34, (LOW, LOW, LOW)),
        (0.49, (LOW, LOW, SKIPPED)),
        (1e9, (LOW, SKIPPED, SKIPPED)),
    ],
)
def test_decisions_by_hand(price: float, wanted: tuple[int, ...]) -> None:
    """Squares 0.25, 0.09, 0.04; low costs w^2 and 0.25 bytes, skipping 4 w^2."""
    weights = np.array([[[5.0, 3.0, 2.0]]])
    found = decide_by_price(losses(weights, "price"), 1.0, 4.0, price, 0.25)
    assert tuple(found[0, 0]) == wanted


def test_weights_that_rank_nothing_are_high() -> None:
    weights = np.array([[[0.0, 0.0], [np.nan, 1.0]]])
    for rule in ("price", "edgemoe"):
        assert np.all(decide_by_price(losses(weights, rule), 1.0, 1.0, 1e9, 0.25) == HIGH)


@pytest.mark.parametrize("rule", ["price", "edgemoe"])
@pytest.mark.parametrize("per_expert", [False, True])
def test_the_engine_decides_likewise(rule: str, per_expert: bool) -> None:
    """Replayed with pools that hold nothing, so that every use is missing."""
    n_layers, n_experts, n_used = 3, 6, 3
    seen = observations(np.sort(RNG.random((40, n_layers, n_used)))[..., ::-1], n_experts)
    n_costs = n_layers * n_experts if per_expert else n_layers
    costs = Costs(tuple(RNG.random(n_costs).tolist()), tuple((4 * RNG.random(n_costs)).tolist()))
    routes = np.zeros(seen.experts.shape, ROUTE)
    routes["token"] = np.arange(40)[:, None, None]
    routes["layer"] = np.arange(n_layers)[:, None]
    routes["expert"], routes["weight"], routes["counted"] = seen.experts, seen.weights, 1
    low, skip = (values.astype(np.float32) for values in costs.of(seen.layers, seen.experts, n_layers))
    if rule == "edgemoe":
        skip = np.full(skip.shape, np.inf)
    for price in (0.01, 0.1, 0.6, 2.0):
        simulation = Simulation(
            n_layers=n_layers,
            n_experts=n_experts,
            n_used=n_used,
            slots_high=0,
            rule=rule,
            price=price,
            low_costs=costs.low,
            skip_costs=costs.skip,
            bits_high=16,
            bits_low=4,
        )
        result = simulate(routes.ravel(), simulation)
        decided = decide_by_price(losses(seen.weights, rule), low, skip, price, 0.25)
        counts = [int(np.sum(decided == precision)) for precision in (HIGH, LOW, SKIPPED)]
        assert [result.misses_high, result.misses_low, result.skipped] == counts
        assert result.misses_high > 0 or price > 0.5


def test_a_simulation_refuses_what_cannot_be() -> None:
    routes = np.zeros(1, ROUTE)
    routes["counted"], routes["weight"] = 1, 1
    good = Simulation(1, 2, 1, slots_high=1, rule="price", price=1, low_costs=(1,), skip_costs=(1,))
    simulate(routes, good)
    for change, message in (
        ({"rule": "best"}, "rule is 'best': choose one of edgemoe gate"),
        ({"rule": "gate"}, "price belongs to the rule price, and the rule here is gate"),
        ({"price": -1.0}, "price is -1: it must lie between"),
        ({"price": math.nan}, "price is nan: it must lie between"),
        ({"low_costs": (), "skip_costs": ()}, "need the costs of a calibration"),
        ({"low_costs": (1, 1, 1), "skip_costs": (1, 1, 1)}, "there are 3 costs"),
        ({"policy": "belady"}, "belady is the bound for one pool"),
    ):
        with pytest.raises(HobbitError, match=message):
            simulate(routes, replace(good, **change))


#
# costs
#


def test_the_less_important_half_leaves_out_first_experts() -> None:
    square = np.array([[0.81, 0.01], [0.49, 0.09], [0.36, 0.16]])
    threshold, lost = less_important_half(square)
    assert threshold == pytest.approx(0.09)
    assert lost == pytest.approx(0.01 / 3)
    assert less_important_half(np.full((2, 1), 0.5)) == (0.0, 0.0)


def test_costs_of_selections_by_layer_and_by_expert() -> None:
    experts = np.array([[[1, 0]], [[2, 1]]])
    low, skip = Costs((1.0, 2.0), (3.0, 4.0)).of([1], experts, 2)
    assert low.tolist() == [[[2, 2]], [[2, 2]]]
    assert skip.tolist() == [[[4, 4]], [[4, 4]]]
    low, _ = Costs(tuple(range(6)), (0.0,) * 6).of([1], experts, 2)
    assert low.tolist() == [[[4, 3]], [[5, 4]]]


#
# the search
#


class Invented:
    """An evaluator of one layer: the divergence is the sum of the losses that the rule expects."""

    rule = "price"
    info = SimpleNamespace(n_layers=1, mean_expert_bytes=(100.0, 25.0))

    def __init__(self, seen: Observations) -> None:
        self.seen = seen
        self.prices: list[float] = []

    def set_costs(self, costs: Costs) -> None:
        self.costs = costs

    def measure(self, *_: object, price: float = 0.0) -> Quality:
        self.prices.append(price)
        low, skip = self.costs.of([0], self.seen.experts, 1)
        decided = decide_by_price(losses(self.seen.weights, "price"), low, skip, price, 0.25)
        loss = squared_weights(self.seen.weights) * np.select(
            [decided == LOW, decided == SKIPPED], [low, skip], 0.0
        )
        shares = [float(np.mean(decided == p)) for p in (HIGH, LOW, SKIPPED)]
        return Quality(
            numbers={"price": price},
            perplexity=1,
            perplexity_ratio=1,
            mean_kl=float(loss.sum(axis=-1).mean()),
            p99_kl=0,
            total_variation=0,
            same_top1=1,
            share_high=shares[0],
            share_low=shares[1],
            share_skipped=shares[2],
            bytes_per_token=shares[0] + shares[1] / 4,
            kl_at_most=math.inf,
        )


@pytest.mark.parametrize("max_kl", [0.0, 1e-3, 0.05, 0.3, 100.0])
def test_the_highest_price_within_the_bound_is_found_with_few_trials(max_kl: float) -> None:
    seen = observations(np.sort(RNG.random((200, 1, 4)))[..., ::-1], 8)
    evaluator = Invented(seen)
    costs = Costs((1.0,), (5.0,))
    bound = Bound(max_kl)
    found = cheapest_by_price(Trials(evaluator, [], np.empty(0)), bound, costs, seen)
    assert found.mean_kl <= max_kl
    assert len(evaluator.prices) <= 20
    prices = price_candidates(squared_weights(seen.weights), *costs.of([0], seen.experts, 1), 0.25)
    next_price = next((p for p in prices if p > found.numbers["price"]), None)
    if next_price is not None:
        assert evaluator.measure(price=next_price).mean_kl > max_kl
    assert (found.numbers["price"] == 0) == (max_kl == 0)


def test_without_a_low_tier_prices_are_those_of_skipping() -> None:
    squared = np.array([[[0.25, 0.04]]])
    low, skip = np.full(squared.shape, math.inf), np.full(squared.shape, 2.0)
    assert min(price_candidates(squared, low, skip, 0.0)) >= 0.08
    assert price_candidates(squared, low, np.full(squared.shape, math.inf), 0.0) == []


#
# in the engine
#


def test_price_0_has_the_bits_of_high_precision_and_a_price_saves_bytes() -> None:
    config = EngineConfig(CacheConfig(pools=64_000_000), 64, n_threads=1)
    with Evaluator(models.tiny_tiers("f16", "tq2_0"), config, "price") as evaluator:
        chunks = evaluator.chunks(HELDOUT.read_text())[:2]
        evaluator.set_costs(Costs((0.01,) * 6, (0.1,) * 6))
        reference = evaluator.reference(chunks)
        free = evaluator.measure(chunks, reference)
        assert (free.mean_kl, free.same_top1, free.share_high) == (0, 1, 1)
        priced = evaluator.measure(chunks, reference, price=1e-3)
        assert priced.mean_kl > 0
        assert priced.bytes_per_token < free.bytes_per_token
        all_low = evaluator.measure(chunks, reference, price=1e9)
        assert all_low.share_high == 0
        assert all_low.share_skipped == pytest.approx(0.5)  # the second of two experts
        with pytest.raises(HobbitError, match="there are 5 costs of low precision"):
            evaluator.set_costs(Costs((0.0,) * 5, (0.0,) * 5))
