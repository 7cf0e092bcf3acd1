# SPDX-License-Identifier: MIT
"""The digest by which a stopped calibration knows its model again."""

import shutil
from pathlib import Path

import models

from pyhobbit.quality.stored import digest_of


def test_the_digest_is_that_of_the_bytes_and_of_the_low_tier(tmp_path: Path) -> None:
    model, copy = tmp_path / "m.gguf", tmp_path / "other name.gguf"
    shutil.copyfile(models.tiny_experts("f16"), model)
    shutil.copyfile(model, copy)
    digest = digest_of(model)
    assert digest_of(copy) == digest
    with copy.open("r+b") as file:  # the first bit of the last tensor
        reader = models.GGUFReader(model)
        file.seek(int(reader.tensors[-1].data_offset))
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    assert digest_of(copy) != digest
    sidecar = models.tiny_sidecar("f16", "q4_0").with_name("tiny-f16.hobbit.gguf")
    assert digest_of(model, sidecar) != digest
