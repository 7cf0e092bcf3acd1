# SPDX-License-Identifier: MIT
"""A random-weight projector (mmproj) for a random model, and a picture: what a model needs to see."""

import struct
import zlib
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

N_IMAGE = 32  # pixels, square
N_PATCH = 8
N_TOKENS = (N_IMAGE // N_PATCH) ** 2
_N_EMBD, _N_FF, _N_LAYER = 32, 64, 2


def write_projector(path: Path, n_embd: int, n_ff: int = _N_FF) -> None:
    """Janus-Pro's: an image is N_TOKENS tokens.  n_embd: of the text model.  n_ff: makes it larger."""
    random = np.random.default_rng(0)
    writer = GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    writer.add_string("clip.projector_type", "janus_pro")
    vision = {
        "image_size": N_IMAGE, "patch_size": N_PATCH, "embedding_length": _N_EMBD, "block_count": _N_LAYER,
        "feed_forward_length": n_ff, "attention.head_count": 2, "projection_dim": n_embd,
    }  # fmt: skip
    for key, value in vision.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5] * 3)
    writer.add_array("clip.vision.image_std", [0.5] * 3)

    def add(name: str, *shape: int) -> None:
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
        writer.add_tensor(name, (scale * random.standard_normal(shape)).astype(np.float32))

    add("v.patch_embd.weight", _N_EMBD, 3, N_PATCH, N_PATCH)
    add("v.position_embd.weight", N_TOKENS, _N_EMBD)
    for i in range(_N_LAYER):
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            add(f"v.blk.{i}.{name}.weight", _N_EMBD, _N_EMBD)
        add(f"v.blk.{i}.ffn_up.weight", n_ff, _N_EMBD)
        add(f"v.blk.{i}.ffn_down.weight", _N_EMBD, n_ff)
        for name in ("ln1", "ln2"):
            writer.add_tensor(f"v.blk.{i}.{name}.weight", np.ones(_N_EMBD, np.float32))
            writer.add_tensor(f"v.blk.{i}.{name}.bias", np.zeros(_N_EMBD, np.float32))
    for i, n_in in enumerate((_N_EMBD, n_embd)):
        add(f"mm.{i}.weight", n_embd, n_in)
        add(f"mm.{i}.bias", n_embd)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def picture(red: int, width: int = N_IMAGE) -> bytes:
    """A square PNG of one colour."""
    row = b"\0" + bytes([red, 80, 160]) * width
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, width, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(row * width)),
        (b"IEND", b""),
    ]
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
