# SPDX-License-Identifier: MIT
"""Hugging Face checkpoints: the trained tiny model comes through, what is no checkpoint is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gguf
import models
import numpy as np
import pytest
from conftest import TINY_MODEL
from convert_fixtures import tensor_values, values_of, write_moe
from gguf import GGMLQuantizationType, GGUFReader

from pyhobbit.convert import checkpoint
from pyhobbit.convert.options import Options
from pyhobbit.convert.pipeline import convert
from pyhobbit.convert.read import read_model
from pyhobbit.errors import HobbitError

pytestmark = pytest.mark.slow

PARTS = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}  # GGUF's and Mixtral's names


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("converted") / "tiny.gguf"
    convert(Options(TINY_MODEL, low="q4_0", high="f32", output=output))
    assert list(output.parent.iterdir()) == [output]
    return output


def test_every_expert_of_a_checkpoint_arrives_in_both_tiers(converted: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    weights = safetensors.load_file(TINY_MODEL / "model.safetensors")
    config = json.loads((TINY_MODEL / "config.json").read_text())
    values = tensor_values(converted)
    for layer in range(config["num_hidden_layers"]):
        for part, hf_part in PARTS.items():
            high = values[f"blk.{layer}.{part}.weight"]
            low = values[f"blk.{layer}.{part}.low.0.weight"]
            assert high.shape[0] == config["num_local_experts"]
            for expert in range(high.shape[0]):
                name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{hf_part}.weight"
                np.testing.assert_array_equal(high[expert], weights[name].astype(np.float32), err_msg=name)
            quantized = gguf.quants.quantize(high, GGMLQuantizationType.Q4_0)
            np.testing.assert_array_equal(low, gguf.quants.dequantize(quantized, GGMLQuantizationType.Q4_0))


def test_float_type_of_the_high_tier_is_that_of_the_whole_model(converted: Path) -> None:
    types = {
        tensor.tensor_type.name for tensor in GGUFReader(converted).tensors if ".low." not in tensor.name
    }
    assert types == {"F32"}


def test_tokenizer_and_hyperparameters_come_along(converted: Path) -> None:
    config = json.loads((TINY_MODEL / "config.json").read_text())
    assert values_of(converted, "general.architecture") == "llama"
    assert values_of(converted, "llama.expert_count") == config["num_local_experts"]
    assert len(values_of(converted, "tokenizer.ggml.tokens")) == config["vocab_size"]


@pytest.mark.parametrize(
    ("high", "out_type"),
    [(None, "f16"), ("f32", "f32"), ("F16", "f16"), ("bf16", "bf16"), ("q8_0", "auto"), ("keep", "auto")],
)
def test_checkpoint_is_read_in_a_type_that_holds_the_high_tier(high: str | None, out_type: str) -> None:
    assert checkpoint.out_type(high) == out_type


def test_disk_space_covers_the_intermediate_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = read_model(write_moe(folder.parent / "model.gguf")).tensors
    monkeypatch.setattr(checkpoint, "list_tensors", lambda *_: checkpoint.Listed(tensors, True))
    monkeypatch.setattr(checkpoint, "write_gguf", lambda *_: pytest.fail("started to write"))
    weights = sum(tensor.nbytes for tensor in tensors)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * weights))
    with pytest.raises(HobbitError, match="not enough disk space"):
        convert(Options(folder))


def test_folder_without_config_is_refused(folder: Path) -> None:
    with pytest.raises(HobbitError, match=r"no config\.json, so it is no Hugging Face checkpoint"):
        convert(Options(folder))
    write_moe(folder / "model.gguf")
    with pytest.raises(HobbitError, match="name a GGUF file in it"):
        convert(Options(folder))


def test_unknown_architecture_is_refused_with_the_converters_reason(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "none"}')
    with pytest.raises(
        HobbitError, match=r"llama\.cpp's converter failed on .*: .*NoSuchModel.* not supported"
    ):
        convert(Options(folder))
    assert list(folder.parent.iterdir()) == [folder]


def test_checkpoint_without_its_weights_is_refused(folder: Path) -> None:
    for name in ("config.json", "tokenizer.model", "tokenizer_config.json"):
        shutil.copy(TINY_MODEL / name, folder)
    with pytest.raises(HobbitError, match="has no weights in it"):
        convert(Options(folder))
    assert list(folder.parent.iterdir()) == [folder]


def test_missing_packages_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "config.json").write_text("{}")
    shadow = folder.parent / "vendor"
    (shadow / "gguf-py").mkdir(parents=True)
    (shadow / "conversion.py").write_text("import no_such_package")
    (shadow / "convert_hf_to_gguf.py").touch()
    monkeypatch.setattr(checkpoint, "VENDOR_DIR", shadow)
    monkeypatch.setattr(checkpoint, "_CONVERTER", shadow / "convert_hf_to_gguf.py")
    with pytest.raises(HobbitError, match=r"no_such_package.*pip install \"pyhobbit\[convert\]\""):
        convert(Options(folder))


def test_an_output_may_have_braces_in_its_name(tmp_path: Path) -> None:
    output = tmp_path / "a{ftype}.gguf"
    convert(Options(TINY_MODEL, low="q4_0", output=output))
    assert list(tmp_path.iterdir()) == [output]


def test_sidecar_of_a_checkpoint_is_refused() -> None:
    with pytest.raises(HobbitError, match="MODEL is a folder"):
        convert(Options(TINY_MODEL, sidecar=True))


def test_the_tiny_model_without_torch_is_what_the_converter_makes(tmp_path: Path) -> None:
    arguments = (TINY_MODEL.with_name("to_gguf.py"), tmp_path / "tiny.gguf")
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]\n"
        "sys.modules.update(dict.fromkeys(['torch', 'safetensors', 'sentencepiece', 'transformers']))\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)
    ours, theirs = GGUFReader(tmp_path / "tiny.gguf"), GGUFReader(models.tiny())
    for key, field in ours.fields.items():
        assert key.startswith("GGUF.") or field.contents() == theirs.fields[key].contents(), key
    descriptive = {"general.type", "general.size_label", "general.quantization_version"}
    assert set(theirs.fields) - set(ours.fields) == {*descriptive, "tokenizer.ggml.add_sep_token"}
    assert {each.name for each in ours.tensors} == {each.name for each in theirs.tensors}
    values = {each.name: each for each in theirs.tensors}
    for tensor in ours.tensors:
        assert tensor.tensor_type == values[tensor.name].tensor_type
        assert np.array_equal(tensor.data, values[tensor.name].data)
