# SPDX-License-Identifier: MIT
"""The reader of GGUF headers: what it keeps, and that damage of any kind is answered by a message."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from convert_fixtures import write_moe
from gguf import GGUFReader, GGUFValueType

from pyhobbit.convert.plan import Recipe, make_plan
from pyhobbit.convert.read import read_model
from pyhobbit.errors import HobbitError
from pyhobbit.model.gguf_file import pack_header, read_gguf
from pyhobbit.model.quantize import quantizable_types, type_by_name


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_moe(tmp_path / "model.gguf", parts=("ffn_up_exps",), n_ff=32)


def test_reads_what_the_gguf_package_reads(model: Path) -> None:
    ours, theirs = read_gguf(model), GGUFReader(model)
    for tensor, expected in zip(ours.tensors, theirs.tensors, strict=True):
        assert tensor.name == expected.name
        assert tensor.ne == tuple(expected.shape)
        assert tensor.type.name == expected.tensor_type.name.lower()
        assert (tensor.offset, tensor.nbytes) == (expected.data_offset, expected.n_bytes)
    for key, entry in ours.metadata.items():
        assert entry.type == theirs.fields[key].types[0]
        assert entry.value() == theirs.fields[key].contents()


def test_header_packs_to_the_bytes_it_was_read_from(model: Path) -> None:
    file = read_gguf(model)
    start = file.tensors[0].offset
    placements = [(tensor.name, tensor.type, tensor.ne, tensor.offset - start) for tensor in file.tensors]
    assert pack_header(list(file.metadata.values()), placements, 32) == model.read_bytes()[:start]


def test_long_tensor_name_is_refused() -> None:
    placement = ("x" * 64, type_by_name("f32"), (1,), 0)
    with pytest.raises(HobbitError, match="longer than 63 bytes"):
        pack_header([], [placement], 32)


@pytest.mark.slow
def test_truncation_anywhere_is_reported(model: Path) -> None:
    data = model.read_bytes()
    header = read_gguf(model).tensors[0].offset
    for size in [*range(header), *range(header, len(data), 9973)]:
        model.write_bytes(data[:size])
        with pytest.raises(HobbitError, match=r"empty|not a GGUF|damaged|truncated"):
            read_gguf(model)


@pytest.mark.slow
def test_damage_anywhere_in_the_header_is_reported_or_harmless(model: Path) -> None:
    data = model.read_bytes()
    header = read_gguf(model).tensors[0].offset
    random = np.random.default_rng(3)
    refused = 0
    for _ in range(800):
        damaged = bytearray(data)
        start = random.integers(header)
        length = random.integers(1, 9)
        damaged[start : start + length] = random.bytes(length)
        model.write_bytes(damaged)
        try:
            make_plan(read_model(model).tensors, Recipe(low=type_by_name("q4_0")))
        except HobbitError:
            refused += 1
    assert refused > 200


def test_key_of_another_type_is_reported(model: Path) -> None:
    file = read_gguf(model)
    with pytest.raises(HobbitError, match=r"its key llama\.block_count is 2"):
        file.get("llama.block_count", "text")
    assert file.metadata["llama.block_count"].type == GGUFValueType.UINT32


def test_types_are_those_that_ggml_can_quantise_to() -> None:
    names = [ggml_type.name for ggml_type in quantizable_types()]
    assert {"f32", "f16", "bf16", "q4_0", "q8_0", "q2_K", "q6_K", "iq4_nl", "iq1_s", "tq1_0", "mxfp4"} <= set(
        names
    )
    assert not {"q8_1", "q8_K", "i32", "f64"} & set(names)
    assert len(names) == len(set(names))
