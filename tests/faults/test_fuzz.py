# SPDX-License-Identifier: MIT
import subprocess
import sys

import fuzz


def test_damaged_files_are_read_or_refused_with_a_sentence() -> None:
    assert fuzz.fuzz_readers(150, seed=7) == 0


def test_damaged_headers_are_loaded_or_refused() -> None:
    # a process of its own: children of one that has computed cannot compute
    done = subprocess.run(
        [sys.executable, fuzz.__file__, "--loads", "12", "--crafted", "6", "--seed", "7"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
