# SPDX-License-Identifier: MIT
import fuzz


def test_damaged_files_are_read_or_refused_with_a_sentence() -> None:
    assert fuzz.fuzz_readers(150, seed=7) == 0


def test_damaged_headers_are_loaded_or_refused() -> None:
    assert fuzz.fuzz_loads(12, seed=7) == 0
