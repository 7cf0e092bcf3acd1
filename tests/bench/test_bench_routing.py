# SPDX-License-Identifier: MIT
"""The routing of a modelled machine."""

from bench.harness import trace as routing


def test_a_sweep_chooses_every_expert() -> None:
    swept = routing.sweep(routing.MoeShape(2, 10, 4))
    assert swept.shape == (3, 2, 4)
    for layer in range(2):
        assert set(swept[:, layer].ravel().tolist()) == set(range(10))
