# SPDX-License-Identifier: MIT
"""Qwen3.5's checkpoints without the draft block's weights, and experts in NVFP4 and of DeepSeek-V4."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import forked
import pytest

from pyhobbit.convert import checkpoint
from pyhobbit.model.gguf_file import read_gguf
from pyhobbit.native.paths import VENDOR_DIR

pytestmark = pytest.mark.slow
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

SCRIPT = Path(checkpoint.__file__).with_name("run_converter.py")
N_LAYERS, N_EXPERTS, N_EMBD, N_FF = 2, 4, 128, 64
# No tokenizer is at hand that the converter knows for this architecture.
STUB = """
import runpy, sys
import conversion.base, conversion.qwen as qwen
for each in [conversion.base.TextModel, *vars(qwen).values()]:
    if isinstance(each, type) and hasattr(each, "set_vocab"):
        each.set_vocab = lambda model: None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def write_qwen(folder: Path, **config: object) -> dict[str, Any]:
    torch.manual_seed(0)
    settings = transformers.Qwen3_5MoeTextConfig(
        vocab_size=64, hidden_size=N_EMBD, num_hidden_layers=N_LAYERS, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, linear_key_head_dim=32, linear_value_head_dim=32,
        linear_num_key_heads=2, linear_num_value_heads=4, moe_intermediate_size=N_FF,
        shared_expert_intermediate_size=64, num_experts=N_EXPERTS, num_experts_per_tok=2,
    )  # fmt: skip
    transformers.Qwen3_5MoeForCausalLM(settings).save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    written.pop("mtp_num_hidden_layers", None)
    (folder / "config.json").write_text(json.dumps({**written, **config}))
    return safetensors.load_file(folder / "model.safetensors")


def run_vendor(*arguments: object, code: str = STUB) -> None:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(VENDOR_DIR), str(VENDOR_DIR / "gguf-py")]))
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(code)
        script.flush()
        done = forked.CONVERTER.run([script.name, *arguments], env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("config", [{}, {"mtp_num_hidden_layers": 0}, {"mtp_num_hidden_layers": 1}])
def test_a_draft_block_without_weights_is_left_out(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: dict[str, int],
) -> None:
    write_qwen(tmp_path, **config)
    script = tmp_path / "without_tokenizer.py"
    script.write_text(f"import sys\nsys.argv.insert(1, {str(SCRIPT)!r})\n{STUB}")
    monkeypatch.setattr(checkpoint, "_SCRIPT", script)
    monkeypatch.setattr(checkpoint, "check_loads", lambda *_: None)  # it would want a tokenizer
    tensors, has_mtp = checkpoint.list_tensors(tmp_path, "f16")
    assert "has no weights of a draft block (MTP): converted without" in capsys.readouterr().err
    assert not has_mtp
    output = tmp_path / "out.gguf"
    run_vendor(SCRIPT, tmp_path, "f16", "no", VENDOR_DIR / "convert_hf_to_gguf.py", output)
    file = read_gguf(output)
    assert file.metadata["qwen35moe.block_count"].value() == N_LAYERS
    assert not any("nextn" in key for key in file.metadata)
    assert {each.name for each in file.tensors} == {each.name for each in tensors}


def test_experts_in_nvfp4_are_those_of_the_converter(tmp_path: Path) -> None:
    quantized = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    weights = {k: v for k, v in write_qwen(tmp_path, **quantized).items() if ".mlp.experts." not in k}
    shapes = {"gate_proj": (N_FF, N_EMBD), "up_proj": (N_FF, N_EMBD), "down_proj": (N_EMBD, N_FF)}
    for number in range(N_LAYERS * N_EXPERTS):
        for part, (rows, columns) in shapes.items():
            stem = f"model.layers.{number // N_EXPERTS}.mlp.experts.{number % N_EXPERTS}.{part}."
            weights[f"{stem}weight"] = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
            weights[f"{stem}weight_scale"] = (100 * torch.rand(rows, columns // 16)).to(torch.float8_e4m3fn)
            weights[f"{stem}weight_scale_2"] = torch.tensor(1e-4 * (number + 1))
    safetensors.save_file(weights, tmp_path / "model.safetensors")
    converter, ours, theirs = VENDOR_DIR / "convert_hf_to_gguf.py", tmp_path / "ours", tmp_path / "theirs"
    run_vendor(SCRIPT, tmp_path, "f16", "no", converter, ours)
    run_vendor(converter, tmp_path, "--outtype", "f16", "--no-mtp", "--outfile", theirs)
    assert ours.read_bytes() == theirs.read_bytes()
    assert {each.type.name for each in read_gguf(ours).tensors if "_exps.weight" in each.name} == {"nvfp4"}


DEEPSEEK = """
import sys
from types import SimpleNamespace
import torch
from conversion.deepseek import DeepseekV4Model as Model
sys.path.insert(0, sys.argv[1])
import run_converter
from conversion.base import LazyTorchTensor
torch.manual_seed(0)
tensors, written = {}, []
for expert in range(3):
    for part, columns in (("weight", 32), ("scale", 2)):
        value = torch.randint(0, 256, (8, columns), dtype=torch.uint8)
        name = f"layers.1.ffn.experts.{expert}.w1.{part}"
        tensors[name] = lambda value=value: LazyTorchTensor.from_eager(value)
model = SimpleNamespace(
    hparams={"n_routed_experts": 3},
    model_tensors=tensors,
    format_tensor_name=lambda key, layer: f"{key} {layer}",
    repack_mxfp4_blocks=Model.repack_mxfp4_blocks,
    gguf_writer=SimpleNamespace(add_tensor=lambda *each, raw_dtype: written.append((*each, raw_dtype))),
)
model._mxfp4_expert_tensor = lambda loaders: Model._mxfp4_expert_tensor(model, loaders)
consumed = [Model._write_mxfp4_expert_tensor(model, 1, "w1", "gate")]
run_converter._keep_experts_lazy()
consumed.append(Model._write_mxfp4_expert_tensor(model, 1, "w1", "gate"))
(name, eager, kind), (other, lazy, its) = written
assert (name, kind, consumed[0]) == (other, its, consumed[1])
assert (type(eager).__name__, type(lazy).__name__) == ("ndarray", "LazyNumpyTensor")
assert (type(lazy).to_eager(lazy) == eager).all() and lazy.shape == eager.shape
"""


def test_experts_of_deepseek_v4_are_read_when_they_are_written() -> None:
    run_vendor(SCRIPT.parent, code=DEEPSEEK)
