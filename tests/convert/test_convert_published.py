# SPDX-License-Identifier: MIT
"""Checkpoints in MXFP4, and with fused gate and up: the bits of llama.cpp's own conversion, opened."""

from __future__ import annotations

import re
from pathlib import Path

import models
import numpy as np
import pytest
from gguf import GGUFReader
from test_convert_drafts_and_fp4 import run_vendor

from pyhobbit import CacheConfig, Engine, EngineConfig, SamplingConfig
from pyhobbit.convert import checkpoint
from pyhobbit.convert.options import Options
from pyhobbit.convert.pipeline import convert
from pyhobbit.native.paths import VENDOR_DIR

pytestmark = [pytest.mark.slow, pytest.mark.model]
torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
BED = Path(__file__).parent.parent / "models_bed"
# the converter knows vocabularies by a hash
KNOWN = """
import runpy, sys
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda _self, _tokenizer: "gpt-2"
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def fused(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All experts in one tensor, and gate_proj and up_proj of each together, as Qwen3.5 is published."""
    found, experts = {}, {}
    for name, weight in weights.items():
        if match := re.fullmatch(r"(.*\.experts\.)(\d+)\.(gate|up|down)_proj\.weight", name):
            experts[match[1], int(match[2]), match[3]] = weight
        else:
            found[name] = weight
    for stem in {stem for stem, _, _ in experts}:
        parts = {
            part: torch.stack([experts[stem, n, part] for n in range(8)]) for part in ("gate", "up", "down")
        }
        found[f"{stem}gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
        found[f"{stem}down_proj"] = parts["down"].contiguous()
    return found


def varied(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Scales of all blocks and all biases differ."""
    for name, weight in weights.items():
        if name.endswith("_scales"):
            weights[name] = torch.randint(110, 127, weight.shape, dtype=torch.uint8)
        elif "bias" in name or name.endswith("sinks"):
            weights[name] = (0.1 * torch.randn(weight.shape)).to(weight.dtype)
    return weights


@pytest.mark.parametrize(("name", "kind"), [("gpt-oss-20b", "mxfp4"), ("qwen3.6-35b", "f16")])
def test_a_published_form_is_converted_as_by_llama_cpp(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BED)
    from checkpoints import write_checkpoint

    folder, ours, theirs = (tmp_path / each for each in ("m", "ours.gguf", "theirs.gguf"))
    write_checkpoint(name, folder)
    torch.manual_seed(1)
    for path in folder.glob("*.safetensors"):
        weights = varied(safetensors.load_file(path))
        safetensors.save_file(weights, path, {"format": "pt"})
    if name.startswith("qwen"):
        paths = sorted(folder.glob("*.safetensors"))
        weights = {key: each for path in paths for key, each in safetensors.load_file(path).items()}
        for path in (*paths, folder / "model.safetensors.index.json"):
            path.unlink()
        safetensors.save_file(fused(weights), folder / "model.safetensors", {"format": "pt"})
    options = ["--outtype", "f16", "--outfile", theirs, *(["--no-mtp"] if kind == "f16" else [])]
    run_vendor(VENDOR_DIR / "convert_hf_to_gguf.py", folder, *options, code=KNOWN)
    monkeypatch.setattr(checkpoint, "_CONVERTER", BED / "convert_known.py")
    convert(Options(folder, low="q2_k" if kind == "mxfp4" else "q4_0", output=ours))
    found = {each.name: each for each in GGUFReader(ours).tensors}
    experts = []
    for wanted in GGUFReader(theirs).tensors:
        same = found[wanted.name]
        assert (same.tensor_type, same.shape.tolist()) == (wanted.tensor_type, wanted.shape.tolist())
        np.testing.assert_array_equal(
            same.data.view(np.uint8), wanted.data.view(np.uint8), err_msg=wanted.name
        )
        experts += [same.tensor_type.name.lower()] if "_exps.weight" in wanted.name else []
    assert set(experts) == {kind}
    config = EngineConfig(CacheConfig(pools=models.routed_expert_bytes(theirs)), n_ctx=64)
    with Engine(ours, config) as engine:
        assert list(engine.generate("hello", 2, SamplingConfig(temp=0)))
        assert engine.stats().cache.selections_high
