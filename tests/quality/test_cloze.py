# SPDX-License-Identifier: MIT
"""Cloze tasks are answered token by token, so that rules for single tokens act."""

import json
from pathlib import Path

import cloze
import models
import numpy as np
import pytest

pytestmark = pytest.mark.model

N_TASKS = 12
TEXT = models.TINY / "heldout.txt"


@pytest.fixture(scope="module")
def tasks() -> list[cloze.Task]:
    with cloze.opened(models.tiny(), 0.5, cloze.HIGH) as session:
        return cloze.of_text(session.model.tokenize(TEXT.read_text()), N_TASKS)


def answered(tasks: list[cloze.Task], settings: dict[str, object], share: float = 0.5) -> cloze.Answers:
    with cloze.opened(models.tiny(), share, settings) as session:
        return cloze.answers(session, tasks)


def chances(found: cloze.Answers) -> np.ndarray:
    return found.chance.astype(float)


def test_a_task_has_its_own_end_once(tasks: list[cloze.Task]) -> None:
    assert len(tasks) == N_TASKS
    for task in tasks:
        assert (len(task.context), len(task.choices)) == (cloze.CONTEXT, cloze.N_CHOICES)
        assert len({tuple(choice) for choice in task.choices}) == cloze.N_CHOICES
        assert len(task.context) + sum(map(len, task.choices)) == 24


def test_mobile_is_all_high_where_no_token_is_sure_enough_and_half_where_all_are(
    tasks: list[cloze.Task],
) -> None:
    high, all_twice, rank, once = (
        answered(tasks, dict(settings))
        for settings in (cloze.HIGH, cloze.mobile(1.0), cloze.ARMS["rank"], cloze.mobile(0.0))
    )
    assert all_twice.stats.tokens_repeated == all_twice.n_tokens == high.n_tokens
    np.testing.assert_array_equal(chances(all_twice), chances(high))
    assert once.stats.tokens_repeated == 0
    np.testing.assert_array_equal(chances(once), chances(rank))
    assert np.abs(chances(rank) - chances(high)).max() > 0


def test_daop_replaces_missing_experts(tasks: list[cloze.Task]) -> None:
    found = answered(tasks, dict(cloze.ARMS["degraded"]), 0.25)
    assert found.stats.selections_replaced > 0


def test_static_widths_are_those_of_a_report(tasks: list[cloze.Task]) -> None:
    costs = cloze.costs_of(models.ROOT / "docs/results/tiny-f16-amd-epyc.jsonl")
    settings = {**cloze.HIGH, **cloze.STRICT, "rule": "edgemoe"}
    for price, share_low in ((1.0, 1), (0.0, 0)):
        given = {**settings, "costs": (costs, price)}
        with cloze.opened(models.tiny_tiers("q8_0", "q4_0"), 0.5, given) as session:
            stats = cloze.answers(session, tasks[:1]).stats
        assert stats.selections_low == share_low * stats.selections


def test_static_widths_keep_their_limit_on_the_text_of_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = cloze.costs_of(models.ROOT / "docs/results/tiny-f16-amd-epyc.jsonl")
    model, found = models.tiny_tiers("f16", "q4_0"), []
    for limit in (1e-9, 0.003, 1.0):
        monkeypatch.setattr(cloze, "MAX_KL", limit)
        found.append(cloze.fitted(model, costs, TEXT.read_text()))
    none, some, most = found
    saved = 1 - 4.5 / 16  # bytes of q4_0 beside f16
    n_low = [sum(cost < price * saved for cost in costs.low) for price in (none, some, most)]
    assert n_low[0] == 0 < n_low[1] < n_low[2] == len(costs.low)


def test_own_tasks_are_lines_of_json(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"context": "def read_file(", "choices": ["path):\n", "0"], "right": 0}))
    with cloze.opened(models.tiny(), 0.5, cloze.HIGH) as session:
        (task,) = cloze.of_user(session, file)
        assert cloze.answers(session, [task]).chosen.tolist() == [0]
        file.write_text(json.dumps({"context": "x", "choices": ["y", ""], "right": 0}))
        with pytest.raises(SystemExit, match=r"task 1 of .* has an empty part"):
            cloze.of_user(session, file)


def test_an_interval_is_of_paired_differences() -> None:
    mean, half = cloze.interval(np.array([1.0, -1.0, 0.0, 0.0]))
    assert mean == 0
    assert half == pytest.approx(1.96 * (2 / 3) ** 0.5 / 2)
