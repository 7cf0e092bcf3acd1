# SPDX-License-Identifier: MIT
"""Writes the tiny model as a GGUF in f16, as llama.cpp's converter does, but without torch."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, GGUFWriter, LlamaFileType, TokenType, get_tensor_name_map
from numpy.typing import NDArray

FOLDER = Path(__file__).resolve().parent / "model"
_EXPERT_PARTS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}
_N_SPECIAL = 3  # tokens before those of single bytes


def main(path: Path) -> None:
    config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    writer = GGUFWriter(path, "llama")
    _add_shape(writer, config)
    _add_tokenizer(writer, config)
    for name, values in _tensors(config):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_name("Model")
    writer.add_file_type(LlamaFileType.MOSTLY_F16)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: GGUFWriter, config: dict[str, Any]) -> None:
    vocab = json.loads((FOLDER / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    n_first = _N_SPECIAL + 256
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(max(0, token - n_first)) for token in range(len(tokens))])
    writer.add_token_types([*types, *[TokenType.NORMAL] * (len(tokens) - n_first)])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_unk_token_id(tokens.index("<unk>"))
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)


def _tensors(config: dict[str, Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Names and values as llama.cpp expects them: a layer's experts in one, norms and routers in f32."""
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    weights = _read(next(FOLDER.glob("*.safetensors")))
    for name, values in weights.items():
        part = name.split(".")[-2]
        if ".experts." in name:
            continue
        if values.ndim == 1 or part == "gate":
            values = values.astype(np.float32)
        yield f"{names.get_name(name.removesuffix('.weight'))}.weight", _interleaved(values, heads.get(part))
    for layer in range(config["num_hidden_layers"]):
        for part, own_name in _EXPERT_PARTS.items():
            prefix = f"model.layers.{layer}.block_sparse_moe.experts"
            experts = [weights[f"{prefix}.{n}.{part}.weight"] for n in range(config["num_local_experts"])]
            yield f"blk.{layer}.{own_name}.weight", np.stack(experts)


def _interleaved(values: NDArray[Any], n_heads: int | None) -> NDArray[Any]:
    """Rows of a projection that is rotated, in the order of llama.cpp: the halves of a head alternate."""
    if n_heads is None:
        return values
    return values.reshape(n_heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def _read(path: Path) -> dict[str, NDArray[Any]]:
    """The tensors of such a file in f16, after a header in JSON."""
    data = path.read_bytes()
    n_header = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:n_header])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(data[n_header:], "<f2")[slice(*(n // 2 for n in entry["data_offsets"]))].reshape(
            entry["shape"]
        )
        for name, entry in header.items()
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
