# SPDX-License-Identifier: MIT
"""Checkpoints in the forms in which they are published, and those that are incomplete."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from conftest import TINY_MODEL
from convert_fixtures import tensor_values

from pyhobbit.cli.main import main
from pyhobbit.convert.options import Options
from pyhobbit.convert.pipeline import convert
from pyhobbit.convert.shards import check_checkpoint
from pyhobbit.errors import HobbitError

pytestmark = pytest.mark.slow
torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

Weights = dict[str, Any]
N_SHARDS = 3
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 40960\n"
SHARD = "model-0000{}-of-00003.safetensors"


def tiny_weights() -> Weights:
    return safetensors.load_file(TINY_MODEL / "model.safetensors")


def write_checkpoint(folder: Path, weights: Weights, shards: int = 1, index: bool = False) -> Path:
    """The tiny model's configuration and these weights, in shards by layer."""
    folder.mkdir()
    for path in TINY_MODEL.iterdir():
        if path.suffix in (".json", ".model"):
            shutil.copy(path, folder)
    layer = re.compile(r"layers\.(\d+)\.")
    parts: dict[str, Weights] = {}
    weight_map = {}
    for name, tensor in weights.items():
        number = int(found[1]) * shards // 6 + 1 if (found := layer.search(name)) else 1
        part = SHARD.format(number) if shards > 1 else "model.safetensors"
        parts.setdefault(part, {})[name] = tensor.contiguous()
        weight_map[name] = part
    for part, tensors in parts.items():
        safetensors.save_file(tensors, folder / part)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def refusal(folder: Path, **options: object) -> str:
    before = sorted(folder.parent.rglob("*"))
    with pytest.raises(HobbitError) as caught:
        convert(Options(folder, **options))
    assert sorted(folder.parent.rglob("*")) == before
    return str(caught.value)


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "absent": (Path.unlink, "a file of the checkpoint is missing: {}"),
    "pointer": (lambda path: path.write_text(POINTER), "{} is a Git LFS pointer, not the file itself"),
    "cut": (cut, "{} is incomplete: it has "),
    "cut in its header": (
        lambda path: path.write_bytes(path.read_bytes()[:40]),
        "{} is incomplete or damaged",
    ),
    "empty": (lambda path: path.write_bytes(b""), "{} is incomplete or damaged"),
}


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize(("damage", "says"), DAMAGE.values(), ids=DAMAGE)
def test_a_shard_that_is_not_there_as_a_whole_is_named(
    tmp_path: Path, damage: Callable[[Path], object], says: str, index: bool
) -> None:
    folder = write_checkpoint(tmp_path / "m", tiny_weights(), N_SHARDS, index)
    shard = folder / SHARD.format(N_SHARDS)
    damage(shard)
    assert says.format(shard) in refusal(folder)


def test_a_cut_single_file_and_a_pointer_of_the_tokenizer_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", tiny_weights())
    (folder / "tokenizer.model").write_text(POINTER)
    assert f"{folder / 'tokenizer.model'} is a Git LFS pointer" in refusal(folder)
    shutil.copy(TINY_MODEL / "tokenizer.model", folder)
    cut(folder / "model.safetensors")
    assert f"{folder / 'model.safetensors'} is incomplete: it has " in refusal(folder)
    (folder / "config.json").write_text(POINTER)
    assert f"{folder / 'config.json'} is a Git LFS pointer" in refusal(folder)


def test_weights_that_no_shard_has_are_named(tmp_path: Path) -> None:
    weights = tiny_weights()
    lacking = {name: each for name, each in weights.items() if "layers.3." not in name}
    folder = write_checkpoint(tmp_path / "m", lacking)
    assert "has no weights of layer 3" in refusal(folder)
    folder = write_checkpoint(
        tmp_path / "n", {name: each for name, each in weights.items() if name != "model.norm.weight"}
    )
    assert "tensor 'output_norm.weight' not found; download the rest" in refusal(folder)


def test_shards_with_an_index_are_the_single_file(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", tiny_weights(), N_SHARDS, index=True)
    output = convert(Options(folder, low="q4_0", output=tmp_path / "out.gguf"))
    values, single = tensor_values(output), tensor_values(models.tiny_tiers("f16", "q4_0"))
    assert values.keys() == single.keys()
    for name, wanted in single.items():
        np.testing.assert_array_equal(values[name], wanted, err_msg=name)


def test_a_draft_block_in_a_file_of_its_own_is_seen(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", tiny_weights(), N_SHARDS)
    assert not check_checkpoint(folder)
    safetensors.save_file({"mtp.fc.weight": torch.zeros(4, 4)}, folder / "model-mtp.safetensors")
    assert check_checkpoint(folder)


EXPERT = "model.layers.1.block_sparse_moe.experts.2.w1.weight"


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", EXPERT])
def test_values_that_f16_cannot_hold_are_read_as_bf16(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {key: each.to(torch.bfloat16) for key, each in tiny_weights().items()}
    weights[name][3, 5] = -1e5
    folder = write_checkpoint(tmp_path / "m", weights)
    output = tmp_path / "out.gguf"
    assert main(["convert", str(folder), "-o", str(output)]) == 0
    assert re.search(
        r"note: tensor '.*' has values that are infinite in f16.*; reading the checkpoint as bf16",
        capsys.readouterr().err,
    )
    largest = [np.abs(values).max() for values in tensor_values(output).values()]
    assert np.isfinite(largest).all()
    assert max(largest) == 99840
    output.unlink()
    if name == EXPERT:
        message = refusal(folder, output=output, high="f16")
        assert "infinite in f16" in message
        assert "--high bf16" in message


#
# published forms
#


def fp8_blocks(weights: Weights, config: dict[str, Any]) -> Weights:
    """Weights as DeepSeek and Qwen publish them: e4m3 with a scale per 128 x 128 values."""
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    found = {}
    for name, each in weights.items():
        if "experts" not in name:
            found[name] = each
            continue
        rows, columns = (-(-n // 128) for n in each.shape)
        padded = torch.zeros(rows * 128, columns * 128)
        padded[: each.shape[0], : each.shape[1]] = each
        blocks = padded.reshape(rows, 128, columns, 128)
        scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / 448
        codes = (blocks / scale[:, None, :, None]).reshape(padded.shape)[: each.shape[0], : each.shape[1]]
        found[name] = codes.to(torch.float8_e4m3fn)
        found[f"{name}_scale_inv"] = scale
    return found


def test_fp8_with_block_scales(tmp_path: Path) -> None:
    weights = {name: each.float() for name, each in tiny_weights().items()}
    config = json.loads((TINY_MODEL / "config.json").read_text())
    folder = write_checkpoint(tmp_path / "m", fp8_blocks(weights, config))
    (folder / "config.json").write_text(json.dumps(config))
    values = tensor_values(convert(Options(folder, output=tmp_path / "out.gguf")))
    for expert in (0, 5):
        wanted = weights[f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight"].numpy()
        error = np.linalg.norm(values["blk.1.ffn_down_exps.weight"][expert] - wanted)
        assert error < 0.04 * np.linalg.norm(wanted)
