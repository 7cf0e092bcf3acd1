# SPDX-License-Identifier: MIT
"""Writes models of the test bed (beds.py) as GGUF files of random weights.

python tests/models_bed/make.py qwen3.6-35b OUT.gguf
python tests/models_bed/make.py kimi-k3-experts OUT.gguf
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "engine"))

import architecture_models
import models
import numpy as np
import random_weights
from beds import BEDS, EXPERTS_SUFFIX, Bed, bed
from gguf import GGMLQuantizationType

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# llama-quantize's choice where 256 does not divide a row, and where 32 does not
_FALLBACK = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
# as llama-quantize leaves them
_FULL = re.compile(
    r"norm|ffn_gate_inp|conv1d|conv\.weight|per_layer_model_proj|indexer\.[kq]_proj|(?<!weight)$"
)
_FULL_GLM5_NEXT = re.compile(r"hc_|indexer|ssm_[fg]_[ab]|ssm_beta|attn_kv_a_mqa|attn_[kv]_b")


def _kind(tensor: architecture_models.Tensor, entry: Bed) -> GGMLQuantizationType:
    if tensor.name.endswith("tid2eid.weight"):
        return GGMLQuantizationType.I32
    full = len(tensor.ne) == 1 or _FULL.search(tensor.name)
    if full or (entry.arch == "glm5-next" and _FULL_GLM5_NEXT.search(tensor.name)):
        return GGMLQuantizationType.F32
    kind = entry.dense
    if architecture_models.EXPERTS.search(tensor.name):
        kind = entry.experts["down" in tensor.name]
    if tensor.ne[0] % 256:
        kind = _FALLBACK.get(kind, kind)
    return GGMLQuantizationType[(kind if tensor.ne[0] % 32 == 0 else "f16").upper()]


def _declared(tensor: architecture_models.Tensor, entry: Bed) -> random_weights.Tensor:
    """Values that keep the size of activations, as architecture_models draws them."""
    mean, std = 0.0, tensor.ne[0] ** -0.5
    choices = 0
    if tensor.name.endswith("tid2eid.weight"):
        choices = int(str(entry.keys["expert_count"]))
    elif tensor.name.endswith(".ssm_a"):
        mean, std = -1.0, 0.2  # a decay
    elif re.search(r"norm\w*(\.weight)?$|\.scale$|rope_freqs", tensor.name):
        mean, std = 1.0, 0.1
    elif ".ffn_gate_inp" in tensor.name:
        std *= 1.5
    elif tensor.name == "token_embd.weight":
        std = 1.0
    elif len(tensor.ne) == 1:
        std = 0.1
    n_zero = random_weights.FIRST_PIECE if tensor.name == "output.weight" else 0  # greedy texts are letters
    return random_weights.Tensor(tensor.name, tensor.ne, _kind(tensor, entry), std, mean, choices, n_zero)


def write_bed(name: str, path: Path) -> None:
    """Writes NAME or NAME-experts of the table; needs `make stock`. KeyError for another name."""
    entry, lib_dir = bed(name), models.stock_dir()
    os.environ.setdefault("LLAMA_CPP_LIB_PATH", str(lib_dir))
    import llama_cpp.llama_cpp as llama

    architecture = entry.architecture()
    architecture_models.write_metadata(entry.arch, architecture, path)
    tensors = [
        _declared(tensor, entry)
        for tensor in architecture_models.wanted_tensors(llama, lib_dir, architecture, path)
        if not re.search(entry.left_out, tensor.name)
    ]
    writer: Any = architecture_models.metadata_writer(entry.arch, architecture, path)
    writer.add_chat_template(TEMPLATE)
    random_weights.write_tensors(writer, tensors, random_weights.Quantizer(lib_dir))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write a model of the test bed.")
    names = [*BEDS, *(name + EXPERTS_SUFFIX for name in BEDS)]
    parser.add_argument("name", choices=names, metavar="NAME", help=", ".join(BEDS) + "; or NAME-experts")
    parser.add_argument("out", type=Path, metavar="OUT")
    args = parser.parse_args(argv)
    np.seterr(all="raise")
    write_bed(args.name, args.out)
    print(f"{args.out}: {args.out.stat().st_size >> 20} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
