# SPDX-License-Identifier: MIT
"""Checkpoints that are damaged, incomplete, out of date or of another form."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TINY_MODEL
from gguf import GGUFReader

from pyhobbit.convert.options import Options
from pyhobbit.convert.pipeline import convert
from pyhobbit.errors import HobbitError

pytestmark = pytest.mark.slow

Change = Callable[[Path], object]
GATE = "model.layers.0.block_sparse_moe.gate.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY_MODEL, tmp_path / "checkpoint"))


def _config(**values: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def _gptq(folder: Path, without: str = "") -> dict[str, Any]:
    """Makes the experts' weights GPTQ's, 4 bits in groups of 32; returns the values that they stand for."""
    numpy = pytest.importorskip("safetensors.numpy")
    values: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for name, weight in numpy.load_file(folder / "model.safetensors").items():
        if ".experts." not in name:
            tensors[name] = weight
            continue
        columns = weight.T.astype(np.float32)  # [inputs, outputs]
        groups = columns.reshape(-1, 32, columns.shape[1])
        scales = (np.abs(groups).max(axis=1) / 7 + 1e-6).astype(np.float16)
        codes = np.clip(np.rint(groups / scales[:, None]) + 8, 0, 15)
        values[name] = ((codes - 8) * scales[:, None].astype(np.float32)).reshape(columns.shape).T
        shifts = np.arange(0, 32, 4, dtype=np.uint32)
        eights = codes.astype(np.uint32).reshape(-1, 8, columns.shape[1])
        parts = {
            "qweight": (eights << shifts[:, None]).sum(axis=1, dtype=np.uint32).view(np.int32),
            "qzeros": np.full((len(scales), columns.shape[1] // 8), 0x77777777, np.int32),  # 8, less 1
            "scales": scales,
            "g_idx": (np.arange(len(columns)) // 32).astype(np.int32),
        }
        parts.pop(without, None)
        tensors |= {name.replace("weight", part): np.ascontiguousarray(each) for part, each in parts.items()}
    numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    _config(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32})(folder)
    return values


def _text(config: str) -> Change:
    return lambda folder: (folder / "config.json").write_text(config)


def _index(weight_map: dict[str, Any]) -> Change:
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text)


def _offsets(value: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        (size,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + size])
        header[GATE]["data_offsets"] = value
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])

    return change


def _weights(edit: Callable[[dict[str, np.ndarray]], object]) -> Change:
    def change(folder: Path) -> None:
        numpy = pytest.importorskip("safetensors.numpy")
        weights = numpy.load_file(folder / "model.safetensors")
        edit(weights)
        numpy.save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return change


def _shards(folder: Path, n: int, factor: float = 1.0) -> dict[str, str]:
    """Adds the model in n files, multiplied; returns the map of its index."""
    numpy = pytest.importorskip("safetensors.numpy")
    weights, places = numpy.load_file(folder / "model.safetensors"), {}
    for i in range(n):
        name = f"model-{i + 1:05d}-of-{n:05d}.safetensors"
        part = {each: weights[each] * weights[each].dtype.type(factor) for each in sorted(weights)[i::n]}
        numpy.save_file(part, folder / name, {"format": "pt"})
        places |= dict.fromkeys(part, name)
    return places


def _mistral(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    (folder / "params.json").write_text("{}")


def _turned(weights: dict[str, np.ndarray]) -> None:
    weights[GATE] = np.ascontiguousarray(weights[GATE].T)


def _without_tokenizer(folder: Path) -> None:
    for path in folder.glob("token*"):
        path.unlink()


def _cut_archive(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"PK" + bytes(1000))


FAULTS: dict[str, tuple[Change, str]] = {
    "endless layers": (_config(num_hidden_layers=2**31), "its num_hidden_layers is 2147483648"),
    "endless vocabulary": (_config(vocab_size=2**31), "its vocab_size is 2147483648"),
    "layers as text": (_config(num_hidden_layers="8"), 'its num_hidden_layers is "8"'),
    "no layers": (
        _config(num_hidden_layers=None),
        "config.json is damaged: its num_hidden_layers is null; a whole number from 1 to 10000 is needed",
    ),
    "too many used": (
        _config(num_experts_per_tok=100),
        "config.json is damaged: its num_experts_per_tok is 100; a whole number from 1 to 8 is needed",
    ),
    "epsilon that is none": (_config(rms_norm_eps=float("nan")), "rms_norm_eps is NaN; a number from 0"),
    "base as text": (_config(rope_theta="x"), 'its rope_theta is "x"; a number from 0 is needed'),
    "no heads": (_config(num_attention_heads=0), "its num_attention_heads is 0; a whole number from 1"),
    "width as text": (_config(intermediate_size="x"), 'its intermediate_size is "x"; a whole number'),
    "quantisation as number": (_config(quantization_config=5), "its quantization_config is 5; an object"),
    "architecture as number": (_config(architectures=5), "its architectures is 5; a list of names"),
    "tokenizer as list": (
        lambda folder: (folder / "tokenizer.json").write_text("[]"),
        "tokenizer.json is no JSON object",
    ),
    "scaling of another form": (
        _config(rope_scaling={"type": 5}),
        "failed on .*, see its config.json and tokenizer.json: AttributeError",
    ),
    "half a layer": (_config(num_hidden_layers=1.5), "its num_hidden_layers is 1.5"),
    "text_config": (_config(text_config=[]), r"its text_config is \[\]"),
    "deep config": (
        lambda folder: (folder / "config.json").write_text("[" * 100_000),
        "cannot be read as JSON",
    ),
    "list as config": (lambda folder: (folder / "config.json").write_text("[]"), "is no JSON object"),
    "place that is no name": (_index({"a": 5}), "its weight_map is 5"),
    "place in another folder": (_index({"a": "../x"}), "its weight_map is ../x"),
    "long place": (_index({"a": "x" * 300}), "its weight_map is xxx"),
    "no offsets": (_offsets([]), "damaged in its header"),
    "one offset": (_offsets([0]), "damaged in its header"),
    "half an offset": (_offsets([0, 1.5]), "damaged in its header"),
    "negative offset": (_offsets([0, -1]), "damaged in its header"),
    "NaN as offset": (_offsets([0, float("nan")]), "damaged in its header"),
    "no gate": (_weights(lambda each: each.pop(GATE)), "tensor 'blk.0.ffn_gate_inp.weight' not found"),
    "turned gate": (_weights(_turned), "'blk.0.ffn_gate_inp.weight' has wrong shape"),
    "no output": (
        _weights(lambda each: each.pop("model.layers.3.self_attn.o_proj.weight")),
        "tensor 'blk.3.attn_output.weight' not found",
    ),
    "an expert less": (
        _weights(lambda each: each.pop("model.layers.1.block_sparse_moe.experts.2.w1.weight")),
        "lacks the weights of an expert",
    ),
    "AWQ": (_config(quantization_config={"quant_method": "awq"}), r"is quantised already \(awq\)"),
    "MLX": (_config(quantization={"group_size": 64, "bits": 4}), r"is quantised already \(MLX\)"),
    "GPTQ": (lambda folder: _gptq(folder, without="g_idx"), r"is quantised already \(gptq\)"),
    "no tokenizer": (_without_tokenizer, "has no tokenizer.json or tokenizer.model that can be read"),
    "cut archive": (_cut_archive, "pytorch_model.bin is incomplete"),
    "Mistral's": (_mistral, "is in Mistral's own form"),
    "two models": (lambda folder: _index(_shards(folder, 2, 0.5))(folder), "both hold the model"),
    "old index": (
        _index({"lm_head.weight": "model-00001-of-00002.safetensors"}),
        "both hold the model: remove those that are out of date",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_dry_run_names_the_fault(fault: str, folder: Path) -> None:
    change, message = FAULTS[fault]
    change(folder)
    before = sorted(folder.parent.iterdir())
    with pytest.raises(HobbitError, match=message) as error:
        convert(Options(folder, low="q4_0", dry_run=True))
    assert len(str(error.value)) < 500
    assert "header.gguf" not in str(error.value)
    assert sorted(folder.parent.iterdir()) == before


@pytest.mark.parametrize(("value", "what"), [(np.nan, r"not finite \(NaN\)"), (np.inf, "infinite in f32")])
def test_a_norm_that_is_not_finite_is_refused(folder: Path, value: float, what: str) -> None:
    def edit(weights: dict[str, np.ndarray]) -> None:
        weights["model.norm.weight"][3] = value

    _weights(edit)(folder)
    with pytest.raises(HobbitError, match=f"'output_norm.weight' has values that are {what}"):
        convert(Options(folder, low="q4_0", high="f32"))


def test_a_checkpoint_of_gptq_is_converted(folder: Path) -> None:
    values = _gptq(folder)
    output = convert(Options(folder, high="f32", low="q4_0"))
    assert output is not None
    (gates,) = (each for each in GGUFReader(output).tensors if each.name == "blk.0.ffn_gate_exps.weight")
    for i, found in enumerate(gates.data):
        name = f"model.layers.0.block_sparse_moe.experts.{i}.w1.weight"
        np.testing.assert_allclose(found, values[name], rtol=1e-3, atol=1e-6)
