# SPDX-License-Identifier: MIT
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.analysis import figures, routing
from bench.results import page
from pyhobbit.errors import HobbitError
from pyhobbit.model.router import Gating, Router
from pyhobbit.routing.observe import Observations, Recorder


def _routed(
    n_layers: int, n_experts: int, n_used: int, n_tokens: int = 256
) -> tuple[Observations, list[Router]]:
    """A residual stream that drifts from layer to layer, with random routers."""
    random = np.random.default_rng(n_layers)
    n_values = 32
    stream = np.cumsum(random.normal(size=(n_layers, n_tokens, n_values)) * 0.3, axis=0) + random.normal(
        size=(n_tokens, n_values)
    )
    inputs = stream.swapaxes(0, 1).astype(np.float32)
    routers = [Router(random.normal(size=(n_experts, n_values)).astype(np.float32)) for _ in range(n_layers)]
    experts = np.stack([router.choose(inputs[:, i], n_used) for i, router in enumerate(routers)], 1)
    weights = np.sort(random.dirichlet(np.ones(n_used), size=(n_tokens, n_layers)))[..., ::-1]
    seen = Observations(
        layers=list(range(n_layers)),
        sequences=np.repeat(np.arange(4), n_tokens // 4),
        experts=experts,
        weights=weights.astype(np.float32),
        output_norms=random.uniform(1, 2, size=weights.shape).astype(np.float32),
        inputs=inputs,
        input_tokens=np.arange(n_tokens),
    )
    return seen, routers


def test_threshold_leaves_the_wanted_share_above() -> None:
    scores = np.array([[0, 0.5, 0.8], [0, 0.6, 0.7]])
    for share, n_above in ((0, 0), (1 / 6, 1), (0.5, 3), (4 / 6, 4)):
        threshold = figures.threshold_for_share(scores, share)
        assert (scores > threshold).sum() == n_above
    assert figures.threshold_for_share(scores, 0.5) == 0.5


#
# importance
#


def test_correlation_is_pearsons_and_ignores_the_scale_of_a_layer() -> None:
    random = np.random.default_rng(0)
    weights = random.uniform(size=(50, 2, 3)).astype(np.float32)
    norms = random.uniform(1, 3, size=weights.shape).astype(np.float32)
    by_layer, overall = figures.importance(*figures.relative_importance(weights, norms))
    for layer in (0, 1):
        gate = weights[:, layer].ravel().astype(float)
        expected = np.corrcoef(gate, gate * norms[:, layer].ravel())[0, 1]
        assert by_layer[layer] == pytest.approx(expected)
    _, scaled = figures.importance(
        *figures.relative_importance(weights, norms * np.array([1, 100])[None, :, None])
    )
    assert scaled == pytest.approx(overall)


def test_equal_norms_correlate_fully() -> None:
    weights = np.array([[[0.7, 0.3]], [[0.6, 0.4]]], np.float32)
    _, overall = figures.importance(*figures.relative_importance(weights, np.full_like(weights, 3)))
    assert overall == pytest.approx(1)


#
# looking ahead
#


def test_prediction_counts_best_and_any_of_the_chosen() -> None:
    router = Router(np.eye(3, dtype=np.float32))
    inputs = np.array([[[3, 2, 1], [2, 3, 1]], [[3, 2, 1], [1, 2, 3]]], np.float32)
    experts = np.array([[[0, 1], [1, 0]], [[0, 1], [2, 1]]])
    seen = Observations([0, 1], np.zeros(2), experts, None, None, inputs, np.arange(2))
    best, chosen = figures.prediction(seen, [router, router])
    assert best[1, 0] == 0  # 0 predicted; 1 and 2 chosen
    assert chosen[1, 0] == 0.75  # 0, 1 predicted; 0, 1 and 1, 2 chosen
    assert chosen[0].tolist() == [1, 1]  # each layer's own choice


def test_selection_bias_is_added_to_probabilities() -> None:
    outputs = np.array([[2.0, 1.0, 0.0]], np.float32)
    bias = np.array([0, 0, 0.5])
    for gating, best in (
        (Gating.SIGMOID, 2),
        (Gating.SOFTMAX, 0),
        (Gating.SQRT_SOFTPLUS, 0),
        (Gating.NONE, 0),
    ):
        router = Router(np.eye(3, dtype=np.float32), selection_bias=bias, gating=gating)
        assert router.choose(outputs, 1).tolist() == [[best]], gating


def test_experts_come_from_the_best_groups() -> None:
    # groups {0, 1}, {2, 3}, {4, 5}, worth 5, 6 and 4: the best expert is in the worst group
    outputs = np.array([[3.0, 2.0, 3.5, 2.5, 4.0, 0.0]], np.float32)
    router = Router(np.eye(6, dtype=np.float32), gating=Gating.NONE, n_groups=3, n_groups_used=2)
    assert router.choose(outputs, 4).tolist() == [[2, 0, 3, 1]]


#
# use
#


def test_uses_are_alike_where_they_are_of_the_same_experts() -> None:
    first, second = np.array([[2, 2, 0], [1, 0, 0], [0, 0, 0]]), np.array([[1, 1, 0], [0, 3, 0], [1, 0, 0]])
    np.testing.assert_allclose(figures.alike(first, second), [1.0, 0.0, np.nan])
    np.testing.assert_allclose(figures.alike(np.array([[2, 0]]), np.array([[1, 1]])), [1 / np.sqrt(2)])


def test_paths_are_counted_by_their_best_experts() -> None:
    experts = np.array([[[0, 1], [2, 3]], [[0, 2], [2, 1]], [[0, 1], [3, 2]], [[1, 0], [2, 3]]])
    assert figures.path_shares(experts).tolist() == [0.5, 0.25, 0.25]


#
# collecting
#


def _events(n_tokens: int, n_layers: int, batch: int, n_values: int = 4) -> list[SimpleNamespace]:
    """Each value says where it comes from: 1000 layer + token."""
    events = []
    for start in range(0, n_tokens, batch):
        tokens = np.arange(start, min(start + batch, n_tokens))
        for layer in range(n_layers):
            values = (1000 * layer + tokens)[:, None]
            events.append(
                SimpleNamespace(
                    layer=layer,
                    experts=np.repeat(values, 2, 1).astype(np.int32),
                    weights=np.repeat(values, 2, 1).astype(np.float32),
                    output_norms=None,
                    router_input=np.repeat(values, n_values, 1).astype(np.float32),
                )
            )
    return events


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_recorder_puts_tokens_in_order_and_keeps_as_many_inputs_as_fit(batch: int) -> None:
    recorder = Recorder(3, 7, 2, max_input_bytes=4 * 4 * 2 * 6)
    for event in _events(21, 2, batch):
        recorder(event)
    seen = recorder.observations()
    expected = np.arange(21)[:, None] + [0, 1000]
    np.testing.assert_array_equal(seen.experts[:, :, 0], expected)
    np.testing.assert_array_equal(seen.weights[:, :, 1], expected)
    assert seen.output_norms is None
    assert seen.input_tokens.tolist() == [0, 4, 8, 12, 16, 20]
    np.testing.assert_array_equal(seen.inputs[:, :, 3], expected[seen.input_tokens])
    assert seen.sequences.tolist() == [0] * 7 + [1] * 7 + [2] * 7


def test_recorder_leaves_out_layers_that_never_run() -> None:
    recorder = Recorder(1, 4, 3, 1 << 20)
    for event in _events(4, 2, 4):
        recorder(event)
    seen = recorder.observations()
    assert seen.layers == [0, 1]
    assert seen.experts.shape == (4, 2, 2)


def test_recorder_refuses_layers_that_saw_a_part() -> None:
    recorder = Recorder(1, 4, 2, 1 << 20)
    for event in _events(4, 2, 2)[:-1]:
        recorder(event)
    with pytest.raises(HobbitError, match="saw 4, 2 of 4 tokens"):
        recorder.observations()


#
# figures and their page
#


def _figures(n_layers: int, n_experts: int, n_used: int, **changed: Any) -> list[dict[str, Any]]:
    seen, routers = _routed(n_layers, n_experts, n_used)
    seen = replace(seen, **changed)
    uses, policies = routing._uses(seen, n_experts), routing._policies(seen, n_experts)
    return [*routing._gates(seen), *uses, *policies, *routing._ahead(seen, seen.layers, routers)]


def _papers(found: list[dict[str, Any]]) -> set[str]:
    return {name for each in found for name in each["papers"]}


@pytest.mark.parametrize(("n_layers", "n_experts", "n_used"), [(12, 64, 8), (2, 4, 1), (1, 4, 2)])
def test_every_shape_has_a_page(n_layers: int, n_experts: int, n_used: int) -> None:
    found = _figures(n_layers, n_experts, n_used)
    assert ("HOBBIT Fig. 7b" in _papers(found)) == (n_layers > 1)
    assert ("HOBBIT Fig. 5a" in _papers(found)) == (n_used > 1)
    line = json.loads(json.dumps({"part": "routing", "figures": found}, allow_nan=False))
    shown = page({"model": "<m>"}, {"routing": line})
    assert page({"model": "<m>"}, {"routing": line}) == shown
    assert shown.count("data:image/svg+xml") == sum(each["kind"] != "table" for each in found)
    assert "**EdgeMoE Fig. 4**: " in shown
    assert "&lt;m&gt;" in shown
    assert "http" not in shown.replace("http://www.w3.org", "")


def test_what_the_engine_does_not_see_is_left_out() -> None:
    blind = _papers(_figures(3, 8, 2, weights=None, output_norms=None, inputs=None))
    assert _papers(_figures(3, 8, 2)) - blind == {
        *("HOBBIT Fig. 5a", "HOBBIT Fig. 7b", "DAOP Fig. 5", "EdgeMoE Fig. 8"),
    }


def test_routers_that_do_not_explain_the_choice_predict_nothing() -> None:
    seen, routers = _routed(3, 8, 2)
    assert not list(routing._ahead(seen, seen.layers, routers[::-1]))


def test_a_placement_hits_the_uses_of_its_experts() -> None:
    uses = np.array([[1, 5, 0, 2], [3, 0, 8, 1]])
    assert figures.placement_hits(uses, 0.25) == (13 / 20, 0)
    assert figures.placement_hits(uses, 0.5) == (18 / 20, 2 / 20)
    assert figures.placement_hits(uses, 1.0) == (1, 1)
