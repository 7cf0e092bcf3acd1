# SPDX-License-Identifier: MIT
"""The models that people run, at their real widths, with few layers and experts: the table of the test bed.

Sources: `hf` the defaults of transformers' configuration class, which are the published model's; `cfg` the
published config.json. Each model comes twice. NAME has the real row widths, head sizes, states, windows and
number of chosen experts, with as many experts and layers as a few hundred MB hold. NAME-experts has the real
number of experts, of 1/4 to 1/16 of their width.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "engine"))

from architecture_models import NOTHING, Architecture, Value
from architectures import ARCHITECTURES

EXPERTS_SUFFIX = "-experts"


@dataclass(frozen=True)
class Bed:
    """keys: hyper-parameters beside or in place of those of tests/engine/architectures.py.

    experts, dense: types; as with llama-quantize, others where 256 does not divide a row.
    many: keys that make NAME-experts.  left_out: a pattern of tensors that the published model lacks.
    real: what the published model has in place of the bed's.
    mtp: a draft block stands after the layers.
    """

    arch: str
    keys: dict[str, Value]
    many: dict[str, Value]
    source: str
    real: str
    experts: tuple[str, str] = ("q4_k", "q6_k")  # gate and up, down
    dense: str = "q4_0"
    kept: str = NOTHING
    left_out: str = NOTHING
    mtp: bool = False

    def architecture(self) -> Architecture:
        base = ARCHITECTURES[self.arch]
        keys = {"context_length": 131072, "leading_dense_block_count": 0} | base.keys | self.keys
        return replace(base, keys=keys, kept=self.kept, letters=True)


def _gqa(n_embd: int, heads: int, heads_kv: int | list[int], size: int) -> dict[str, Value]:
    """Grouped attention with heads of `size`."""
    return {
        "embedding_length": n_embd,
        "attention.head_count": heads,
        "attention.head_count_kv": heads_kv,
        "attention.key_length": size,
        "attention.value_length": size,
    }


def _moe(experts: int, used: int, n_ff: int, **shared: int) -> dict[str, Value]:
    return {
        "expert_count": experts,
        "expert_used_count": used,
        "expert_feed_forward_length": n_ff,
        **{f"expert_shared_{name}": value for name, value in shared.items()},
    }


def _mla(n_embd: int, heads: int, q: int, nope: int, rope: int, v: int) -> dict[str, Value]:
    """Latent attention; the latent of keys and values is 512 wide in all of these models."""
    return {
        "embedding_length": n_embd,
        "attention.head_count": heads,
        "attention.q_lora_rank": q,
        "attention.kv_lora_rank": 512,
        "attention.key_length": 512 + rope,
        "attention.value_length": 512,
        "attention.key_length_mla": nope + rope,
        "attention.value_length_mla": v,
        "rope.dimension_count": rope,
    }


def _indexer(heads: int, top_k: int, **keys: Value) -> dict[str, Value]:
    return {
        "attention.indexer.head_count": heads,
        "attention.indexer.key_length": 128,
        "attention.indexer.top_k": top_k,
        **{f"attention.indexer.{name}": value for name, value in keys.items()},
    }


def _delta_net(heads: int, heads_k: int) -> dict[str, Value]:
    """Gated delta net with heads of 128: `heads` of values, `heads_k` of keys."""
    return {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 128 * heads,
        "ssm.state_size": 128,
        "ssm.time_step_rank": heads,
        "ssm.group_count": heads_k,
        "full_attention_interval": 4,
    }


_MROPE: dict[str, Value] = {"rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0]}
_PLE: dict[str, Value] = {
    "ple.layers": [1],
    "ple.ngram_size": 3,
    "ple.heads_per_ngram": 8,
    "ple.conv_kernel": 4,
    "ple.eos_token_id": 2,
    "ple.layer_multipliers": (1, 40503, 1640531527),
    "ple.head_offsets": tuple(256 * head for head in range(16)),
    "ple.head_vocab_sizes": (251,) * 16,
}

BEDS: dict[str, Bed] = {
    "qwen3-coder-30b": Bed(
        "qwen3moe",
        _gqa(2048, 32, 4, 128) | _moe(20, 8, 768) | {"block_count": 3},
        _gqa(512, 4, 1, 128) | _moe(128, 8, 192),
        "hf",
        "48 layers, 128 experts",
    ),
    "qwen3.6-35b": Bed(
        "qwen35moe",
        _gqa(2048, 16, 2, 256)
        | _delta_net(32, 16)
        | _MROPE
        | _moe(16, 8, 512, feed_forward_length=512)
        | {"block_count": 5, "nextn_predict_layers": 1},
        _gqa(256, 2, 1, 256) | _delta_net(4, 2) | _moe(256, 8, 64, feed_forward_length=64),
        "hf",
        "40 layers and the draft block, 256 experts",
        mtp=True,
    ),
    "qwen3.8-flash-next": Bed(
        "qwen4exp",
        _gqa(2560, 24, 2, 256)
        | _delta_net(48, 16)
        | _MROPE
        | _moe(12, 10, 640, feed_forward_length=640)
        | _indexer(24, 2048)
        | _PLE
        | {"hyper_connection.low_rank": 320, "attention.compress_ratios": [0, 0, 0, 4]}
        | {"embedding_length_per_layer_input": 160},
        _gqa(512, 2, 1, 256)
        | _delta_net(4, 2)
        | _moe(512, 10, 64, feed_forward_length=64)
        | {"hyper_connection.low_rank": 32, "embedding_length_per_layer_input": 32},
        "cfg, the indexer's heads assumed",
        "48 layers, 512 experts, an n-gram table of 51 G values in place of 4096 rows",
    ),
    "gemma-4-26b": Bed(
        "gemma4",
        _gqa(2816, 16, [8, 8, 2], 512)
        | _moe(16, 8, 704)
        | {"attention.key_length_swa": 256, "attention.value_length_swa": 256}
        | {"attention.sliding_window": 1024, "attention.sliding_window_pattern": [1, 1, 0]}
        | {"block_count": 3, "feed_forward_length": 2112, "embedding_length_per_layer_input": 0}
        | {"rope.freq_base": 1e6, "rope.dimension_count": 512, "rope.dimension_count_swa": 256},
        _gqa(352, 2, [2, 2, 1], 512) | _moe(128, 8, 96) | {"feed_forward_length": 288},
        "cfg",
        "30 layers, 5 of 6 with a window, 128 experts",
        kept=r"rope_freqs|ffn_gate_inp\.scale$|ffn_down_exps\.scale$|layer_output_scale",
        left_out=r"blk\.2\.attn_v\.|ffn_(gate|up)_exps",
    ),
    "gpt-oss-20b": Bed(
        "gpt-oss",
        _gqa(2880, 64, 8, 64)
        | _moe(6, 4, 2880)
        | {"block_count": 3, "attention.sliding_window": 128, "attention.sliding_window_pattern": 2},
        _gqa(288, 4, 1, 64) | _moe(128, 4, 288),
        "hf",
        "24 layers, 32 experts (gpt-oss-120b: 36 and 128)",
        experts=("mxfp4", "mxfp4"),
        dense="q8_0",
    ),
    "lfm2.5-8b": Bed(
        "lfm2moe",
        _gqa(2048, 32, [0, 0, 8, 0], 64)
        | _moe(8, 4, 1792)
        | {"feed_forward_length": 7168, "leading_dense_block_count": 1},
        _gqa(256, 4, [0, 0, 1, 0], 64) | _moe(32, 4, 224) | {"feed_forward_length": 896},
        "hf",
        "24 layers, 2 of them dense, 32 experts",
    ),
    "glm-5.3-flash": Bed(
        "glm5-next",
        _mla(4096, 16, 1536, 256, 0, 256)
        | _indexer(32, 2048, kpool=16, types=[0, 0, 1])
        | _moe(9, 8, 2048, count=1)
        | {"block_count": 3, "leading_dense_block_count": 1, "feed_forward_length": 2048}
        | {"attention.head_count_kv": [0, 0, 1], "hyper_connection.sinkhorn_iterations": 20},
        _mla(256, 2, 128, 256, 0, 256) | _moe(288, 8, 128, count=1),
        "hf",
        "45 layers, 3 of them dense of 12288, 64 heads, 288 experts, a draft block",
        experts=("q4_k", "q4_k"),
    ),
    "glm-5.2": Bed(
        "glm-dsa",
        _mla(6144, 8, 2048, 192, 64, 256)
        | _indexer(32, 2048, types=[1, 1, 0])
        | _moe(5, 4, 2048, count=1)
        | {"block_count": 4, "nextn_predict_layers": 1, "leading_dense_block_count": 1}
        | {"feed_forward_length": 2048, "context_length": 1048576},
        _mla(384, 2, 128, 192, 64, 256) | _moe(256, 8, 128, count=1),
        "hf",
        "78 layers and the draft block, 3 layers dense of 12288, 64 heads, 256 experts, 8 of them used",
        experts=("q2_k", "q3_k"),
        mtp=True,
    ),
    "kimi-k3": Bed(
        "kimi-k3",
        _mla(3584, 8, 1536, 128, 64, 128)
        | _moe(9, 8, 3072, count=1)
        | {"block_count": 3, "leading_dense_block_count": 1, "feed_forward_length": 2048}
        | {"attention.head_count_kv": [0, 0, 1], "expert_latent_length": 3584},
        _mla(448, 2, 128, 128, 64, 128) | _moe(896, 16, 192, count=1) | {"expert_latent_length": 224},
        "cfg",
        "93 layers, rows of 7168 outside the experts, 96 heads, 896 experts, 16 of them and 2 shared used",
        experts=("mxfp4", "mxfp4"),
    ),
    "deepseek-v4-flash": Bed(
        "deepseek4",
        _gqa(4096, 16, 1, 512)
        | _indexer(64, 512)
        | _moe(7, 6, 2048, count=1)
        | {"block_count": 3, "hash_layer_count": 1, "attention.compress_ratios": [0, 4, 128]}
        | {"attention.q_lora_rank": 1024, "attention.output_lora_rank": 1024, "attention.sliding_window": 128}
        | {"rope.dimension_count": 64, "hyper_connection.sinkhorn_iterations": 20},
        _gqa(256, 8, 1, 512) | _moe(256, 6, 128, count=1) | {"attention.q_lora_rank": 64},
        "hf",
        "43 layers, 3 of them with experts by token, 64 heads, 256 experts",
        experts=("mxfp4", "mxfp4"),
    ),
    "qwen1.5-moe": Bed(
        "qwen2moe",
        _gqa(2048, 16, 16, 128) | _moe(10, 4, 1408, feed_forward_length=5632) | {"block_count": 3},
        _gqa(256, 2, 2, 128) | _moe(60, 4, 160, feed_forward_length=640),
        "hf",
        "24 layers, 60 experts",
    ),
    "deepseek-v2-lite": Bed(
        "deepseek2",
        _mla(2048, 16, 1536, 128, 64, 128)
        | _moe(10, 6, 1408, count=2)
        | {"block_count": 4, "leading_dense_block_count": 1, "feed_forward_length": 10944}
        | {"expert_gating_func": 1, "expert_weights_norm": False, "expert_weights_scale": 1.0},
        _mla(256, 2, 128, 128, 64, 128) | _moe(64, 6, 160, count=2) | {"feed_forward_length": 1280},
        "cfg",
        "27 layers, 64 experts, queries without a latent (llama.cpp takes that only with 26 or 27 layers)",
    ),
    "olmoe": Bed(
        "olmoe",
        _gqa(2048, 16, 16, 128) | _moe(16, 8, 1024) | {"block_count": 3},
        _gqa(256, 2, 2, 128) | _moe(64, 8, 128),
        "hf",
        "16 layers, 64 experts",
    ),
}


def bed(name: str) -> Bed:
    """The entry of NAME or NAME-experts; KeyError for another."""
    base = BEDS[name.removesuffix(EXPERTS_SUFFIX)]
    return replace(base, keys=base.keys | base.many) if name.endswith(EXPERTS_SUFFIX) else base
