# SPDX-License-Identifier: MIT
"""The converter's output: tiers, sidecars, types, and their relation to the source."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from convert_fixtures import (
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

from pyhobbit.convert import write
from pyhobbit.convert.options import Options
from pyhobbit.convert.pipeline import convert
from pyhobbit.errors import HobbitError
from pyhobbit.model.gguf_file import read_gguf
from pyhobbit.model.quantize import GgmlType, dequantize, quantizable_types, quantize, type_by_name
from pyhobbit.native.paths import BIN_DIR


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_moe(tmp_path / "model.gguf")


def low_of(name: str) -> str:
    return f"{name}.low.0.weight"


def test_high_tier_and_residents_are_the_source_bit_for_bit(model: Path) -> None:
    source, output = tensor_bytes(model), tensor_bytes(convert(Options(model, low="q4_0", high="f16")))
    assert set(output) == set(source) | {low_of(name) for name in ROUTED}
    for name, data in source.items():
        np.testing.assert_array_equal(output[name], data, err_msg=name)


def test_low_tier_is_the_quantised_source(model: Path) -> None:
    source, output = tensor_values(model), tensor_bytes(convert(Options(model, low="q4_0")))
    for name in ROUTED:
        expected = gguf.quants.quantize(source[f"{name}.weight"], GGMLQuantizationType.Q4_0)
        np.testing.assert_array_equal(output[low_of(name)], expected.ravel())


def test_low_tier_has_the_bytes_that_llama_quantize_makes(model: Path, tmp_path: Path) -> None:
    quantized = tmp_path / "quantized.gguf"
    command = [BIN_DIR / "llama-quantize", "--pure", "--allow-requantize", model, quantized, "q4_k", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected, output = tensor_bytes(quantized), tensor_bytes(convert(Options(model, low="q4_k")))
    for name in ROUTED:
        np.testing.assert_array_equal(output[low_of(name)], expected[f"{name}.weight"])


def test_metadata_are_kept_and_the_format_is_declared(model: Path) -> None:
    before, after = GGUFReader(model), GGUFReader(convert(Options(model)))
    for key, field in before.fields.items():
        if not key.startswith("GGUF."):
            assert after.fields[key].types == field.types, key
            assert after.fields[key].contents() == field.contents(), key
    added = {key: after.fields[key].contents() for key in after.fields if key not in before.fields}
    assert added == {
        "general.alignment": 4096,
        "hobbit.version": 1,
        "hobbit.tiers": ["high", "low"],
        "hobbit.tier.high.kind": "complete",
        "hobbit.tier.low.kind": "complete",
        "hobbit.t1": 0.6,
        "hobbit.t2": 1.0,
    }


def test_layout_is_residents_then_tiers_each_tensor_on_a_block(model: Path) -> None:
    output = convert(Options(model))
    tensors = GGUFReader(output).tensors
    assert all(tensor.data_offset % 4096 == 0 for tensor in tensors)
    assert output.stat().st_size % 4096 == 0
    n = len(ROUTED)
    assert [tensor.name for tensor in tensors[-2 * n : -n]] == [f"{name}.weight" for name in ROUTED]
    assert [tensor.name for tensor in tensors[-n:]] == [low_of(name) for name in ROUTED]


@pytest.mark.parametrize("high", ["q8_0", "Q6_K", "f32", "bf16"])
def test_high_type_applies_to_the_routed_experts_only(model: Path, high: str) -> None:
    source, output = GGUFReader(model).tensors, GGUFReader(convert(Options(model, low="q2_k", high=high)))
    types = {tensor.name: tensor.tensor_type.name for tensor in output.tensors}
    values = tensor_values(model)
    for tensor in source:
        if tensor.name.removesuffix(".weight") in ROUTED:
            assert types[tensor.name] == high.upper()
        else:
            assert types[tensor.name] == tensor.tensor_type.name
    high_type = type_by_name(high)
    for tensor in output.tensors:
        if tensor.name.removesuffix(".weight") in ROUTED:
            rows = values[tensor.name].reshape(-1, tensor.shape[0])
            np.testing.assert_array_equal(tensor.data.view(np.uint8).ravel(), quantize(high_type, rows, None))


def test_quantised_source_is_requantised_from_its_values(tmp_path: Path) -> None:
    model = write_moe(tmp_path / "model.gguf", "q8_0")
    output = tensor_bytes(convert(Options(model, low="q4_0", high="q5_0", force=True)))
    for name, values in tensor_values(model).items():
        if name.removesuffix(".weight") in ROUTED:
            for target, ggml_type in ((name, "Q5_0"), (low_of(name.removesuffix(".weight")), "Q4_0")):
                expected = gguf.quants.quantize(values, GGMLQuantizationType[ggml_type])
                np.testing.assert_array_equal(output[target], expected.ravel())


def test_tier_of_the_sources_own_type_is_a_copy(tmp_path: Path) -> None:
    model = write_moe(tmp_path / "model.gguf", "q4_k")
    source, output = tensor_bytes(model), tensor_bytes(convert(Options(model, low="q4_k", high="q8_0")))
    for name in ROUTED:
        np.testing.assert_array_equal(output[low_of(name)], source[f"{name}.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("ggml_type", quantizable_types(), ids=lambda ggml_type: ggml_type.name)
def test_every_type_can_be_a_low_tier(tmp_path: Path, ggml_type: GgmlType) -> None:
    model = write_moe(tmp_path / "model.gguf", parts=("ffn_up_exps",), n_ff=32)
    names = [f"blk.{layer}.ffn_up_exps.weight" for layer in range(N_LAYER)]
    imatrix = None
    if ggml_type.wants_imatrix:
        ones = np.ones((N_EXPERT, 256))
        imatrix = write_imatrix(tmp_path / "imatrix.gguf", dict.fromkeys(names, ones), [1] * N_EXPERT)
    options = Options(model, low=ggml_type.name, high="f32", imatrix=imatrix, force=True, threads=1)
    output = convert(options)
    source, written = tensor_values(model), read_tensors(output)
    for name in names:
        rows = source[name].reshape(-1, source[name].shape[-1])
        low_type, low = written[low_of(name.removesuffix(".weight"))]
        assert low_type == ggml_type
        weights = np.ones(rows.shape[1], np.float32) if imatrix else None
        np.testing.assert_array_equal(low, quantize(ggml_type, rows, weights))
        error = np.linalg.norm(dequantize(ggml_type, low, rows.shape[1]) - rows) / np.linalg.norm(rows)
        bits = 8 * ggml_type.size / ggml_type.block
        assert error < (
            0.01 if bits > 8 else 0.12 if bits > 4 else 0.9
        )  # noise is the worst case for 1 to 3 bits


def read_tensors(path: Path) -> dict[str, tuple[GgmlType, np.ndarray]]:
    """Unlike the gguf package, this knows all of ggml's types."""
    data = np.fromfile(path, np.uint8)
    return {
        tensor.name: (tensor.type, data[tensor.offset : tensor.offset + tensor.nbytes].copy())
        for tensor in read_gguf(path).tensors
    }


