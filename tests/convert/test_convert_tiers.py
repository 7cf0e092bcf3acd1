# SPDX-License-Identifier: MIT
"""The plan, and the rules of docs/format.md that a file of tiers has to obey."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyhobbit.convert.plan import HIGH, LOW, RESIDENT, Recipe, make_plan
from pyhobbit.errors import HobbitError
from pyhobbit.model.file_names import model_stem, sidecar_path
from pyhobbit.model.gguf_file import TensorInfo, align
from pyhobbit.model.quantize import GgmlType
from pyhobbit.model.tiers import Part, routed_part

F32 = GgmlType(0, "f32", 1, 4, True, False)
Q4_0 = GgmlType(2, "q4_0", 32, 18, True, False)


def tensor(name: str, *ne: int, ggml_type: GgmlType = F32) -> TensorInfo:
    return TensorInfo(name, ggml_type, ne, Path("model.gguf"), 0)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("blk.0.ffn_gate_exps.weight", Part(0, "ffn_gate_exps")),
        ("blk.12.ffn_gate_up_exps.weight", Part(12, "ffn_gate_up_exps")),
        ("blk.3.ffn_down_exps.weight", Part(3, "ffn_down_exps")),
        ("blk.3.ffn_down_exps.bias", None),
        ("blk.3.ffn_down_exps.scale", None),
        ("blk.3.ffn_down_shexp.weight", None),
        ("blk.3.ffn_up_chexps.weight", None),
        ("blk.3.ffn_up_exps.low.0.weight", None),
        ("v.blk.3.ffn_up_exps.weight", None),
    ],
)
def test_routed_experts_are_recognised_by_name(name: str, part: Part | None) -> None:
    assert routed_part(name) == part


@pytest.mark.parametrize(
    ("model", "sidecar"),
    [
        ("a/mixtral.gguf", "a/mixtral.hobbit.gguf"),
        ("a/m.q8_0.gguf", "a/m.q8_0.hobbit.gguf"),
        ("m-00001-of-00012.gguf", "m.hobbit.gguf"),
        ("weights", "weights.hobbit.gguf"),
    ],
)
def test_sidecar_lies_beside_its_model(model: str, sidecar: str) -> None:
    assert sidecar_path(Path(model)) == Path(sidecar)
    assert model_stem(Path(model)) == Path(sidecar).name.removesuffix(".hobbit.gguf")


def source_tensors() -> list[TensorInfo]:
    return [
        tensor("blk.10.ffn_up_exps.weight", 64, 32, 3),
        tensor("blk.2.ffn_down_exps.weight", 32, 64, 3),
        tensor("output.weight", 64, 5),
        tensor("blk.2.ffn_up_exps.weight", 64, 32, 3),
        tensor("blk.2.ffn_up_exps.bias", 32, 3),
    ]


def test_plan_puts_residents_first_then_tiers_by_layer() -> None:
    plan = make_plan(source_tensors(), Recipe(low=Q4_0))
    assert [(planned.tier, planned.name) for planned in plan.tensors] == [
        (RESIDENT, "output.weight"),
        (RESIDENT, "blk.2.ffn_up_exps.bias"),
        (HIGH, "blk.2.ffn_down_exps.weight"),
        (HIGH, "blk.2.ffn_up_exps.weight"),
        (HIGH, "blk.10.ffn_up_exps.weight"),
        (LOW, "blk.2.ffn_down_exps.low.0.weight"),
        (LOW, "blk.2.ffn_up_exps.low.0.weight"),
        (LOW, "blk.10.ffn_up_exps.low.0.weight"),
    ]


def test_plan_leaves_no_gap_beyond_alignment() -> None:
    plan = make_plan(source_tensors(), Recipe(low=Q4_0))
    end = 0
    for planned in plan.tensors:
        assert planned.offset == align(end, 4096)
        end = planned.offset + planned.nbytes
    assert plan.data_bytes == align(end, 4096)
    assert plan.tier_bytes(LOW) == 3 * 64 * 32 * 3 // 32 * 18


def test_sidecar_plan_has_only_the_low_tier() -> None:
    plan = make_plan(source_tensors(), Recipe(low=Q4_0, sidecar=True))
    assert {planned.tier for planned in plan.tensors} == {LOW}
    assert len(plan.tensors) == 3


def test_type_that_cannot_be_read_as_floats_is_refused() -> None:
    i32 = GgmlType(26, "i32", 1, 4, False, False)
    with pytest.raises(HobbitError, match="has type i32, which cannot be converted"):
        make_plan([tensor("blk.0.ffn_up_exps.weight", 64, 32, 3, ggml_type=i32)], Recipe(low=Q4_0))
