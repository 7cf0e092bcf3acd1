# SPDX-License-Identifier: MIT
"""Some schedules of a disk that is late, fails, disappears and comes back (disk.py)."""

from collections import Counter
from pathlib import Path

import disk
import matrix
import models
import pytest


def test_no_disk_makes_a_wrong_text(tmp_path: Path) -> None:
    model = models.tiny_tiers("q8_0", "q4_0")
    try:
        results = disk.run_all(model, tmp_path, n=24, seed=7, jobs=2)
    except disk.NoMountError as e:
        pytest.skip(str(e.strerror))
    bad = [f"{each[0]}: {each[1]}\n{each[2]}" for each in results if each[1] not in matrix.GOOD]
    assert not bad, "\n\n".join(bad)
    counts = Counter(outcome for _, outcome, _ in results)
    assert counts["right"] > 3
    assert counts["clear"] > 3
