# SPDX-License-Identifier: MIT
"""The mutants of listed.py are changes of the sources as they are today."""

import pytest
from listed import LISTED
from overlay import Mutant


@pytest.mark.parametrize("mutant", LISTED, ids=lambda mutant: mutant.name)
def test_the_text_is_there_once(mutant: Mutant) -> None:
    assert mutant.text()