def test_a_file_is_on_the_disk_before_it_has_its_name(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a loss of power there is the whole file or none: its bytes first, then its folder's entry."""
    out = model.with_name("out.gguf")
    synced: list[tuple[str, bool]] = []

    def fsync(descriptor: int) -> None:
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink().suffix, out.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    convert(Options(model, low="q4_0", output=out))
    assert synced == [(".tmp", False), (".tmp", False), ("", True)]  # the first one to be read back


def test_result_does_not_depend_on_pieces_or_threads(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = convert(Options(model, low="q3_k", high="q8_0", threads=1)).read_bytes()
    monkeypatch.setattr(write, "_MAX_PIECE_BYTES", 12345)
    assert convert(Options(model, low="q3_k", high="q8_0", threads=3, force=True)).read_bytes() == whole


def test_split_model_becomes_one_file(tmp_path: Path) -> None:
    single = convert(Options(write_moe(tmp_path / "single.gguf")))
    write_moe(tmp_path / "model.gguf", split_max_tensors=5)
    splits = sorted(tmp_path.glob("model-*-of-*.gguf"))
    assert len(splits) > 2
    with pytest.raises(HobbitError, match=rf"is part {len(splits)} of a split model: give its first part"):
        convert(Options(splits[-1]))
    output = convert(Options(splits[0], force=True))
    assert output == tmp_path / "model-hobbit.gguf"
    assert output.read_bytes() == single.read_bytes()


def test_fused_gate_up_is_one_part(tmp_path: Path) -> None:
    model = write_moe(tmp_path / "model.gguf", parts=("ffn_gate_up_exps", "ffn_down_exps"))
    output = tensor_bytes(convert(Options(model)))
    assert "blk.1.ffn_gate_up_exps.low.0.weight" in output
    source = tensor_values(model)["blk.1.ffn_gate_up_exps.weight"]
    expected = gguf.quants.quantize(source, GGMLQuantizationType.Q4_0).ravel()
    np.testing.assert_array_equal(output["blk.1.ffn_gate_up_exps.low.0.weight"], expected)


def test_sidecar_holds_the_low_tier_and_leaves_the_model_alone(model: Path) -> None:
    before = model.read_bytes()
    sidecar = convert(Options(model, low="q4_0", sidecar=True))
    assert sidecar == model.with_name("model.hobbit.gguf")
    assert model.read_bytes() == before
    both = tensor_bytes(convert(Options(model, low="q4_0")))
    low = tensor_bytes(sidecar)
    assert list(low) == [low_of(name) for name in ROUTED]
    for name, data in low.items():
        np.testing.assert_array_equal(data, both[name])


def test_sidecar_names_its_base(model: Path) -> None:
    sidecar = convert(Options(model, sidecar=True))
    assert values_of(sidecar, "general.architecture") == "hobbit-sidecar"
    assert values_of(sidecar, "hobbit.sidecar") is True
    assert values_of(sidecar, "hobbit.sidecar.base_name") == "model.gguf"
    assert values_of(sidecar, "hobbit.sidecar.base_size") == model.stat().st_size
    assert values_of(sidecar, "hobbit.sidecar.base_fingerprint") == fingerprint(model)
    assert values_of(sidecar, "hobbit.tiers") == ["high", "low"]


def test_sidecar_of_a_model_whose_name_is_not_utf8(model: Path) -> None:
    sidecar = convert(Options(model.rename(model.with_name(os.fsdecode(b"m\xe9.gguf"))), sidecar=True))
    assert os.fsencode(sidecar.name) == b"m\xe9.hobbit.gguf"
    assert values_of(sidecar, "hobbit.sidecar.base_name") == "m?.gguf"


def test_sidecar_of_splits_has_their_common_name_and_size(tmp_path: Path) -> None:
    write_moe(tmp_path / "model.gguf", split_max_tensors=5)
    splits = sorted(tmp_path.glob("model-*-of-*.gguf"))
    sidecar = convert(Options(splits[0], sidecar=True))
    assert sidecar.name == "model.hobbit.gguf"
    assert values_of(sidecar, "hobbit.sidecar.base_name") == splits[0].name
    assert values_of(sidecar, "hobbit.sidecar.base_size") == sum(split.stat().st_size for split in splits)
    single = write_moe(tmp_path / "single.gguf")
    assert values_of(sidecar, "hobbit.sidecar.base_fingerprint") == fingerprint(single)


def fingerprint(path: Path) -> int:
    """FNV-1a as docs/format.md describes it, written apart from the converter's."""
    text = b""
    for tensor in sorted(GGUFReader(path).tensors, key=lambda tensor: tensor.name):
        if tensor.name.removesuffix(".weight") in ROUTED:
            shape = ",".join(str(n) for n in tensor.shape)
            text += f"{tensor.name}|{tensor.tensor_type.name.lower()}|{shape}\n".encode()
            text += tensor.data.tobytes()[:64]
    value = 14695981039346656037
    for byte in text:
        value = ((value ^ byte) * 1099511628211) & 0xFFFFFFFFFFFFFFFF
    return value


def test_dry_run_prints_the_plan_and_writes_nothing(model: Path) -> None:
    done = run_converter("--low", "q4_0", "--dry-run", model)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(model.parent.iterdir()) == [model]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["high", "f16", "6", "6.0", "MiB"] in rows
    assert ["low", "q4_0", "6", "1.7", "MiB"] in rows
    assert "MiB needed" in done.stdout


def test_the_command_reports_on_stderr_only(model: Path) -> None:
    done = run_converter("--low", "q4_0", model, "-o", model.with_name("out.gguf"))
    assert (done.returncode, done.stdout) == (0, "")
    assert "converting: 100%" in done.stderr
    assert "verifying: 100%" in done.stderr
    assert "high tier f16 6.0 MiB, low tier q4_0 1.7 MiB" in done.stderr


@pytest.mark.parametrize(
    ("kind", "high", "low"),
    [
        ("f16", None, "q4_0"),
        ("q8_0", None, "q4_0"),
        ("q6_K", None, "q3_K"),
        ("q5_0", None, "q3_K"),
        ("q4_K", None, "q2_K"),
        ("mxfp4", None, "q2_K"),
        ("f16", "q4_k", "q2_K"),  # the high tier counts, not its source
        ("q4_0", "q8_0", "q4_0"),
    ],
)
def test_the_default_low_type_has_about_half_the_bits(
    tmp_path: Path, kind: str, high: str | None, low: str
) -> None:
    model = write_moe(tmp_path / "model.gguf", kind.lower())
    output = convert(Options(model, high=high))
    types = {tensor.name: tensor.type.name for tensor in read_gguf(output).tensors}
    assert {types[low_of(name)] for name in ROUTED} == {low}


@pytest.mark.parametrize(
    ("options", "model_argument"),
    [
        ({}, "'{0}/my model-hobbit.gguf'"),
        ({"sidecar": True}, "'{0}/my model.gguf'"),
        ({"sidecar": True, "output": "other.gguf"}, "'{0}/my model.gguf' --sidecar {0}/other.gguf"),
    ],
)
def test_the_next_command_is_said_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, object], model_argument: str
) -> None:
    model = write_moe(tmp_path / "my model.gguf")
    if "output" in options:
        options = {**options, "output": tmp_path / str(options["output"])}
    convert(Options(model, **options))
    named = model_argument.format(tmp_path)
    assert capsys.readouterr().err.splitlines()[-2:] == [
        f"next: pyhobbit calibrate {named} --text FILE",
        f"  or: pyhobbit chat {named}",
    ]
    convert(Options(model, **{**options, "t1": 1.0, "force": True}))
    assert capsys.readouterr().err.endswith(f"\n  or: pyhobbit chat {named} --quality small-loss\n")


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ({"t1": 0.4}, (0.4, 1.0)),
        ({"t2": 0.5}, (0.5, 0.5)),
        ({"t1": 0.3, "t2": 0.9, "sidecar": True}, (0.3, 0.9)),
        ({"t1": 1.0}, (None, None)),
    ],
)
def test_thresholds_are_stored(
    model: Path, given: dict[str, Any], stored: tuple[float | None, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    file = read_gguf(convert(Options(model, **given)))
    assert tuple(key and key.value() for key in map(file.metadata.get, ("hobbit.t1", "hobbit.t2"))) == stored
    assert ("it runs in mixed precision" in capsys.readouterr().err) == (stored[0] is not None)


@pytest.mark.parametrize(
    ("given", "message"),
    [({"t1": 1.5}, "t1 is 1.5; it must lie between 0 and 1"), ({"t1": 0.9, "t2": 0.5}, "must not be above")],
)
def test_thresholds_that_cannot_be_are_refused_first(given: dict[str, float], message: str) -> None:
    with pytest.raises(HobbitError, match=message):
        convert(Options(Path("/nowhere"), **given))


def test_the_next_command_is_short_in_the_models_folder(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(model.parent)
    for output in (None, Path("model.hobbit.gguf")):
        convert(Options(Path("model.gguf"), sidecar=True, output=output, force=True))
        assert "\nnext: pyhobbit calibrate model.gguf --text FILE\n" in capsys.readouterr().err


def test_force_replaces_the_output(model: Path) -> None:
    first = convert(Options(model, low="q4_0")).read_bytes()
    second = convert(Options(model, low="q8_0", force=True)).read_bytes()
    assert len(second) > len(first)


def test_the_script_of_a_checkout_is_the_verb(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.gguf"
    script = Path(__file__).parents[2] / "convert" / "make_gguf.py"
    subprocess.run([sys.executable, script, "--low", "q4_0", model, "-o", output], check=True)
    assert low_of("blk.0.ffn_up_exps") in tensor_bytes(output)
