"""Tiny random models of every family, made by transformers' own classes and saved as it saves them. MiniCPM,
which transformers lacks, has a twin of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import minicpm_twin
import pytest
import torch
import transformers

VOCAB_SIZE = 160
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 192,
    "initializer_range": 0.14, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
NO_GROUPS: dict[str, Any] = {name: v for name, v in SMALL.items() if name != "num_key_value_heads"}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 48,
}  # fmt: skip
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [1.5 + 0.5 * i for i in range(8)],
}  # fmt: skip
WINDOW = {"sliding_window": 9}
UNTIED = {"tie_word_embeddings": False}
GEMMA2 = SMALL | WINDOW | {
    "head_dim": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 12.0,
}  # fmt: skip
TURNS = ["sliding_attention", "full_attention"]
LATER_GEMMA = SMALL | WINDOW | {
    "head_dim": 16, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_hidden_layers": 4, "layer_types": TURNS * 2,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 192,
    "initializer_range": 0.14, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
OPT = NO_GROUPS | {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.14, "pad_token_id": 1}
OPT_NARROW = OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 32}
GALACTICA = OPT | {
    "enable_bias": False,
    "layer_norm_elementwise_affine": False,
    "activation_function": "gelu",
}
BLOOM: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "n_layer": 3, "n_head": 4,
    "initializer_range": 0.14, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "q_lora_rank": 20,
    "num_key_value_heads": 4,
}  # fmt: skip
MIXTURE = SMALL | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
FOUR: dict[str, Any] = SMALL | {"num_hidden_layers": 4}
GEMMA3_ROPES = {
    "full_attention": LINEAR_ROPE | {"rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
OLMO3_ROPES = {
    "full_attention": YARN_ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
DEEPSEEK = SMALL | {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts": 2,
    "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
}  # fmt: skip
GPT_NEO: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_layers": 3, "num_heads": 4, "window_size": 9,
    "attention_types": [[["global", "local"], 1], [["local"], 1]], "max_position_embeddings": 192,
    "initializer_range": 0.14, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
MPT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "d_model": 96, "n_layers": 2, "n_heads": 6, "max_seq_len": 192,
    "initializer_range": 0.14, "attn_config": {"clip_qkv": 2.0},
}  # fmt: skip
XGLM: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "d_model": 66, "ffn_dim": 96, "num_layers": 2, "attention_heads": 3,
    "max_position_embeddings": 192, "init_std": 0.14, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
FALCON_40B = NO_GROUPS | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_hidden_layers": 2}
FALCON_RW = NO_GROUPS | {
    "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True, "num_attention_heads": 6,
    "hidden_size": 72, "num_hidden_layers": 2,
}  # fmt: skip
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
# The last norm of a head makes rounding errors larger where its output is small by chance, but for its eps.
DELTA: dict[str, Any] = SMALL | {
    "rms_norm_eps": 1e-3, "head_dim": 24, "num_hidden_layers": 4, "tie_word_embeddings": False,
    "linear_conv_kernel_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 14, "linear_value_head_dim": 20,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
DELTA_MIXTURE = DELTA | {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_hidden_layers": 2,
    "shared_expert_intermediate_size": 24, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MAMBA: dict[str, Any] = SMALL | {
    "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_expand": 2,
    "mamba_d_conv": 4, "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1,
    "rms_norm_eps": 1e-3,
}  # fmt: skip
NEMOTRON_MIXTURE = {name: value for name, value in MAMBA.items() if name != "num_hidden_layers"} | {
    "layers_block_type": ["linear_attention", "moe", "full_attention"],
    "mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 12, "head_dim": 24,
    "layer_norm_epsilon": 1e-3, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 1.5,
}  # fmt: skip
LFM2 = SMALL | {
    "conv_L_cache": 3,
    "block_multiple_of": 24,
    "hidden_size": 48,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}
MINICPM = SMALL | {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16, "tie_word_embeddings": True}

#: name -> (transformers' class name without ForCausalLM etc., config)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", SMALL),
    "Llama, tied, biases": (
        "Llama",
        SMALL | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "Llama, wide heads": ("Llama", SMALL | {"head_dim": 24}),
    "Llama, rope llama3": ("Llama", SMALL | {"rope_parameters": LLAMA3_ROPE}),
    "Llama, rope yarn": ("Llama", SMALL | {"rope_parameters": YARN_ROPE}),
    "Llama, rope linear": ("Llama", SMALL | {"rope_parameters": LINEAR_ROPE}),
    "Llama, rope dynamic": ("Llama", SMALL | {"rope_parameters": DYNAMIC_ROPE}),
    "Mistral, window": ("Mistral", SMALL | WINDOW),
    "Qwen2": ("Qwen2", SMALL),
    "Qwen2, window": (
        "Qwen2",
        SMALL | WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    ),
    "Qwen3": ("Qwen3", SMALL | {"head_dim": 16, "tie_word_embeddings": True}),
    "Phi-3": ("Phi3", SMALL),
    "Phi-3, part of a head, window": (
        "Phi3",
        SMALL
        | WINDOW
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    # Its frequencies change beyond 170 tokens, which is more than most tests have: one forward pass of
    # transformers over prompt and answer is an oracle only where no answer crosses that border.
    "Phi-3, rope longrope": (
        "Phi3",
        SMALL | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 170},
    ),
    "MiniCPM": ("MiniCPM", MINICPM),
    "MiniCPM, one layer, 3 heads, untied, no scaling": (
        "MiniCPM",
        MINICPM
        | UNTIED
        | {"num_hidden_layers": 1, "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3,
           "scale_depth": None, "dim_model_base": None},
    ),
    "MiniCPM, rope longrope": (
        "MiniCPM",
        MINICPM | {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 170}},
    ),
    "MiniCPM, rope dynamic": ("MiniCPM", MINICPM | {"rope_parameters": DYNAMIC_ROPE}),
    "Qwen2-MoE": (
        "Qwen2Moe",
        MIXTURE | {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2, "num_attention_heads": 4},
    ),
    "Qwen3-MoE": ("Qwen3Moe", MIXTURE | {"head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "Qwen3-MoE, not renormalized": ("Qwen3Moe", MIXTURE | {"head_dim": 24, "num_hidden_layers": 1}),
    "Llama 4": (
        "Llama4Text",
        SMALL
        | {"num_local_experts": 5, "num_experts_per_tok": 1, "intermediate_size_mlp": 80, "head_dim": 16,
           "num_hidden_layers": 4, "interleave_moe_layer_step": 2, "attention_chunk_size": 20,
           "no_rope_layer_interval": 3, "floor_scale": 12},
    ),
    "GLM-4.5": (
        "Glm4Moe",
        DEEPSEEK | {"attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 1, "head_dim": 16},
    ),
    "Solar Open": ("SolarOpen", DEEPSEEK | {"attention_bias": True, "head_dim": 24}),
    "Hunyuan 3": (
        "HYV3",
        MIXTURE | {"head_dim": 16, "num_shared_experts": 2, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "Laguna": (
        "Laguna",
        MIXTURE
        | WINDOW
        | {"head_dim": 16, "num_attention_heads_per_layer": [4, 6, 2], "attention_bias": True,
           "shared_expert_intermediate_size": 40, "moe_routed_scaling_factor": 1.5,
           "layer_types": ["full_attention", "sliding_attention", "full_attention"],
           "rope_parameters": {
               "full_attention": YARN_ROPE | {"partial_rotary_factor": 0.5},
               "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    ),
    "Laguna, gate per number": (
        "Laguna",
        MIXTURE
        | {"head_dim": 24, "gating": "per-element", "shared_expert_intermediate_size": 24,
           "num_hidden_layers": 2},
    ),
    "dots.llm1": ("Dots1", DEEPSEEK | {"first_k_dense_replace": 2, "norm_topk_prob": False}),
    "MiniMax-M2": (
        "MiniMaxM2",
        SMALL
        | {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 24,
           "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "ERNIE 4.5 MoE": (
        "Ernie4_5_Moe",
        SMALL | {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 40, "moe_num_shared_experts": 2},
    ),
    "Granite MoE": (
        "GraniteMoe",
        SMALL
        | {"num_local_experts": 5, "num_experts_per_tok": 2, "embedding_multiplier": 6.0,
           "logits_scaling": 4.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1},
    ),
    "Hunyuan-A13B": (
        "HunYuanMoEV1",
        SMALL | {"num_experts": 5, "moe_topk": 2, "head_dim": 24},
    ),
    "LFM2": ("Lfm2", LFM2 | {"full_attn_idxs": [1], "conv_bias": True}),
    "LFM2, last layer with attention": (
        "Lfm2",
        LFM2
        | {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "conv_L_cache": 4,
           "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False},
    ),
    "LFM2-MoE": (
        "Lfm2Moe",
        LFM2
        | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_dense_layers": 1,
           "layer_types": ["conv", "full_attention", "conv"]},
    ),
    "Bamba": ("Bamba", MAMBA | {"attn_layer_indices": [1]}),
    "Granite 4": (
        "GraniteMoeHybrid",
        MAMBA
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_local_experts": 5,
           "num_experts_per_tok": 2, "shared_intermediate_size": 40, "embedding_multiplier": 3.0,
           "logits_scaling": 2.5, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
           "mamba_n_groups": 1},
    ),
    "Granite 4, no experts, rope": (
        "GraniteMoeHybrid",
        MAMBA
        | {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 0,
           "num_hidden_layers": 2, "shared_intermediate_size": 40, "position_embedding_type": "rope",
           "mamba_proj_bias": True, "mamba_conv_bias": False, "attention_bias": True},
    ),
    "Falcon-H1": (
        "FalconH1",
        MAMBA
        | {"mamba_d_ssm": 96, "mlp_multipliers": [0.7, 1.3], "key_multiplier": 0.6, "num_hidden_layers": 2,
           "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.1,
           "ssm_out_multiplier": 0.9, "ssm_multipliers": [0.5, 0.8, 1.2, 1.5, 0.9],
           "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5},
    ),
    "Falcon-H1, norm, biases": (
        "FalconH1",
        MAMBA
        | {"mamba_d_ssm": 72, "mamba_d_head": 12, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
           "mamba_proj_bias": True, "projectors_bias": True, "mlp_bias": True, "attention_bias": True,
           "num_hidden_layers": 1},
    ),
    "Nemotron-H, experts": ("NemotronH", NEMOTRON_MIXTURE),
    "Nemotron-H, narrow experts": (
        "NemotronH",
        NEMOTRON_MIXTURE
        | {"moe_latent_size": 40, "layers_block_type": ["moe", "full_attention", "linear_attention"]},
    ),
    "Nemotron-H": (
        "NemotronH",
        {name: value for name, value in MAMBA.items() if name != "num_hidden_layers"}
        | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
           "mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 12, "head_dim": 24, "use_bias": True,
           "layer_norm_epsilon": 1e-3},
    ),
    "Qwen3.5": ("Qwen3_5Text", DELTA),
    "Qwen3.5 MoE": ("Qwen3_5MoeText", DELTA_MIXTURE | {"linear_num_value_heads": 6}),
    "Qwen3-Next": (
        "Qwen3Next",
        DELTA_MIXTURE
        | {"num_hidden_layers": 3, "attention_bias": True, "mlp_only_layers": [1],
           "linear_conv_kernel_dim": 3,
           "layer_types": ["linear_attention", "linear_attention", "full_attention"]},
    ),
    "OLMo Hybrid": (
        "OlmoHybrid",
        {key: value for key, value in DELTA.items() if key not in ("head_dim", "rope_parameters")}
        | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
           "linear_num_value_heads": 2, "rope_parameters": None},
    ),
    "OLMo Hybrid, rope, beta up to 1": (
        "OlmoHybrid",
        {key: value for key, value in DELTA.items() if key not in ("head_dim", "rope_parameters")}
        | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
           "linear_allow_neg_eigval": False},
    ),
    "Kimi Linear": (
        "KimiLinear",
        LATENT
        | {key: value for key, value in DEEPSEEK.items() if key not in ("n_group", "n_routed_experts")}
        | {"num_local_experts": 8, "n_group": 4, "q_lora_rank": None, "num_key_value_heads": 4,
           "rms_norm_eps": 1e-3, "linear_num_heads": 3, "linear_head_dim": 14, "linear_conv_kernel_dim": 4,
           "layer_types": ["linear_attention", "linear_attention", "full_attention"]},
    ),
    "Ling 3": (
        "BailingHybrid",
        {key: value for key, value in LATENT.items() if key != "q_lora_rank"}
        | {key: value for key, value in DEEPSEEK.items() if key not in ("n_group", "n_routed_experts")}
        | {"num_local_experts": 8, "n_group": 4, "num_key_value_heads": 4, "head_dim": 14,
           "short_conv_kernel_size": 3, "layer_group_size": 3, "first_k_dense_replace": 1,
           "num_mtp_layers": 0},
    ),
    "OLMoE": ("Olmoe", SMALL | {"num_experts": 6, "num_experts_per_tok": 2}),
    "Phi-3.5-MoE": (
        "Phimoe",
        SMALL
        | {"num_local_experts": 6, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True,
           "router_jitter_noise": 0.3},
    ),
    "Mixtral": ("Mixtral", SMALL | {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "Gemma": ("Gemma", SMALL | {"head_dim": 16}),
    "MiniCPM3": ("MiniCPM3", NO_GROUPS | LATENT | {"scale_depth": 1.4, "dim_model_base": 16}),
    "MiniCPM3, 3 heads, plain queries, biases, rope longrope": (
        "MiniCPM3",
        SMALL
        | LATENT
        | UNTIED
        | {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": None,
           "attention_bias": True, "num_hidden_layers": 2, "v_head_dim": None, "scale_depth": None,
           "rope_parameters": LONGROPE | {"original_max_position_embeddings": 170, "factor": 1.0,
               "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0]}},
    ),
    "DeepSeek V2": (
        "DeepseekV2",
        DEEPSEEK
        | LATENT
        | {"topk_method": "group_limited_greedy", "first_k_dense_replace": 1,
           "rope_parameters": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.0}},
    ),
    "DeepSeek V2-Lite, biases": (
        "DeepseekV2",
        DEEPSEEK
        | LATENT
        | {"q_lora_rank": None, "attention_bias": True, "num_hidden_layers": 2, "n_group": None,
           "topk_group": None},
    ),
    "DeepSeek V3": (
        "DeepseekV3",
        DEEPSEEK
        | LATENT
        | {"first_k_dense_replace": 1, "rope_parameters": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "Mistral 4": (
        "Mistral4",
        DEEPSEEK
        | LATENT
        | {"first_k_dense_replace": 1,
           "rope_parameters": YARN_ROPE
           | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
              "original_max_position_embeddings": 20}},
    ),
    "DeepSeek V3.2": (
        "DeepseekV32",
        DEEPSEEK
        | LATENT
        | {"first_k_dense_replace": 1, "q_lora_rank": 20, "index_topk": 20, "index_n_heads": 8,
           "index_head_dim": 16, "num_hidden_layers": 2,
           "rope_parameters": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "GLM-5": (
        "GlmMoeDsa",
        DEEPSEEK
        | LATENT
        | {"first_k_dense_replace": 1, "q_lora_rank": 20, "index_topk": 20, "index_n_heads": 8,
           "index_head_dim": 32, "n_group": 1, "topk_group": 1, "num_hidden_layers": 2,
           "indexer_types": ["full", "shared"]},
    ),
    "DeepSeek V4": (
        "DeepseekV4",
        {key: value for key, value in SMALL.items()
         if key not in ("intermediate_size", "num_key_value_heads")}
        | {"num_hidden_layers": 4, "head_dim": 32, "q_lora_rank": 20, "moe_intermediate_size": 40,
           "n_routed_experts": 8, "num_experts_per_tok": 3, "swiglu_limit": 0.5, "sliding_window": 9,
           "layer_types": [
               "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
               "compressed_sparse_attention"],
           "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "partial_rotary_factor": 0.25,
           "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
           "hc_sinkhorn_iters": 5, "o_groups": 2, "o_lora_rank": 24, "index_n_heads": 8,
           "index_head_dim": 16, "index_topk": 5, "num_nextn_predict_layers": 0},
    ),
    "gpt-oss": (
        "GptOss",
        SMALL
        | {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 24, "sliding_window": 9,
           "num_hidden_layers": 4, "swiglu_limit": 0.5, "rope_parameters": YARN_ROPE | {"truncate": False}},
    ),
    "Gemma 2": ("Gemma2", GEMMA2),
    "Gemma 2, untied": ("Gemma2", GEMMA2 | UNTIED),
    "Gemma 3": (
        "Gemma3Text",
        GEMMA2
        | {"query_pre_attn_scalar": 24, "attn_logit_softcapping": None, "final_logit_softcapping": None,
           "sliding_window_pattern": 2, "rope_parameters": GEMMA3_ROPES},
    ),
    "VaultGemma": ("VaultGemma", GEMMA2),
    "Gemma 3n": (
        "Gemma3nText",
        LATER_GEMMA
        | {"num_hidden_layers": 5, "layer_types": [*TURNS, *TURNS, "full_attention"],
           "vocab_size_per_layer_input": 150, "activation_sparsity_pattern": [0.6, 0.0, 0.0, 0.9, 0.0],
           "laurel_rank": 8, "intermediate_size": [96, 80, 96, 64, 96], "altup_num_inputs": 3,
           "altup_active_idx": 1, "num_kv_shared_layers": 3},
    ),
    "Gemma 4": (
        "Gemma4Text",
        LATER_GEMMA | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "global_head_dim": 24},
    ),
    "Gemma 4, experts": (
        "Gemma4Text",
        LATER_GEMMA
        | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
           "global_head_dim": 32, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2,
           "moe_intermediate_size": 40, "num_hidden_layers": 2,
           "layer_types": TURNS, "final_logit_softcapping": 12.0},
    ),
    "Gemma 4, unified": (
        "Gemma4UnifiedText",
        {key: value for key, value in LATER_GEMMA.items() if "per_layer_input" not in key}
        | {"global_head_dim": 16, "num_hidden_layers": 2, "layer_types": TURNS},
    ),
    "GLM-4": ("Glm", SMALL | {"head_dim": 16}),
    "GLM-4-0414": ("Glm4", SMALL | {"head_dim": 16, "num_attention_heads": 6}),
    "OLMo": ("Olmo", SMALL | {"clip_qkv": 0.8}),
    "OLMo 2": ("Olmo2", SMALL),
    "OLMo 3": ("Olmo3", FOUR | WINDOW | {"rope_parameters": OLMO3_ROPES}),
    "Granite": (
        "Granite",
        SMALL
        | {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
           "logits_scaling": 2.5},
    ),
    "SmolLM3": ("SmolLM3", FOUR | {"no_rope_layer_interval": 2}),
    "EXAONE 4": ("Exaone4", FOUR | WINDOW | {"rope_parameters": LLAMA3_ROPE}),
    "ERNIE 4.5": ("Ernie4_5", SMALL | {"use_bias": True, "head_dim": 24}),
    "Helium": ("Helium", SMALL | {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "Hunyuan": (
        "HunYuanDenseV1",
        SMALL
        | {"head_dim": 16,
           "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}},
    ),
    "Cohere": ("Cohere", SMALL | {"use_qk_norm": True, "logit_scale": 0.25}),
    "Cohere 2": ("Cohere2", FOUR | WINDOW | {"logit_scale": 0.25}),
    "Ministral": ("Ministral", SMALL | WINDOW | {"head_dim": 16}),
    "Ministral 3": (
        "Ministral3",
        SMALL
        | {"head_dim": 16,
           "rope_parameters": YARN_ROPE
           | {"llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
    "Arcee": ("Arcee", SMALL | {"mlp_bias": True}),
    "Seed-OSS": ("SeedOss", SMALL | {"head_dim": 24, "attention_out_bias": True}),
    "CWM": ("Cwm", FOUR | WINDOW | {"head_dim": 16, "rope_parameters": LLAMA3_ROPE}),
    "Apertus": ("Apertus", SMALL | {"rope_parameters": LLAMA3_ROPE}),
    "GPT-2": ("GPT2", GPT2),
    "GPT-2, untied, narrow mlp": ("GPT2", GPT2 | UNTIED | {"n_inner": 96}),
    "OPT": ("OPT", OPT),
    "GPT-2, scores by layer": (
        "GPT2",
        GPT2 | {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False, "n_layer": 2,
                "activation_function": "relu"},
    ),
    "GPT-BigCode": ("GPTBigCode", GPT2),
    "GPT-BigCode, no groups": ("GPTBigCode", GPT2 | {"multi_query": False, "n_layer": 2}),
    "GPT": ("OpenAIGPT", GPT2),
    "GPT-Neo": ("GPTNeo", GPT_NEO),
    "GPT-J": ("GPTJ", GPT2 | {"rotary_dim": 10}),
    "CodeGen": ("CodeGen", GPT2 | {"rotary_dim": 6, "n_layer": 2, "n_head": 8}),
    "MPT, clip": ("Mpt", MPT),
    "OPT, untied": ("OPT", OPT | UNTIED),
    "OPT, norms behind, narrow embedding": ("OPT", OPT_NARROW),
    "OPT, narrow embedding, untied": ("OPT", OPT_NARROW | UNTIED | {"num_hidden_layers": 1}),
    "OPT, no biases": ("OPT", GALACTICA | {"num_hidden_layers": 2}),
    "XGLM": ("XGLM", XGLM),
    "BioGPT": ("BioGpt", NO_GROUPS | {"num_hidden_layers": 2}),
    "GPT-NeoX": ("GPTNeoX", NO_GROUPS),
    "GPT-NeoX, sequential": ("GPTNeoX", NO_GROUPS | {"use_parallel_residual": False}),
    "GPT-NeoX, tied, whole heads": (
        "GPTNeoX",
        NO_GROUPS
        | {"tie_word_embeddings": True, "hidden_act": "gelu_fast",
           "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    ),
    "GPT-NeoX, Japanese": ("GPTNeoXJapanese", NO_GROUPS | {"num_hidden_layers": 2}),
    "CTRL": ("CTRL", GPT2 | {"dff": 96, "n_layer": 2}),
    "BLOOM": ("Bloom", BLOOM),
    "BLOOM, untied": ("Bloom", BLOOM | UNTIED),
    "BLOOM, 6 heads": ("Bloom", BLOOM | {"hidden_size": 96, "n_layer": 2, "n_head": 6}),
    "BLOOM, residuals behind norms": (
        "Bloom",
        BLOOM | {"apply_residual_connection_post_layernorm": True, "n_layer": 2},
    ),
    "Falcon": ("Falcon", NO_GROUPS | {"ffn_hidden_size": 96}),
    "Falcon, untied, biases": ("Falcon", NO_GROUPS | UNTIED | {"bias": True}),
    "Falcon, groups": ("Falcon", FALCON_40B),
    "Falcon, groups, one norm": ("Falcon", FALCON_40B | {"num_ln_in_parallel_attn": 1}),
    "Falcon, ALiBi": ("Falcon", FALCON_RW),
    "Phi": ("Phi", NO_GROUPS | {"rope_parameters": PARTIAL_ROPE}),
    "Phi, groups, head norms": ("Phi", SMALL | {"qk_layernorm": True, "num_hidden_layers": 2}),
    "Persimmon": ("Persimmon", NO_GROUPS | {"num_hidden_layers": 2}),
    "StarCoder2": ("Starcoder2", SMALL | WINDOW),
    "StarCoder2, no biases": ("Starcoder2", SMALL | {"use_bias": False, "num_hidden_layers": 2} | UNTIED),
    "Nemotron": ("Nemotron", SMALL | {"head_dim": 24}),
    "Jais 2": ("Jais2", SMALL | {"num_hidden_layers": 2}),
    "StableLM, biases": ("StableLm", SMALL | {"use_qkv_bias": True, "rope_parameters": PARTIAL_ROPE}),
    "StableLM, parallel, head norms": (
        "StableLm",
        SMALL | {"use_parallel_residual": True, "qk_layernorm": True, "num_hidden_layers": 2},
    ),
}  # fmt: skip
FAMILY_NAMES = tuple(MODELS)
#: The names in configs of the number of experts of a token.
CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
MIXTURES = [name for name, (_, config) in MODELS.items() if any(key in config for key in CHOSEN)]
#: Models whose layers have recurrent states.
RECURRENT = [
    name
    for name, (_, config) in MODELS.items()
    if any(word in key for key in config for word in ("conv", "mamba", "compress"))
]
#: Seeds of models of which the usual seed makes routers with a near tie between two experts, or indexers with
#: one between two keys: whoever rounds otherwise chooses the other, and computes something else.
SEEDS = {
    "Qwen3-MoE": 13, "Hunyuan-A13B": 11, "OLMoE": 11, "Gemma 4, experts": 11, "Falcon-H1, norm, biases": 11,
    "Mistral 4": 11, "DeepSeek V3.2": 12, "GLM-5": 11, "DeepSeek V4": 16,
}  # fmt: skip
#: Models each of which shows the engine or the kernels something that the other models of this list do not:
#: another attention, rope, norm, activation, router or order of a layer. What takes long is tried with them.
DISTINCT = (
    "Llama", "Llama, wide heads", "Llama, rope dynamic", "Mistral, window", "Qwen2, window", "Qwen3",
    "Phi-3, part of a head, window", "Phi-3, rope longrope", "MiniCPM, rope longrope", "Qwen2-MoE",
    "Qwen3-MoE", "Llama 4", "GLM-4.5", "MiniMax-M2", "Granite MoE", "Phi-3.5-MoE", "Mixtral", "MiniCPM3",
    "DeepSeek V2", "DeepSeek V3", "gpt-oss", "Gemma 2", "Gemma 3", "Gemma 3n", "Gemma 4, experts",
    "GLM-4", "OLMo", "OLMo 2", "SmolLM3", "Cohere 2", "Ministral 3", "Apertus", "GPT-2", "GPT-BigCode",
    "GPT-Neo", "GPT-J", "MPT, clip", "OPT, norms behind, narrow embedding", "XGLM", "GPT-NeoX", "CTRL",
    "BLOOM, 6 heads", "Falcon", "Falcon, groups", "Falcon, ALiBi", "Phi, groups, head norms", "Persimmon",
    "StarCoder2", "Nemotron", "StableLM, parallel, head norms", "LFM2", "Bamba", "Granite 4",
    "Falcon-H1, norm, biases", "Nemotron-H", "Qwen3.5", "Qwen3-Next", "Kimi Linear",
    "Ling 3", "GLM-5", "DeepSeek V4",    "OLMo Hybrid",
)  # fmt: skip
#: Models whose keys and values, states or experts a whole engine treats otherwise than those of the others.
#: test_families.py shows of every model that its layers compute the same in company and in chunks.
WHOLE = (
    "Llama", "Qwen2, window", "Phi-3, rope longrope", "Qwen2-MoE", "Qwen3-MoE", "Llama 4", "GLM-4.5",
    "MiniCPM3", "DeepSeek V2", "DeepSeek V3", "GLM-5", "gpt-oss", "Gemma 2", "Gemma 3", "Gemma 3n",
    "Gemma 4, experts", "Ministral 3", "GPT-2", "GPT-BigCode", "GPT-Neo", "MPT, clip",
    "OPT, norms behind, narrow embedding", "XGLM", "BLOOM, 6 heads", "Falcon, groups",
    *(name for name in DISTINCT if name in RECURRENT),
)  # fmt: skip
#: Of these, the inner circle of tests takes what other tests than logits and company try with DISTINCT: one
#: for each kind of positions, norms, routers, states and order of a layer.
FEW = (
    "Llama", "Phi-3, rope longrope", "Qwen2-MoE", "DeepSeek V2", "gpt-oss", "Gemma 3n", "GPT-2", "MPT, clip",
    "OPT, norms behind, narrow embedding", "BLOOM, 6 heads", "Falcon, groups", "Cohere 2", "LFM2", "Bamba",
    "Qwen3-Next", "Kimi Linear",
)  # fmt: skip
#: Kinds whose classes end so, and not in ForCausalLM.
LM_HEAD_MODELS = ("CTRL", "GPT2", "OpenAIGPT")


def in_circles(names: Sequence[str], inner: Sequence[str] = FEW) -> list[Any]:
    """Cases of a test, of which those outside `inner` run in the outer circle."""
    return [name if name in inner else pytest.param(name, marks=pytest.mark.slow) for name in names]


def build(name: str, folder: Path, **overrides: Any) -> transformers.PreTrainedModel:
    """Make a model of MODELS, its config with `overrides`, save it in `folder` and return it (float32, eager
    attention).

    Norms and biases, which start as ones and zeros, are moved, so that forgetting one shows.
    """
    kind, sizes = MODELS[name]
    library: Any = minicpm_twin if kind == "MiniCPM" else transformers
    class_name = f"{kind}Config"
    kind = kind.removesuffix("Text")
    config = getattr(library, class_name)(**(sizes | overrides))
    # Falcon's eager attention adds ALiBi twice, once with the mask.
    config._attn_implementation = "sdpa" if kind == "Falcon" else "eager"
    suffix = "LMHeadModel" if kind in LM_HEAD_MODELS else "ForCausalLM"
    torch.manual_seed(SEEDS.get(name, 10))
    model = getattr(library, f"{kind}{suffix}")(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1 or "_norm" in parameter_name:  # Cohere's heads have weights of their own
                spread = 0.1 if parameter_name.endswith("bias") else 0.3
                parameter += spread * torch.randn_like(parameter)
            if parameter_name.endswith("A_log"):  # states that remember more than the last two tokens
                parameter -= 3.0
        for tensor_name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor_name.endswith(("correction_bias", "layer_scalar")):  # routers' scores are below 1
                tensor += 0.1 * torch.randn_like(tensor)
            if tensor_name.endswith("tid2eid"):  # experts of each token's id
                tensor.copy_(
                    torch.rand(len(tensor), config.n_routed_experts).argsort(1)[:, : tensor.shape[1]]
                )
            if tensor_name.endswith("position_bias"):
                tensor += 0.3 * torch.randn_like(tensor)
    model.save_pretrained(folder)
    return model
