# SPDX-License-Identifier: MIT
"""A low tier from a second file of the same model: its bytes, and the files that are refused."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest
from convert_fixtures import ROUTED, run_converter, tensor_bytes, write_imatrix, write_moe
from gguf import GGMLQuantizationType, GGUFWriter

from pyhobbit.convert.options import Options
from pyhobbit.convert.pipeline import convert
from pyhobbit.errors import HobbitError
from pyhobbit.native.paths import BIN_DIR


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_moe(tmp_path / "model.gguf", "q8_0")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return write_moe(tmp_path / "other.gguf", "q4_0")


def test_the_low_tier_has_the_bytes_of_the_other_file(model: Path, other: Path) -> None:
    own, low = tensor_bytes(model), tensor_bytes(other)
    output = tensor_bytes(convert(Options(model, low_from=other)))
    assert set(output) == set(own) | {f"{name}.low.0.weight" for name in ROUTED}
    for name, data in own.items():
        np.testing.assert_array_equal(output[name], data, err_msg=name)
    for name in ROUTED:
        np.testing.assert_array_equal(output[f"{name}.low.0.weight"], low[f"{name}.weight"], err_msg=name)


def test_a_sidecar_copies_nothing_of_the_model(model: Path, other: Path) -> None:
    sidecar = convert(Options(model, low_from=other, sidecar=True))
    assert sidecar == model.with_name("model.hobbit.gguf")
    low = {name.replace(".low.0", ""): data for name, data in tensor_bytes(sidecar).items()}
    assert set(low) == {f"{name}.weight" for name in ROUTED}
    for name, data in low.items():
        np.testing.assert_array_equal(data, tensor_bytes(other)[name], err_msg=name)


def test_it_is_the_file_that_a_conversion_to_the_other_files_type_makes(tmp_path: Path) -> None:
    model, other = write_moe(tmp_path / "model.gguf"), tmp_path / "other.gguf"
    command = [BIN_DIR / "llama-quantize", "--pure", model, other, "q4_k", "1"]
    subprocess.run(command, capture_output=True, check=True)
    for sidecar in (False, True):
        files = [
            convert(Options(model, low=low, low_from=low_from, sidecar=sidecar, output=tmp_path / name))
            for low, low_from, name in (("q4_k", None, "a"), (None, other, "b"))
        ]
        assert files[0].read_bytes() == files[1].read_bytes()
        for file in files:
            file.unlink()


def test_the_high_tier_may_be_converted(model: Path, other: Path) -> None:
    output = tensor_bytes(convert(Options(model, high="f16", low_from=other)))
    wanted = tensor_bytes(convert(Options(model, high="f16", low="q5_0", force=True)))
    for name in ROUTED:
        np.testing.assert_array_equal(output[f"{name}.weight"], wanted[f"{name}.weight"])
        np.testing.assert_array_equal(
            output[f"{name}.low.0.weight"], tensor_bytes(other)[f"{name}.weight"], err_msg=name
        )


def test_both_files_may_be_split(model: Path, other: Path, tmp_path: Path) -> None:
    whole = convert(Options(model, low_from=other)).read_bytes()
    folder = tmp_path / "splits"
    folder.mkdir()
    write_moe(folder / "model.gguf", "q8_0", split_max_tensors=5)
    write_moe(folder / "other.gguf", "q4_0", split_max_tensors=7)
    models, others = (sorted(folder.glob(f"{name}-*.gguf")) for name in ("model", "other"))
    assert len(models) > len(others) > 1
    output = convert(Options(models[0], low_from=others[-1]))  # any of them names the model
    assert output.read_bytes() == whole


def test_another_context_and_renamed_tokens_do_not_matter(tmp_path: Path) -> None:
    names = [f"token {i}" for i in range(200)]
    model = write_moe(tmp_path / "model.gguf", "q8_0", tokens=names)
    other = write_moe(tmp_path / "other.gguf", "q4_0", tokens=["<pad>", *names[1:]])
    data = other.read_bytes()
    assert data.count(b"llama.context_length\x04\0\0\0\x40\0\0\0") == 1
    longer = data.replace(b"llama.context_length\x04\0\0\0\x40", b"llama.context_length\x04\0\0\0\x7f")
    other.write_bytes(longer)
    assert convert(Options(model, low_from=other)).exists()


#
# refused input
#


def refusal(model: Path, other: Path, **options: object) -> str:
    with pytest.raises(HobbitError) as caught:
        convert(Options(model, low_from=other, **options))
    assert not list(model.parent.glob("*hobbit*"))
    return str(caught.value)


ANOTHER = {
    "architecture": ({"architecture": "mixtral"}, "its general.architecture is mixtral, not llama"),
    "hyper-parameter": ({"n_head": 8}, "its llama.attention.head_count is 8, not 4"),
    "vocabulary": ({"tokens": ["a", "b"]}, "its vocabulary has 2 tokens, not 3"),
    "tokens": ({"tokens": ["a", "b", "c"]}, "3 of the 3 tokens of its vocabulary differ"),
    "shape": ({"n_ff": 1024}, "its llama.feed_forward_length is 1024, not 512"),
    "parts": ({"parts": ("ffn_up_exps", "ffn_down_exps")}, "it has no tensor 'blk.0.ffn_gate_exps."),
    "weights": ({"seed": 8}, "the values of its tensor 'blk.0.ffn_gate_exps.bias' differ"),
}


@pytest.mark.parametrize(("change", "says"), ANOTHER.values(), ids=ANOTHER)
def test_another_model_is_refused(model: Path, change: dict[str, object], says: str) -> None:
    other = write_moe(model.with_name("other.gguf"), "q4_0", **change)
    message = refusal(model, other)
    assert f"--low-from {other} cannot be the low tier of {model}: " in message
    assert says in message


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    """A GGUF of floats, in f16 where the name ends with a star, in q8_0 where it ends with two."""
    writer = GGUFWriter(path, "llama")
    for name, values in tensors.items():
        if name.endswith("**"):
            data = gguf.quants.quantize(values.astype(np.float32), GGMLQuantizationType.Q8_0)
            writer.add_tensor(name.rstrip("*"), data, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            kind = np.float16 if name.endswith("*") else np.float32
            writer.add_tensor(name.rstrip("*"), values.astype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


EXPERTS, ROUTER, SCALE = "blk.0.ffn_up_exps.weight", "blk.0.ffn_gate_inp.weight", "blk.0.ffn_up_exps.scale"


def test_routers_and_scales_must_be_the_same_up_to_rounding(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    experts, router = rng.standard_normal((3, 32, 64)), rng.standard_normal((3, 64))
    model = write_tensors(tmp_path / "model.gguf", {EXPERTS: experts, ROUTER: router})
    for name, tensors, says in (
        ("rounded", {f"{EXPERTS}*": experts, f"{ROUTER}*": router}, None),
        ("coarse", {f"{EXPERTS}*": experts, f"{ROUTER}**": router}, None),
        ("coarse tuned", {f"{EXPERTS}*": experts, f"{ROUTER}**": 1.05 * router}, f"'{ROUTER}' differ"),
        (
            "tuned",
            {f"{EXPERTS}*": experts, ROUTER: 1.003 * router},
            f"'{ROUTER}' differ",
        ),
        ("fused", {f"{EXPERTS}*": experts[:, :16], ROUTER: router}, "has shape (64, 16, 3), not (64, 32, 3)"),
        ("fewer", {f"{EXPERTS}*": experts[:2], ROUTER: router}, "has shape (64, 32, 2), not (64, 32, 3)"),
        ("bare", {f"{EXPERTS}*": experts}, f"it has no tensor '{ROUTER}'"),
        (
            "scaled",
            {f"{EXPERTS}*": experts, ROUTER: router, SCALE: np.ones(3)},
            f"it has a tensor '{SCALE}', which the model lacks",
        ),
    ):
        other = write_tensors(tmp_path / f"{name}.gguf", tensors)
        if says is None:
            assert convert(Options(model, low_from=other, output=tmp_path / f"{name} out.gguf")).exists()
        else:
            assert says in refusal(model, other)


def test_dense_missing_and_split_files_are_refused(model: Path, tmp_path: Path) -> None:
    dense = write_moe(tmp_path / "dense.gguf", parts=())
    assert refusal(model, dense).startswith(f"{dense} is a dense model")
    assert "does not exist" in refusal(model, tmp_path / "nothing.gguf")
    write_moe(tmp_path / "other.gguf", "q4_0", split_max_tensors=5)
    first, second, *_ = sorted(tmp_path.glob("other-*.gguf"))
    second.unlink()
    assert "a split of the model is missing" in refusal(model, first)


def test_a_file_with_tiers_and_the_model_itself_are_refused(model: Path, other: Path, tmp_path: Path) -> None:
    tiers = convert(Options(other, low="q2_k", output=tmp_path / "tiers.gguf"))
    assert "already has tiers" in refusal(model, tiers)
    assert "is the model itself" in refusal(model, model)
    link = tmp_path / "link.gguf"
    link.symlink_to(model)
    assert "is the model itself" in refusal(model, link)


@pytest.mark.parametrize(("kind", "share"), [("q8_0", "100%"), ("f16", "188%"), ("q6_k", "77%")])
def test_experts_that_are_hardly_smaller_are_refused(model: Path, kind: str, share: str) -> None:
    other = write_moe(model.with_name("other.gguf"), kind)
    for sidecar in (False, True):
        assert f"{share} of the high tier's bytes" in refusal(model, other, sidecar=sidecar)


def test_the_output_may_not_be_the_other_file(model: Path, other: Path) -> None:
    before = other.read_bytes()
    assert "is one of the files to convert" in refusal(model, other, output=other, force=True)
    assert other.read_bytes() == before


def test_options_that_would_convert_are_refused(model: Path, other: Path, tmp_path: Path) -> None:
    assert "drop --low and --imatrix" in refusal(model, other, low="q2_k")
    imatrix = write_imatrix(tmp_path / "imatrix.gguf", {}, [])
    assert "drop --low and --imatrix" in refusal(model, other, imatrix=imatrix)
    with pytest.raises(HobbitError, match="MODEL is a folder: convert it to a GGUF first"):
        convert(Options(tmp_path, low_from=other))


def test_the_command_takes_it(model: Path, other: Path) -> None:
    done = run_converter(model, "--low-from", other, "--sidecar")
    assert (done.returncode, done.stdout) == (0, "")
    assert "low tier q4_0 1.7 MiB" in done.stderr
    shutil.copy(model, other)
    done = run_converter(model, "--low-from", model.with_name("none.gguf"), "--sidecar", "--force")
    assert done.returncode == 1
    assert "none.gguf does not exist" in done.stderr.splitlines()[-1]
