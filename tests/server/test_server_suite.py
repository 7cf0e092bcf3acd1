# SPDX-License-Identifier: MIT
"""The script that runs llama.cpp's own server tests works; all of them: python tests/server_suite/run.py"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "server_suite" / "run.py"


@pytest.mark.slow
def test_a_part_of_the_suite_passes_as_with_stock() -> None:
    parts = ["unit/test_tokenize.py", "unit/test_metrics.py"]
    done = subprocess.run([sys.executable, SCRIPT, *parts], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^ours: +1\d ran, 1\d passed, 0 failed, 0 skipped$", done.stdout, re.MULTILINE)
    assert done.stdout.endswith("fails with ours and passes with stock: 0\n")
