# SPDX-License-Identifier: MIT
"""Eq. 2 by hand. tests/quality has the rule price."""

import numpy as np
import pytest

from pyhobbit.routing.rules import unimportance


def test_scores_sum_the_normalised_weights_of_the_experts_ranked_before() -> None:
    weights = np.array([[0.5, 0.25, 0.25], [1.0, 6.0, 3.0], [0.2, 0.2, 0.4]], np.float32)
    expected = [[0, 0.5, 0.75], [0.9, 0, 0.6], [0.5, 0.75, 0]]
    np.testing.assert_allclose(unimportance(weights), expected, atol=1e-7)


@pytest.mark.parametrize("weights", [[0.0, 0.0], [-1.0, 0.5], [np.inf, 1.0], [np.nan, 1.0]])
def test_weights_that_do_not_rank_score_nothing(weights: list[float]) -> None:
    assert unimportance(np.array(weights, np.float32)).tolist() == [0, 0]
