"""Tiny targets of every supported architecture: what their config.json says beside `tiny_config`.

Windows are short, so that prompts, chunks and draft windows cross their ends.
"""

from typing import Any

# The head size of the common config is the part of a head that is rotated.
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
# Prompts and answers of tests pass its 20 positions.
YARN = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 20,
    "mscale": 0.9,
    "mscale_all_dim": 0.7,
    "beta_fast": 32,
    "beta_slow": 1,
}

# Keys as they are published, then as transformers 5.17 has them; values have fewer columns than keys.
MIMO_V2: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "v_head_dim": 16,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 24,
    "swa_v_head_dim": 16,
    "swa_rope_theta": 2e3,
    "rope_theta": 5e6,
    "partial_rotary_factor": 0.334,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "attention_value_scale": 0.707,
    "attention_bias": False,
    "sliding_window": 6,
    "sliding_window_size": 6,
    "layernorm_epsilon": 1e-5,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": None,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": None,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e3, "partial_rotary_factor": 0.334},
    },
}


def alternating(num_layers: int) -> dict[str, Any]:
    """Full layers and such with a window in turn, all but the first with experts, in both layouts of the config."""
    windows, sparse = [index % 2 for index in range(num_layers)], [int(index > 0) for index in range(num_layers)]
    return {
        "hybrid_layer_pattern": windows,
        "moe_layer_freq": sparse,
        "layer_types": [("full_attention", "sliding_attention")[each] for each in windows],
        "mlp_layer_types": [("dense", "sparse")[each] for each in sparse],
    }


STEP: dict[str, Any] = {
    "num_attention_groups": 2,
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 6,
        "num_attention_groups": 2,
    },
    "sliding_window": 6,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "original_max_position_embeddings": 16,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "yarn_only_types": ["full_attention"],
    "moe_num_experts": 8,
    "moe_top_k": 3,
    "moe_intermediate_size": 24,
    "share_expert_dim": 20,
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 3.0,
    "use_moe_router_bias": True,
    "norm_expert_weight": True,
    "need_fp32_gate": True,
    "use_qk_norm": True,
    "use_head_wise_attn_gate": True,
    "att_impl_type": "GQA",
    "zero_centered": True,
    "sink": False,
    "use_rope_layers": [],
}
DRAFTING = 6  # layers after the last one, which the lists of Step-3.5 name too


def in_lists(num_layers: int) -> dict[str, Any]:
    """Full layers and such with a window in turn, all but the first with experts, those of the last one bounded."""
    windows = [index % 2 == 1 or index >= num_layers for index in range(num_layers + DRAFTING)]
    last = [index == num_layers - 1 for index in range(num_layers + DRAFTING)]
    return {
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windows],
        "rope_theta": [1e4 if each else 5e6 for each in windows],
        "partial_rotary_factors": [1.0 if each else 0.5 for each in windows],
        "swiglu_limits": [0.5 if each else 0.0 for each in last],
        "swiglu_limits_shared": [0.4 if each else None for each in last],
        "moe_layers_enum": ",".join(map(str, range(1, num_layers))),
        "num_nextn_predict_layers": 0,
    }


DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}

MROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 1e6,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
# Granite 4, dense; a state for each head of 16 columns, B and C of two groups.
GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 4,
    "mamba_d_head": "auto",
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "mamba_chunk_size": 256,
    "position_embedding_type": "nope",
    "num_local_experts": 0,
    "shared_intermediate_size": 48,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.25,
    "logits_scaling": 2.0,
}

# Some of whose layers have a recurrent state: without trees, prefix cache and audits.
HYBRIDS = ("qwen3 next", "qwen3.5", "qwen3.5 moe")
RECURRENT = (*HYBRIDS, "granite 4", "granite 4 moe")  # the latter have no layers that draft

# Names as they are published, which transformers 5.17 reads too. Full layers have larger heads.
GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 6,
    "global_head_dim": 24,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 128,
    "num_kv_shared_layers": 0,
}


def sharing(layers: int) -> dict[str, Any]:
    """Gemma 4 with rows of a second embedding; the last two layers have queries alone, and a wider MLP."""
    return {
        "num_hidden_layers": layers,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "hidden_size_per_layer_input": 12,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    }


TINY_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 4096},
    "qwen2 with windows": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "mistral with a window": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 7,
    },
    "gemma 3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 10,
        "sliding_window": 6,
        "sliding_window_pattern": 2,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "gemma 4": GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma 4 e": GEMMA4 | sharing(4),
    "gemma 4 moe": GEMMA4
    | {
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 3,
        "moe_intermediate_size": 24,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "olmo 2": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    "phi 3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "sliding_window": None, "pad_token_id": 0},
    "phi 3 in part": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "pad_token_id": 0,
        "sliding_window": 7,
        "partial_rotary_factor": 0.5,
    },
    "qwen3 moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "deepseek v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **LATENT,
        "q_lora_rank": 28,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "rope_scaling": YARN,
        "num_nextn_predict_layers": 0,
    },
    "qwen3 next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        **DELTA,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 2,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    },
    "qwen3.5": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5_text",
        **DELTA,
        "full_attention_interval": 2,
        "rope_parameters": MROPE,
        "attn_output_gate": True,
    },
    "qwen3.5 moe": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe_text",
        **DELTA,
        "full_attention_interval": 2,
        "rope_parameters": MROPE,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
    },
    "granite 4": GRANITE,
    "granite 4 moe": GRANITE
    | {
        "layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 24,
        "position_embedding_type": "rope",
        "mamba_n_groups": 1,
    },
    "mimo v2 flash": {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        **MIMO_V2,
        **alternating(2),
    },
    "step 3.5": {
        "architectures": ["Step3p5ForCausalLM"],
        "model_type": "step3p5",
        **STEP,
        **in_lists(2),
    },
    "gpt oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "intermediate_size": 36,
        "sliding_window": 6,
        "attention_bias": True,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
    "deepseek v2 lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        **LATENT,
        "q_lora_rank": None,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "glm 4.7 flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        **LATENT,
        "q_lora_rank": 28,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.8,
        "rope_theta": 1e6,
        "num_nextn_predict_layers": 0,
    },
    "glm 4.5": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1e6,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
    },
}
