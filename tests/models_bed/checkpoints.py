# SPDX-License-Identifier: MIT
"""Small random checkpoints in the form in which the models of the bed are published.

transformers' own classes write them, in several shards with an index. Then weights become what the publisher
has: FP8 with a scale for each block of 128 x 128, or MXFP4.

    python tests/models_bed/checkpoints.py gpt-oss-20b FOLDER
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "[gMASK]", "<|user|>", "<|observation|>")
N_VOCAB = 261
_BLOCK = 128
_WIDTH = 256
_COMMON: dict[str, Any] = {
    "vocab_size": N_VOCAB,
    "hidden_size": _WIDTH,
    "intermediate_size": _WIDTH,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 257,
    "pad_token_id": 257,
    "bos_token_id": 257,
    "tie_word_embeddings": False,
}
_MLA: dict[str, Any] = {
    "n_routed_experts": 8, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "v_head_dim": 64,
    "num_key_value_heads": 4,
}  # fmt: skip
_INDEX: dict[str, Any] = {"index_topk": 64, "index_head_dim": 64, "index_n_heads": 2}
_DELTA: dict[str, Any] = {
    "num_experts": 8, "shared_expert_intermediate_size": 128, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """config, model: names of transformers' classes. text: the configuration of the model's text part alone.

    form: changes the weights of a saved checkpoint and its configuration.
    """

    config: str
    model: str
    values: dict[str, Any] = field(default_factory=dict)
    form: Callable[[dict[str, torch.Tensor], dict[str, Any]], dict[str, torch.Tensor]] | None = None


def _fp8(weights: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Matrices of layers in e4m3, with a scale for each block."""
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [_BLOCK] * 2,
    }  # fmt: skip
    found = {}
    for name, weight in weights.items():
        if not re.search(r"(proj|_[ab]|kv_a_proj_with_mqa)\.weight$", name) or weight.dim() != 2:
            found[name] = weight
            continue
        rows, columns = (-(-n // _BLOCK) for n in weight.shape)
        padded = torch.zeros(rows * _BLOCK, columns * _BLOCK)
        padded[: weight.shape[0], : weight.shape[1]] = weight.float()
        blocks = padded.view(rows, _BLOCK, columns, _BLOCK)
        scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448
        values = (blocks / scales[:, None, :, None]).view(padded.shape)
        found[name] = values[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn).contiguous()
        found[name + "_scale_inv"] = scales
    return found


def _mxfp4(weights: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Experts of gpt-oss in random MXFP4: blocks of 16 bytes, and their exponents."""
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    found = {}
    for name, weight in weights.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            found[name] = weight
            continue
        experts, n_in, n_out = weight.shape
        found[f"{name}_blocks"] = torch.randint(0, 256, (experts, n_out, n_in // 32, 16), dtype=torch.uint8)
        found[f"{name}_scales"] = torch.full((experts, n_out, n_in // 32), 122, dtype=torch.uint8)
    return found


CHECKPOINTS = {
    "qwen3-coder-30b": Published("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {"num_experts": 8}, _fp8),
    "qwen3.6-35b": Published("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", _DELTA),
    "qwen3.8-flash-next": Published(
        "Qwen4ExpTextConfig",
        "Qwen4ExpForCausalLM",
        _DELTA
        | {"hc_lowrank": 16, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 64}
        | {"indexer_budget": 64, "indexer_compress_ratio": 4},
    ),
    "gemma-4-26b": Published(
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "hidden_size_per_layer_input": 0}
        | {"sliding_window": 64, "tie_word_embeddings": True},
    ),
    "gpt-oss-20b": Published("GptOssConfig", "GptOssForCausalLM", {"num_local_experts": 8}, _mxfp4),
    "lfm2.5-8b": Published(
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        {"num_experts": 8, "num_dense_layers": 1, "tie_word_embeddings": True}
        | {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    ),
    "glm-5.2": Published(
        "GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", _MLA | _INDEX | {"qk_rope_head_dim": 32}, _fp8
    ),
    "qwen1.5-moe": Published(
        "Qwen2MoeConfig", "Qwen2MoeForCausalLM", {"num_experts": 8, "shared_expert_intermediate_size": 128}
    ),
    "deepseek-v2-lite": Published(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        _MLA | {"first_k_dense_replace": 1, "n_shared_experts": 2, "qk_rope_head_dim": 32},
    ),
    "olmoe": Published("OlmoeConfig", "OlmoeForCausalLM", {"num_experts": 8, "num_key_value_heads": 4}),
}  # fmt: skip


def _write_tokenizer(folder: Path, fallback: bool) -> None:
    """All bytes, as letters or with `fallback` as such, a pair of them, and four special tokens."""
    letters = (
        [f"<0x{n:02X}>" for n in range(256)] if fallback else sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    first, second = letters[97], letters[98]
    vocabulary = {letter: i for i, letter in enumerate([*letters, first + second])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(first, second)], byte_fallback=fallback))
    if fallback:
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback()])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[0]).save_pretrained(folder)


def write_checkpoint(name: str, folder: Path) -> None:
    """Writes the checkpoint in several shards with an index. KeyError for a model that transformers lacks."""
    published = CHECKPOINTS[name]
    values = _COMMON | published.values
    torch.manual_seed(7)
    config = getattr(transformers, published.config)(**values)
    model = getattr(transformers, published.model)(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="1MB")
    _write_tokenizer(folder, fallback=name.startswith("gemma"))
    if published.form is not None:
        _change_form(folder, published.form)


def _change_form(folder: Path, form: Callable[[dict[str, torch.Tensor], dict[str, Any]], Any]) -> None:
    path, index = folder / "config.json", folder / "model.safetensors.index.json"
    config, files = json.loads(path.read_text("utf-8")), {}
    for shard in sorted(folder.glob("*.safetensors")):
        weights = form(load_file(shard), config)
        save_file(weights, shard, {"format": "pt"})
        files |= dict.fromkeys(weights, shard.name)
    path.write_text(json.dumps(config), "utf-8")
    if index.exists():
        index.write_text(json.dumps({"metadata": {}, "weight_map": files}), "utf-8")


if __name__ == "__main__":
    write_checkpoint(sys.argv[1], Path(sys.argv[2]))
