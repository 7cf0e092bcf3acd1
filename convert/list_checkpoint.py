# SPDX-License-Identifier: MIT
"""Prints, as JSON, the tensors that llama.cpp's converter makes of a checkpoint; reads no weights.

Run in a process of its own by checkpoint.py, with llama.cpp's `conversion` and `gguf` packages on PYTHONPATH.
"""

import json
import sys
from pathlib import Path

import gguf
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

_FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "auto": gguf.LlamaFileType.GUESSED,
}


def main(folder: Path, out_type: str) -> None:
    architecture = get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT)
    model = get_model_class(architecture)(folder, _FILE_TYPES[out_type], folder / "unused.gguf")
    model.prepare_tensors()
    tensors = [
        {"name": name, "type_id": int(info.dtype), "ne": [int(n) for n in reversed(info.shape)]}
        for split in model.gguf_writer.tensors
        for name, info in split.items()
    ]
    json.dump(tensors, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
