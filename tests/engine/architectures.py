# SPDX-License-Identifier: MIT
"""llama.cpp's MoE architectures, each as a small model that uses what is its own."""

from __future__ import annotations

from architecture_models import NOTHING, Architecture, Value

_MLA: dict[str, Value] = {
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 64,
    "attention.kv_lora_rank": 64,
    "attention.key_length": 96,
    "attention.value_length": 64,
    "attention.key_length_mla": 96,
    "attention.value_length_mla": 64,
    "rope.dimension_count": 32,
}
_INDEXER: dict[str, Value] = {
    "attention.indexer.head_count": 64,
    "attention.indexer.key_length": 128,
    "attention.indexer.top_k": 1024,
    "attention.indexer.types": [1, 0, 1, 0],
}
_WINDOW: dict[str, Value] = {
    "attention.sliding_window": 32,
    "attention.sliding_window_pattern": [1, 0, 1, 0],
    "rope.freq_base_swa": 10000.0,
}
_SSM: dict[str, Value] = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 512,
    "ssm.state_size": 128,
    "ssm.time_step_rank": 4,
    "ssm.group_count": 2,
}
_KDA: dict[str, Value] = {"ssm.conv_kernel": 4, "kda.head_dim": 128, "kda.gate_lower_bound": -5.0}
_EVERY_SECOND: dict[str, Value] = {"attention.head_count_kv": [2, 0, 2, 0]}
_EVERY_SECOND_MLA: dict[str, Value] = {"attention.head_count_kv": [1, 0, 1, 0]}
_SECTIONS: dict[str, Value] = {"rope.dimension_sections": [16, 8, 8, 0]}
_NORMED: dict[str, Value] = {"expert_weights_norm": True, "expert_weights_scale": 1.5}
_HYPER: dict[str, Value] = {
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 2,
    "hyper_connection.epsilon": 1e-6,
    "hyper_connection.low_rank": 8,
    "hyper_connection.magnitude": 2.0,
}
_GRANITE: dict[str, Value] = {"logit_scale": 2.0, "residual_scale": 0.8, "embedding_scale": 1.5}
_SQRT_SOFTPLUS = 4


def _of(
    *parts: dict[str, Value], kept: str = NOTHING, at_once: bool = False, embeds: bool = False, **keys: Value
) -> Architecture:
    joined: dict[str, Value] = {}
    for part in parts:
        joined |= part
    return Architecture(joined | keys, kept, at_once, embeds)


