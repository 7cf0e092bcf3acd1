# SPDX-License-Identifier: MIT
"""A file with three types for its experts: one in the high tier, two in the low one."""

from pathlib import Path

import models
import numpy as np
import pytest
from several_types import HIGH, N_EXPERTS, N_LAYERS, divergence, evaluator, write_mixed

pytestmark = pytest.mark.model


def test_each_expert_is_computed_in_its_own_type(tmp_path: Path) -> None:
    is_coarse = np.arange(N_LAYERS * N_EXPERTS).reshape(N_LAYERS, N_EXPERTS) % 3 == 0
    types = [["q2_k" if coarse else "q4_0" for coarse in row] for row in is_coarse]
    mixed = write_mixed(types, tmp_path / "mixed.gguf")
    with evaluator(mixed, "gate") as opened:
        chunks = opened.chunks((models.TINY / "heldout.txt").read_text(), at_most=1)
        reference = opened.reference(chunks)
    for kind, where in (("q2_k", is_coarse), ("q4_0", ~is_coarse)):
        alone = divergence(models.tiny_tiers(HIGH, kind), where, chunks, reference)
        assert divergence(mixed, where, chunks, reference) == alone > 0
    both, fine, coarse = (
        divergence(model, np.ones_like(is_coarse), chunks, reference)
        for model in (mixed, models.tiny_tiers(HIGH, "q4_0"), models.tiny_tiers(HIGH, "q2_k"))
    )
    assert fine < both < coarse
