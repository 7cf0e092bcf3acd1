# SPDX-License-Identifier: MIT
"""Random-weight projectors (mmproj) for a random model, a picture and a sound: it can see or hear."""

import struct
import zlib
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

N_IMAGE = 32  # pixels, square
N_PATCH = 8
N_TOKENS = (N_IMAGE // N_PATCH) ** 2
_N_EMBD, _N_FF, _N_LAYER = 32, 64, 2
_N_MEL, _N_FRAMES = 128, 1500  # a sound of half a minute


class _Projector:
    """One with the transformer that all kinds have; then each adds its own tensors."""

    def __init__(self, path: Path, what: str, kind: str, n_ff: int, **keys: int) -> None:
        self.writer, self._random, self._prefix = GGUFWriter(path, "clip"), np.random.default_rng(0), what[0]
        self.writer.add_bool(f"clip.has_{what}_encoder", True)
        self.writer.add_bool("clip.use_gelu", True)
        self.writer.add_string("clip.projector_type", kind)
        size = {"embedding_length": _N_EMBD, "block_count": _N_LAYER, "feed_forward_length": n_ff}
        for key, value in {**size, "attention.head_count": 2, **keys}.items():
            self.writer.add_uint32(f"clip.{what}.{key}", value)
        self.writer.add_float32(f"clip.{what}.attention.layer_norm_epsilon", 1e-5)
        for i in range(_N_LAYER):
            for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
                self.add(f"blk.{i}.{name}.weight", _N_EMBD, _N_EMBD)
                if name != "attn_k":
                    self.add(f"blk.{i}.{name}.bias", _N_EMBD)
            self.add(f"blk.{i}.ffn_up.weight", n_ff, _N_EMBD)
            self.add(f"blk.{i}.ffn_down.weight", _N_EMBD, n_ff)
            for name in ("ln1", "ln2"):
                self.writer.add_tensor(f"{self._prefix}.blk.{i}.{name}.weight", np.ones(_N_EMBD, np.float32))
                self.writer.add_tensor(f"{self._prefix}.blk.{i}.{name}.bias", np.zeros(_N_EMBD, np.float32))

    def add(self, name: str, *shape: int, kind: type = np.float32) -> None:
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
        tensor = (scale * self._random.standard_normal(shape)).astype(kind)
        self.writer.add_tensor(name if name.startswith("mm.") else f"{self._prefix}.{name}", tensor)

    def write(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def write_projector(path: Path, n_embd: int, n_ff: int = _N_FF) -> None:
    """Janus-Pro's: an image is N_TOKENS tokens.  n_embd: of the text model.  n_ff: makes it larger."""
    sizes = {"image_size": N_IMAGE, "patch_size": N_PATCH, "projection_dim": n_embd}
    projector = _Projector(path, "vision", "janus_pro", n_ff, **sizes)
    projector.writer.add_array("clip.vision.image_mean", [0.5] * 3)
    projector.writer.add_array("clip.vision.image_std", [0.5] * 3)
    projector.add("patch_embd.weight", _N_EMBD, 3, N_PATCH, N_PATCH)
    projector.add("position_embd.weight", N_TOKENS, _N_EMBD)
    for i, n_in in enumerate((_N_EMBD, n_embd)):
        projector.add(f"mm.{i}.weight", n_embd, n_in)
        projector.add(f"mm.{i}.bias", n_embd)
    projector.write()


def write_ear(path: Path, n_embd: int) -> None:
    """Qwen2-Audio's: half a minute is 750 tokens.  n_embd: of the text model."""
    projector = _Projector(path, "audio", "qwen2a", _N_FF, num_mel_bins=_N_MEL, projection_dim=n_embd)
    projector.add("position_embd.weight", _N_FRAMES, _N_EMBD)
    for i, n_in in enumerate((_N_MEL, _N_EMBD), start=1):
        projector.add(f"conv1d.{i}.weight", _N_EMBD, n_in, 3, kind=np.float16)
        projector.add(f"conv1d.{i}.bias", _N_EMBD, 1)
    projector.add("mm.a.fc.weight", n_embd, _N_EMBD)
    projector.add("mm.a.fc.bias", n_embd)
    projector.write()


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


def sound(n_bytes: int, rate: int = 16000) -> bytes:
    """A WAV file of one channel with a byte per sample, and this number of samples per second."""
    form = struct.pack("<HHIIHH", 1, 1, rate, rate, 1, 8)
    chunks = ((b"fmt ", form), (b"data", bytes(128 + i * i % 100 for i in range(n_bytes))))
    body = b"WAVE" + b"".join(name + struct.pack("<I", len(data)) + data for name, data in chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body
