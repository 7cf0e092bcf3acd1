# SPDX-License-Identifier: MIT
"""Writes what llama.cpp's converter makes of a checkpoint: the header alone, or the whole file.

Run in a process of its own by checkpoint.py, with llama.cpp's `conversion` and `gguf` packages on PYTHONPATH.
The header takes no weights; the whole file holds one tensor at a time, all experts of a layer's part.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
from conversion.base import LazyTorchTensor
from conversion.deepseek import DeepseekV4Model

_NVFP4_BYTES, _NVFP4_BLOCK = 9, 16  # bytes of a block's scale and codes


def main(folder: Path, out_type: str, has_mtp: str, converter: str, output: str, part: str = "whole") -> None:
    """has_mtp: no where the checkpoint lacks the weights of draft blocks, which its config may announce.

    converter: the script that writes the output.  part: whole, or header; yes or no is printed: a known draft
    block is left out.
    """
    _keep_experts_lazy()
    _stack_by_shape()
    architecture = get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT)
    model_class = get_model_class(architecture)
    without_mtp = has_mtp == "no" and model_class.supports_mtp_export
    if without_mtp:
        model_class.no_mtp = True
    print("yes" if without_mtp else "no")
    if part == "header":
        ModelBase.write = _write_header
    sys.argv = [converter, str(folder), "--outtype", out_type, "--outfile", output]
    runpy.run_path(converter, run_name="__main__")


def _write_header(model):
    """ModelBase.write() without weights."""
    model.prepare_tensors()
    model.prepare_metadata(vocab_only=False)
    model.gguf_writer.write_header_to_file(path=model.fname_out)
    model.gguf_writer.write_kv_data_to_file()
    model.gguf_writer.write_ti_data_to_file()
    model.gguf_writer.close()


def _keep_experts_lazy() -> None:
    """Otherwise all experts in NVFP4 or of DeepSeek-V4 are read before the first tensor is written."""
    generate, pack = ModelBase._generate_nvfp4_tensors, ModelBase._nvfp4_pack
    to_eager = LazyTorchTensor.to_eager

    def generate_lazily(model):
        LazyTorchTensor.to_eager = lambda each: each if getattr(each, "ndim", 0) >= 2 else to_eager(each)
        try:
            generate(model)
        finally:
            LazyTorchTensor.to_eager = to_eager

    def pack_lazily(weight, scale):
        n_rows, n_blocks = weight.shape[0], scale.shape[1]
        data = _lazy((n_rows, n_blocks * _NVFP4_BYTES), lambda: pack(to_eager(weight), to_eager(scale))[0])
        return data, [n_rows, n_blocks * _NVFP4_BLOCK]

    def write_lazily(model, layer, projection, key):
        stem, n_experts = f"layers.{layer}.ffn.experts.", model.hparams["n_routed_experts"]
        names = [[f"{stem}{i}.{projection}.{part}" for part in ("weight", "scale")] for i in range(n_experts)]
        data = model._mxfp4_expert_tensor([[model.model_tensors[name] for name in pair] for pair in names])
        name = model.format_tensor_name(key, layer)
        model.gguf_writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        return [name for pair in names for name in pair]

    ModelBase._generate_nvfp4_tensors = generate_lazily
    ModelBase._nvfp4_pack = staticmethod(pack_lazily)
    DeepseekV4Model._write_mxfp4_expert_tensor = write_lazily
    lazy: Any = gguf.LazyNumpyTensor
    lazy.copy, lazy.__array_function__ = lambda tensor: tensor, _stack


def _stack(_first, function, _types, args, _kwargs):
    """np.stack of the experts of a part: each is read when all are written, and let go."""
    assert function is np.stack
    experts = list(args[0])

    def load():
        data = np.empty((len(experts), *experts[0].shape), np.uint8)
        for i in range(len(experts)):
            data[i], experts[i] = gguf.LazyNumpyTensor.to_eager(experts[i]), None
        return data

    return _lazy((len(experts), *experts[0].shape), load)


def _stack_by_shape() -> None:
    """Otherwise torch imports its compiler, which takes seconds, to find the shape of a stack."""
    usual = LazyTorchTensor.__torch_function__

    def call(cls, function, types, args=(), kwargs=None):
        found = {(each.dtype, each.shape) for each in args[0]} if function is torch.stack else ()
        if len(found) != 1 or (kwargs or {}) != {"dim": 0}:
            return usual(function, types, args, kwargs)
        ((dtype, shape),) = found
        meta = cls.meta_with_dtype_and_shape(dtype, (len(args[0]), *shape))
        return cls(meta=meta, args=args, kwargs=kwargs, func=function)

    LazyTorchTensor.__torch_function__ = classmethod(call)


def _lazy(shape, load):
    meta = gguf.LazyNumpyTensor.meta_with_dtype_and_shape(np.uint8, shape)
    return gguf.LazyNumpyTensor(meta=meta, func=load)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