ARCHITECTURES: dict[str, Architecture] = {
    "afmoe": _of(_NORMED, {"attention.sliding_window": 32}),
    "arctic": _of(),
    "bailingmoe": _of(),
    "bailingmoe2": _of(_NORMED),
    "bailingmoe3": _of(
        _MLA,
        _KDA,
        _EVERY_SECOND_MLA,
        _NORMED,
        {"kda.safe_gate": True},
        swiglu_clamp_exp=[0.0, 0.5, 0.5, 0.5],
        swiglu_clamp_shexp=[0.0, 0.5, 0.5, 0.5],
    ),
    "cohere2moe": _of(_WINDOW, logit_scale=0.5),
    "dbrx": _of({"attention.clamp_kqv": 8.0}),
    "deepseek": _of(),
    "deepseek2": _of(_MLA, _NORMED),
    "deepseek32": _of(_MLA, _INDEXER, _NORMED),
    "deepseek4": _of(
        _HYPER,
        _INDEXER,
        _NORMED,
        {
            "attention.head_count": 8,
            "attention.head_count_kv": 1,
            "attention.key_length": 64,
            "attention.value_length": 64,
            "rope.dimension_count": 32,
            "attention.q_lora_rank": 64,
            "attention.sliding_window": 32,
            "attention.output_group_count": 8,
            "attention.output_lora_rank": 32,
            "attention.compress_ratios": [0, 0, 4, 128],
            "attention.compress_rope_freq_base": 160000.0,
        },
        expert_gating_func=_SQRT_SOFTPLUS,
        hash_layer_count=2,
        swiglu_clamp_exp=0.5,
    ),
    "dots1": _of(_NORMED, {"attention.head_count_kv": 4}),
    "dots3note": _of(
        _MLA,
        _INDEXER,
        _WINDOW,
        _NORMED,
        {
            "attention.kv_lora_rank_swa": 64,
            "attention.key_length_swa": 96,
            "attention.value_length_swa": 64,
            "attention.key_length_mla_swa": 96,
            "attention.value_length_mla_swa": 64,
            "attention.indexer.types": [0, 1, 0, 1],
        },
    ),
    "ernie4_5-moe": _of(interleave_moe_layer_step=2),
    "exaone-moe": _of(
        _NORMED, {"attention.sliding_window": 32, "attention.sliding_window_pattern": [1, 0, 1, 0]}
    ),
    "gemma4": _of(
        _WINDOW,
        {"attention.key_length_swa": 64, "attention.value_length_swa": 64, "attention.shared_kv_layers": 0},
        embedding_length_per_layer_input=32,
        final_logit_softcapping=30.0,
        kept=r"ffn_down_exps\.scale$|ffn_gate_inp\.scale$|rope_freqs",
    ),
    "glm-dsa": _of(_MLA, _INDEXER, _NORMED),
    "glm4moe": _of(_NORMED, block_count=5, nextn_predict_layers=1),
    "glm5-next": _of(
        _MLA,
        _KDA,
        _HYPER,
        _INDEXER,
        _NORMED,
        {
            "attention.head_count_kv": [0, 1, 0, 1],
            "attention.key_length": 64,
            "rope.dimension_count": 0,
            "attention.indexer.kpool": 4,
            "attention.indexer.types": [0, 1, 0, 1],
        },
        swiglu_clamp_exp=0.5,
    ),
    "gpt-oss": _of(_WINDOW),
    "granite_swa": _of(_GRANITE, _WINDOW),
    "granitehybrid": _of(_GRANITE, _SSM, _EVERY_SECOND),
    "granitemoe": _of(_GRANITE),
    "grok": _of(),
    "grovemoe": _of(expert_chunk_feed_forward_length=128, expert_group_scale=0.5, experts_per_group=2),
    "hunyuan-moe": _of(),
    "hy_v3": _of(_NORMED),
    "hy_v4": _of(_MLA, _INDEXER, _HYPER, _NORMED, swiglu_clamp_exp=0.5),
    "jamba": _of(_SSM, _EVERY_SECOND),
    "kimi-k3": _of(
        _MLA,
        _KDA,
        _EVERY_SECOND_MLA,
        _NORMED,
        {"attn_res.block_size": 12, "activation.situ_beta": 4.0, "activation.situ_linear_beta": 25.0},
        expert_latent_length=256,
    ),
    "kimi-linear": _of(_MLA, _KDA, _EVERY_SECOND_MLA, _NORMED),
    "laguna": _of(_NORMED),
    "lfm2moe": _of(_EVERY_SECOND, {"shortconv.l_cache": 3}),
    "llada-moe": _of(at_once=True),
    "llama": _of(),
    "llama4": _of(interleave_moe_layer_step=2),
    "maple": _of(_WINDOW, swiglu_clamp_exp=0.5),
    "mellum": _of(),
    "mimo2": _of(_WINDOW),
    "minimax-01": _of(residual_scale=1.5, full_attention_interval=2),
    "minimax-m2": _of(),
    "minimax-m3": _of(
        _INDEXER,
        _NORMED,
        {
            "attention.indexer.head_count": 2,
            "attention.indexer.block_size": 4,
            "attention.indexer.local_blocks": 1,
            "rope.dimension_count": 32,
        },
    ),
    "mistral3": _of(),
    "mistral4": _of(_MLA, _NORMED),
    "nemotron_h_moe": _of(
        _SSM,
        _NORMED,
        {"attention.head_count_kv": [0, 2, 0, 0]},
        feed_forward_length=[0, 0, 256, 256],
        moe_latent_size=256,
    ),
    "nomic-bert-moe": _of(
        {"tokenizer.ggml.token_type_count": 2}, moe_every_n_layers=2, at_once=True, embeds=True
    ),
    "olmoe": _of({"attention.head_count_kv": 4}),
    "phimoe": _of(),
    "qwen2moe": _of(),
    "qwen35moe": _of(_SSM, _SECTIONS, full_attention_interval=2),
    "qwen3moe": _of(),
    "qwen3next": _of(_SSM, full_attention_interval=2),
    "qwen3vlmoe": _of(_SECTIONS),
    "qwen4exp": _of(
        _SSM,
        _SECTIONS,
        _HYPER,
        _INDEXER,
        {"attention.indexer.key_length": 64, "attention.compress_ratios": [4, 4, 4, 4]},
        full_attention_interval=2,
    ),
    "rnd1": _of(at_once=True),
    "smallthinker": _of(),
    "step35": _of(
        _WINDOW, _NORMED, swiglu_clamp_exp=[0.5, 0.5, 0.5, 0.5], swiglu_clamp_shexp=[0.5, 0.5, 0.5, 0.5]
    ),
}
