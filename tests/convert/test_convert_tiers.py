# SPDX-License-Identifier: MIT
"""The plan, and the rules of docs/format.md that a file of tiers has to obey."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFValueType

from pyhobbit.convert.plan import HIGH, LOW, RESIDENT, Recipe, make_plan
from pyhobbit.errors import HobbitError
from pyhobbit.model.file_names import model_stem, sidecar_path
from pyhobbit.model.gguf_file import GgufFile, KeyValue, TensorInfo, align, scalar_entry, strings_entry
from pyhobbit.model.quantize import GgmlType
from pyhobbit.model.tiers import Part, check_tiers, routed_part

F32 = GgmlType(0, "f32", 1, 4, True, False)
Q4_0 = GgmlType(2, "q4_0", 32, 18, True, False)
UP = Part(0, "ffn_up_exps")


def tensor(name: str, *ne: int, ggml_type: GgmlType = F32) -> TensorInfo:
    return TensorInfo(name, ggml_type, ne, Path("model.gguf"), 0)


def experts(group: int, *ids: int) -> KeyValue:
    packed = b"".join(number.to_bytes(4, "little", signed=True) for number in ids)
    key = f"hobbit.tier.low.blk.0.ffn_up_exps.{group}.experts"
    head = GGUFValueType.INT32.to_bytes(4, "little") + len(ids).to_bytes(8, "little")
    return KeyValue(key, GGUFValueType.ARRAY, head + packed)


def check(tensors: list[TensorInfo], *entries: KeyValue) -> None:
    metadata = {entry.key: entry for entry in (strings_entry("hobbit.tiers", [HIGH, LOW]), *entries)}
    file = GgufFile(Path("model.gguf"), 0, metadata, tuple(tensors))
    check_tiers(file, {UP: tensor("blk.0.ffn_up_exps.weight", 64, 32, 3)})


def low(group: int, n_expert: int) -> TensorInfo:
    return tensor(f"blk.0.ffn_up_exps.low.{group}.weight", 64, 32, n_expert)


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


def test_one_group_of_all_experts_needs_no_list() -> None:
    check([low(0, 3)])


def test_groups_may_hold_the_experts_in_any_order() -> None:
    check([low(0, 2), low(1, 1)], experts(0, 2, 0), experts(1, 1))


@pytest.mark.parametrize(
    ("tensors", "entries", "message"),
    [
        ([], [], "does not hold every expert once"),
        ([low(0, 2)], [], r"shape \(64, 32, 2\), not \(64, 32, 3\)"),
        ([low(0, 2)], [experts(0, 0, 1)], "does not hold every expert once"),
        ([low(0, 2), low(1, 2)], [experts(0, 0, 1), experts(1, 1, 2)], "does not hold every expert once"),
        ([low(0, 2), low(2, 1)], [experts(0, 0, 1), experts(2, 2)], "has gaps between its groups"),
        ([low(0, 2), low(1, 1)], [experts(0, 0, 1), experts(1, 3)], "does not hold every expert once"),
        (
            [low(0, 2), low(1, 2)],
            [experts(0, 0, 1), experts(1, 2)],
            r"shape \(64, 32, 2\), not \(64, 32, 1\)",
        ),
        ([low(0, 3), tensor("blk.1.ffn_up_exps.low.0.weight", 64, 32, 3)], [], "belongs to no tier"),
        ([low(0, 3), tensor("blk.0.ffn_up_exps.mid.0.weight", 64, 32, 3)], [], "belongs to no tier"),
        ([low(0, 3)], [scalar_entry(experts(0).key, GGUFValueType.UINT32, 3)], "is damaged"),
    ],
)
def test_groups_have_to_partition_the_experts(
    tensors: list[TensorInfo], entries: list[KeyValue], message: str
) -> None:
    with pytest.raises(HobbitError, match=message):
        check(tensors, *entries)


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
