# SPDX-License-Identifier: MIT
"""The larger corpus: its packages are as pinned and stated, and it has nothing that is held out."""

import re
from collections.abc import Iterator
from importlib.metadata import metadata, version

import pytest
from conftest import TESTS

import corpus

_LINES = 5  # in a row, that no idiom repeats
_LICENCES = {**corpus.PACKAGES, **corpus.HELD_OUT_PACKAGES}


@pytest.mark.parametrize("name", _LICENCES)
def test_a_package_has_a_pinned_version_and_the_stated_licence(name: str) -> None:
    pins = (TESTS.parent / "requirements/test.txt").read_text("utf-8")
    assert version(name) in re.findall(rf"(?m)^{name}==(\S+)", pins)
    about = metadata(name)
    stated = (about["License-Expression"], about["License"], *about.get_all("Classifier", ()))
    assert re.search(rf"\b{re.escape(_LICENCES[name])}\b(?!-CMU)", " ".join(filter(None, stated)))


def _windows(text: str) -> Iterator[str]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ("\n".join(lines[i : i + _LINES]) for i in range(len(lines) - _LINES + 1))


@pytest.mark.slow
def test_no_training_text_has_what_is_held_out() -> None:
    train, held_out = (
        modules | packages
        for modules, packages in zip(corpus.read_modules(), corpus.read_packages(), strict=True)
    )
    assert sum(map(len, train.values())) > 40_000_000
    assert not train.keys() & held_out.keys()
    kept = {window for text in held_out.values() for window in _windows(text)}
    found = {window for text in train.values() for window in _windows(text) if window in kept}
    assert len(found) < 0.01 * len(kept)
