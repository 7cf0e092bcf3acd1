# SPDX-License-Identifier: MIT
"""A high tier that is a residual on the low one: what is written, refused and found by verification."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from convert_fixtures import (
    N_EMBD,
    N_EXPERT,
    N_LAYER,
    ROUTED,
    run_converter,
    tensor_bytes,
    tensor_values,
    values_of,
    write_imatrix,
    write_moe,
)
from gguf import GGMLQuantizationType, GGUFReader

from pyhobbit.convert import pipeline, write
from pyhobbit.convert.options import Options
from pyhobbit.convert.pipeline import convert
from pyhobbit.convert.plan import Plan, Recipe, make_plan
from pyhobbit.convert.read import read_model
from pyhobbit.convert.residual import relative_error
from pyhobbit.convert.verify import verify_residuals
from pyhobbit.errors import HobbitError
from pyhobbit.model.model_file import read_model_file
from pyhobbit.model.quantize import quantizable_types, type_by_name
from pyhobbit.model.tiers import fingerprint

Q4_0 = GGMLQuantizationType.Q4_0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_moe(tmp_path / "model.gguf")


def high_of(name: str) -> str:
    return f"{name}.high.0.weight"


def relative(wanted: np.ndarray, found: np.ndarray) -> float:
    return float(np.linalg.norm(wanted - found) / np.linalg.norm(wanted))


#
# written files
#


@pytest.mark.parametrize("residual", ["q4_0", "q5_0", "q8_0"])
def test_residual_is_the_quantised_difference(model: Path, residual: str) -> None:
    output = convert(Options(model, low="q4_0", high=f"residual:{residual}"))
    source, written = tensor_values(model), tensor_bytes(output)
    assert set(written) == set(source) | {high_of(name) for name in ROUTED}
    for name in ROUTED:
        weights = source[f"{name}.weight"].astype(np.float32)
        low = gguf.quants.quantize(weights, Q4_0)
        missing = weights - gguf.quants.dequantize(low, Q4_0)
        expected = gguf.quants.quantize(missing, GGMLQuantizationType[residual.upper()])
        np.testing.assert_array_equal(written[f"{name}.weight"], low.ravel())
        np.testing.assert_array_equal(written[high_of(name)], expected.ravel())


def test_two_parts_come_as_close_as_eight_bits(model: Path) -> None:
    found = tensor_values(convert(Options(model, low="q4_0", high="residual:q4_0")))
    q8_0 = tensor_values(convert(Options(model, low="q4_0", high="q8_0", force=True)))
    for name, wanted in tensor_values(model).items():
        if name.removesuffix(".weight") in ROUTED:
            both = found[name] + found[high_of(name.removesuffix(".weight"))]
            assert relative(wanted, both) == pytest.approx(relative(wanted, q8_0[name]), rel=0.2)
            assert relative(wanted, found[name]) > 10 * relative(wanted, both)


def test_the_format_is_declared_in_order(model: Path) -> None:
    output = convert(Options(model, low="q4_0", high="residual:q5_0"))
    reader = GGUFReader(output)
    keys = {key: reader.fields[key].contents() for key in reader.fields if key.startswith("hobbit.")}
    assert keys == {
        "hobbit.version": 2,
        "hobbit.tiers": ["high", "low"],
        "hobbit.base_tier": "low",
        "hobbit.tier.high.kind": "residual",
        "hobbit.tier.high.of": "low",
        "hobbit.tier.low.kind": "complete",
    }
    n = len(ROUTED)
    assert [each.name for each in reader.tensors[-2 * n : -n]] == [f"{name}.weight" for name in ROUTED]
    assert [each.name for each in reader.tensors[-n:]] == [high_of(name) for name in ROUTED]
    assert all(each.data_offset % 4096 == 0 for each in reader.tensors)


@pytest.mark.parametrize("split", [False, True])
def test_sidecar_holds_both_parts_for_a_base_that_stays(tmp_path: Path, split: bool) -> None:
    write_moe(tmp_path / "base.gguf", "q8_0", split_max_tensors=5 if split else 0)
    base = min(tmp_path.glob("base*.gguf"))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    sidecar = convert(Options(base, low="q4_0", high="residual:q4_0", sidecar=True))
    assert {path: path.read_bytes() for path in before} == before
    assert sidecar == tmp_path / "base.hobbit.gguf"
    names = [f"{name}.{tier}.0.weight" for tier in ("low", "high") for name in ROUTED]
    assert [each.name for each in GGUFReader(sidecar).tensors] == names
    assert values_of(sidecar, "hobbit.base_tier") == "none"
    assert values_of(sidecar, "hobbit.sidecar.base_fingerprint") == fingerprint(read_model(base).tensors)
    single = convert(Options(base, low="q4_0", high="residual:q4_0", output=tmp_path / "single.gguf"))
    in_sidecar, in_single = tensor_bytes(sidecar), tensor_bytes(single)
    for name in ROUTED:
        np.testing.assert_array_equal(in_sidecar[f"{name}.low.0.weight"], in_single[f"{name}.weight"])
        np.testing.assert_array_equal(in_sidecar[high_of(name)], in_single[high_of(name)])


@pytest.mark.slow
def test_threads_and_pieces_change_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"low": "q4_k", "high": "residual:q3_k", "force": True}
    whole = convert(Options(model, threads=1, **options)).read_bytes()
    monkeypatch.setattr(write, "_MAX_PIECE_BYTES", 3 * 4 * N_EMBD)
    assert convert(Options(model, threads=3, **options)).read_bytes() == whole


@pytest.mark.slow
def test_both_parts_are_quantised_with_the_importance_matrix(model: Path) -> None:
    sums = np.random.default_rng(1).exponential(size=(N_EXPERT, 2 * N_EMBD)) ** 2
    shapes = {f"{name}.weight": sums if "down" in name else sums[:, :N_EMBD] for name in ROUTED}
    imatrix = write_imatrix(model.with_name("imatrix.gguf"), shapes, [1.0] * N_EXPERT)
    output = convert(Options(model, low="iq2_xxs", high="residual:iq3_xxs", imatrix=imatrix))
    source, found = tensor_values(model), tensor_values(output)
    for name in ROUTED:
        missing = source[f"{name}.weight"] - found[f"{name}.weight"]
        assert relative(missing, found[high_of(name)]) < 0.35


def test_dry_run_names_the_residual(model: Path) -> None:
    done = run_converter(model, "--low", "q2_k", "--high", "residual:q3_k", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert [line.split()[:3] for line in done.stdout.splitlines()[3:5]] == [
        ["residual", "q3_K", "6"],
        ["low", "q2_K", "6"],
    ]
    assert list(model.parent.iterdir()) == [model]


def test_summary_tells_the_errors(model: Path) -> None:
    done = run_converter(model, "--low", "q4_0", "--high", "Residual:Q4_0")
    assert done.returncode == 0, done.stderr
    assert (
        "residual for the high tier q4_0 1.7 MiB, low tier q4_0 1.7 MiB, relative error 0.00" in done.stderr
    )


def test_model_file_knows_the_parts(model: Path, tmp_path: Path) -> None:
    single = read_model_file(convert(Options(model, low="q4_0", high="residual:q5_0")))
    convert(Options(model, low="q4_0", high="residual:q5_0", sidecar=True))
    beside = read_model_file(model)
    n_weights = N_LAYER * N_EXPERT * 3 * N_EMBD * 512
    for found in (single, beside):
        high, low = found.tiers
        assert (high.name, high.residual_on, high.bits_per_weight) == ("high", "low", 5.5)
        assert (low.name, low.residual_on, low.bits_per_weight) == ("low", None, 4.5)
        assert found.residual == high
        assert high.n_bytes == n_weights * 5.5 / 8
        assert found.resident_bytes == beside.resident_bytes
        assert found.n_experts == N_EXPERT
    assert (single.unused_bytes, beside.unused_bytes) == (0, 2 * n_weights)


#
# refused input
#


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--high", "residual:q4_0"], "name its type with --low TYPE"),
        (["--low", "q4_0", "--high", "residual"], "--high residual needs a type, like residual:q4_0"),
        (["--low", "q4_0", "--high", "residual:"], "--high residual needs a type, like residual:q4_0"),
        (["--low", "q4_0", "--high", "residual:q4_k_m"], "unknown type 'q4_k_m'"),
        (["--low", "q4_0", "--high", "residue:q4_0"], "unknown type 'residue:q4_0'"),
        (["--low", "f16", "--high", "residual:q4_0"], "so its residual would be 0"),
        (["--low", "q4_0", "--high", "residual:f16"], "a residual in f16 is no smaller than the experts"),
        (["--low", "f32", "--high", "residual:q4_0"], "a low tier in f32 is no smaller than the experts"),
        (["--low", "q4_0", "--high", "residual:tq1_0"], "would leave most of the low tier's error"),
        (["--low", "q4_0", "--high", "residual:iq2_s"], "iq2_s needs an importance matrix for tensor"),
        (["--low", "iq2_s", "--high", "residual:q4_0"], "iq2_s needs an importance matrix for tensor"),
        (["--low", "q4_0", "--high", "residual:q4_0", "-o", "model.gguf"], "is the model itself"),
    ],
)
def test_one_sentence_says_why_not(model: Path, arguments: list[str], says: str) -> None:
    done = run_converter(model.name, *arguments, cwd=model.parent)
    assert (done.returncode, done.stdout) == (1, "")
    assert says in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert list(model.parent.iterdir()) == [model]


def test_an_existing_output_stays(model: Path) -> None:
    output = model.with_name("model.hobbit.gguf")
    output.write_text("mine")
    with pytest.raises(HobbitError, match="exists already"):
        convert(Options(model, low="q4_0", high="residual:q4_0", sidecar=True))
    assert output.read_text() == "mine"


def test_blocks_have_to_divide_the_rows(tmp_path: Path) -> None:
    model = write_moe(tmp_path / "model.gguf", n_ff=96)
    with pytest.raises(HobbitError, match=r"rows of 96 values, which q3_K cannot cut into blocks of 256"):
        convert(Options(model, low="q4_0", high="residual:q3_k"))


def test_a_model_with_residuals_is_no_source(model: Path) -> None:
    output = convert(Options(model, low="q4_0", high="residual:q4_0"))
    with pytest.raises(HobbitError, match="already has tiers"):
        convert(Options(output))


@pytest.mark.slow
def test_every_type_but_the_coarsest_can_be_a_residual() -> None:
    refused = {each.name for each in quantizable_types() if relative_error(each) > 0.5}
    assert refused == {"tq1_0", "tq2_0", "q1_0", "q2_0"}


#
# verification
#


def planned(model: Path, low: str, residual: str) -> tuple[Plan, Path]:
    recipe = Recipe(type_by_name(low), type_by_name(residual), residual=True)
    return make_plan(read_model(model).tensors, recipe), convert(
        Options(model, low=low, high=f"residual:{residual}")
    )


def swap_first_experts(path: Path, name: str) -> None:
    tensor = next(each for each in GGUFReader(path).tensors if each.name == name)
    size = int(tensor.n_bytes) // N_EXPERT
    with path.open("r+b") as file:
        file.seek(tensor.data_offset)
        first, second = file.read(size), file.read(size)
        file.seek(tensor.data_offset)
        file.write(second + first)


@pytest.mark.parametrize("tier", [high_of, lambda name: f"{name}.weight"])
def test_parts_of_different_experts_do_not_add_up(model: Path, tier: Callable[[str], str]) -> None:
    plan, output = planned(model, "q4_0", "q4_0")
    assert verify_residuals(output, plan, False, 2, lambda _: None).both < 0.01
    swap_first_experts(output, tier("blk.1.ffn_up_exps"))
    with pytest.raises(HobbitError, match=r"residual of 'blk.1.ffn_up_exps.weight' together have"):
        verify_residuals(output, plan, False, 2, lambda _: None)


def test_what_does_not_add_up_is_not_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "subtract", lambda rows, low, out: np.copyto(out, rows))
    with pytest.raises(HobbitError, match="verification failed: the low tier and the residual of"):
        convert(Options(model, low="q4_0", high="residual:q4_0"))
    assert list(model.parent.iterdir()) == [model]


@pytest.mark.parametrize("scale", [0.0, 1e-6, 100.0])
def test_small_and_large_weights_add_up(tmp_path: Path, scale: float) -> None:
    model = write_moe(tmp_path / "model.gguf", "f32", expert_scale=scale)
    for low, residual in (("q4_0", "q8_0"), ("q2_k", "q6_k")):
        convert(Options(model, low=low, high=f"residual:{residual}", force=True))


def test_complete_tiers_are_not_added_up(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "verify_residuals", lambda *_: pytest.fail("nothing to add up"))
    convert(Options(model, low="q4_0"))
