# SPDX-License-Identifier: MIT
"""Importance matrices: both formats, their effect, and files that do not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from convert_fixtures import (
    N_EMBD,
    N_EXPERT,
    N_FF,
    N_LAYER,
    PARTS,
    tensor_bytes,
    tensor_values,
    write_imatrix,
    write_moe,
)
from gguf import GGUFReader

from pyhobbit.convert.imatrix import read_imatrix
from pyhobbit.convert.options import Options
from pyhobbit.convert.pipeline import convert
from pyhobbit.convert.read import read_model
from pyhobbit.errors import HobbitError
from pyhobbit.model.gguf_file import read_floats, read_gguf
from pyhobbit.model.quantize import quantize, type_by_name

NAME = "blk.0.ffn_up_exps.weight"
COUNTS = [3.0, 1.0, 0.0, 10.0]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_moe(tmp_path / "model.gguf", parts=("ffn_up_exps",))


@pytest.fixture
def sums() -> np.ndarray:
    return np.random.default_rng(1).exponential(size=(N_EXPERT, N_EMBD)) ** 2


def test_sums_are_divided_by_counts_and_unused_experts_are_neutral(model: Path, sums: np.ndarray) -> None:
    path = write_imatrix(model.with_name("imatrix.gguf"), {NAME: sums}, COUNTS)
    imatrix = read_imatrix(path, read_model(model).tensors)
    assert list(imatrix) == [NAME]
    np.testing.assert_allclose(imatrix[NAME][3], sums[3] / 10, rtol=1e-6)
    np.testing.assert_array_equal(imatrix[NAME][2], np.ones(N_EMBD))


@pytest.mark.parametrize("low", ["q4_k", "iq2_xxs"])
def test_each_expert_is_quantised_with_its_own_importance(model: Path, sums: np.ndarray, low: str) -> None:
    both = dict.fromkeys([NAME, NAME.replace("0", "1")], sums)
    path = write_imatrix(model.with_name("imatrix.gguf"), both, [1.0] * N_EXPERT)
    output = tensor_bytes(convert(Options(model, low=low, imatrix=path)))
    weights = np.ascontiguousarray(sums, np.float32)
    values = tensor_values(model)[NAME]
    expected = [quantize(type_by_name(low), values[e], weights[e]) for e in range(N_EXPERT)]
    np.testing.assert_array_equal(output["blk.0.ffn_up_exps.low.0.weight"], np.concatenate(expected))


def test_importance_lowers_the_weighted_error(model: Path, sums: np.ndarray) -> None:
    path = write_imatrix(model.with_name("imatrix.gguf"), {NAME: sums}, [1.0] * N_EXPERT)
    source = tensor_values(model)[NAME]
    errors = []
    for imatrix in (None, path):
        output = tensor_values(convert(Options(model, low="q4_k", imatrix=imatrix, force=True)))
        errors.append(
            float((((output["blk.0.ffn_up_exps.low.0.weight"] - source) ** 2) * sums[:, None]).sum())
        )
    assert errors[1] < 0.9 * errors[0]


def test_a_matrix_is_used_and_named(
    model: Path, sums: np.ndarray, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_imatrix(model.with_name("model.imatrix.gguf"), {NAME: sums}, COUNTS)
    plain = convert(Options(model)).read_bytes()
    assert "importance matrix" not in capsys.readouterr().err
    assert convert(Options(model, imatrix=path, force=True)).read_bytes() != plain
    assert f"importance matrix {path}\n" in capsys.readouterr().err
    convert(Options(model, imatrix=path, force=True, dry_run=True))
    assert f"importance matrix {path}\n" in capsys.readouterr().out


def test_a_matrix_of_another_model_or_without_finite_values_is_refused(model: Path, sums: np.ndarray) -> None:
    for name, values, message in (
        ("output.weight", sums, "has no values for the experts: it was made from another model"),
        (NAME, sums[:3], f"768 values for '{NAME}', not 4 x 256: it was made from another"),
        (NAME, np.full_like(sums, np.inf), "not finite"),
    ):
        path = write_imatrix(model.with_name("imatrix.gguf"), {name: values}, COUNTS[: len(values)])
        with pytest.raises(HobbitError, match=message):
            convert(Options(model, imatrix=path))


@pytest.mark.parametrize("low", ["iq2_xxs", "iq2_xs", "iq2_s"])
def test_a_tensor_that_the_matrix_lacks_gets_a_type_that_needs_none(
    model: Path, sums: np.ndarray, low: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_imatrix(model.with_name("imatrix.gguf"), {NAME: sums}, COUNTS)
    output = convert(Options(model, low=low, imatrix=path))
    types = {each.name: each.tensor_type.name for each in GGUFReader(output).tensors}
    assert types["blk.0.ffn_up_exps.low.0.weight"] == low.upper()
    assert types["blk.1.ffn_up_exps.low.0.weight"] == "Q2_K"
    said = capsys.readouterr().err
    assert f"note: 1 tensors, such as blk.1.ffn_up_exps.weight, in q2_K: {low} does not suit them\n" in said
    assert f"note: {path} has no values for 1 tensors, such as blk.1.ffn_up_exps.weight: all" in said


FUSED = ("ffn_gate_up_exps", "ffn_down_exps")


@pytest.mark.parametrize(("parts", "others"), [(PARTS, FUSED), (FUSED, PARTS)])
def test_a_matrix_of_the_other_layout_of_gate_and_up_is_used(
    tmp_path: Path, parts: tuple[str, ...], others: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    model, rng = write_moe(tmp_path / "model.gguf", parts=parts), np.random.default_rng(1)
    wide, narrow = (rng.exponential(size=(N_EXPERT, n)) ** 2 for n in (N_FF, N_EMBD))
    outputs = []
    for names in (parts, others):
        every = {
            f"blk.{layer}.{part}.weight": wide if "down" in part else narrow
            for layer in range(N_LAYER)
            for part in names
        }
        path = write_imatrix(tmp_path / f"{len(names)}.gguf", every, COUNTS)
        outputs.append(convert(Options(model, low="iq2_xxs", imatrix=path, force=True)).read_bytes())
    assert outputs[0] == outputs[1]
    assert "has no values for" not in capsys.readouterr().err


@pytest.mark.parametrize("low", ["q2_k", "q3_k", "q4_0", "q2_0", "iq2_xxs", "iq2_s", "iq3_xxs", "iq1_s"])
def test_weights_of_zero_cost_no_expert(model: Path, sums: np.ndarray, low: str) -> None:
    sums[0] *= 1e-36
    sums[1, :32] = 0
    sums[2] = 0
    sums[3] = 1e-38
    both = {NAME: sums, NAME.replace("0", "1"): np.ones_like(sums)}
    path = write_imatrix(model.with_name("i.gguf"), both, [1.0] * N_EXPERT)
    found = read_gguf(convert(Options(model, low=low, imatrix=path))).tensors
    output = {each.name: read_floats(each) for each in found}
    low_values, wanted = output["blk.0.ffn_up_exps.low.0.weight"], tensor_values(model)[NAME]
    plain = output["blk.1.ffn_up_exps.low.0.weight"] - output["blk.1.ffn_up_exps.weight"]
    usual = np.linalg.norm(plain) / np.linalg.norm(output["blk.1.ffn_up_exps.weight"])
    for expert in range(N_EXPERT):
        error = np.linalg.norm(low_values[expert] - wanted[expert]) / np.linalg.norm(wanted[expert])
        assert error < 1.6 * usual, expert
    start = low_values[1, :, :32] - wanted[1, :, :32]
    assert np.linalg.norm(start) < 1.6 * usual * np.linalg.norm(wanted[1, :, :32])


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 3, b"\1\0\0\0\xff\xff\xff\xff", b"\xff" * 64, b"\1\0\0\0" * 9]
)
def test_file_that_is_no_matrix_is_refused(model: Path, content: bytes) -> None:
    path = model.with_name("imatrix.dat")
    path.write_bytes(content)
    with pytest.raises(HobbitError, match="no readable importance matrix"):
        convert(Options(model, imatrix=path))


def test_model_given_as_matrix_and_missing_file_are_refused(model: Path) -> None:
    with pytest.raises(HobbitError, match="no readable importance matrix"):
        convert(Options(model, imatrix=model))
    with pytest.raises(HobbitError, match=r"cannot read the importance matrix .*: No such file"):
        convert(Options(model, imatrix=model.with_name("none")))
