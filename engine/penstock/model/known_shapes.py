"""Known shapes: the config.json of well-known models, so that one can plan and measure before downloading
anything. This file imports no torch, because `penstock plan --help` lists the names."""

from __future__ import annotations

from typing import Any

from penstock.errors import ConfigError
from penstock.model.known_hybrids import HYBRID_REPOSITORIES, HYBRIDS


def _llama(
    hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, **other: Any
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "intermediate_size": ffn, "vocab_size": vocab, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    } | other  # fmt: skip


def _like(architecture: str, model_type: str, **other: Any) -> dict[str, Any]:
    """What makes another family of a Llama's config."""
    return {"architectures": [architecture], "model_type": model_type} | other


def _t5(
    architecture: str, hidden: int, heads: int, head_dim: int, ffn: int, layers: int, vocab: int, **other: Any
) -> dict[str, Any]:
    return {
        "architectures": [architecture], "model_type": "t5", "d_model": hidden, "num_heads": heads,
        "d_kv": head_dim, "d_ff": ffn, "num_layers": layers, "num_decoder_layers": layers,
        "vocab_size": vocab, "feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6, "tie_word_embeddings": False,
    } | other  # fmt: skip


def _gpt2(hidden: int, layers: int, heads: int, vocab: int) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": hidden, "n_layer": layers,
        "n_head": heads, "vocab_size": vocab, "n_positions": 1024, "tie_word_embeddings": True,
    }  # fmt: skip


_MINICPM = _like("MiniCPMForCausalLM", "minicpm", scale_emb=12, scale_depth=1.4, dim_model_base=256)
_QWEN3 = _like("Qwen3ForCausalLM", "qwen3", head_dim=128, rope_theta=1e6)

_GEMMA3 = _like(
    "Gemma3ForCausalLM", "gemma3_text", tie_word_embeddings=True, max_position_embeddings=131072,
    rms_norm_eps=1e-6, rope_theta=1e6, rope_scaling={"rope_type": "linear", "factor": 8.0},
    sliding_window=1024,
)  # fmt: skip
_GEMMA3N = _like(
    "Gemma3nForCausalLM", "gemma3n_text", tie_word_embeddings=True, max_position_embeddings=32768,
    rms_norm_eps=1e-6, sliding_window=512, num_kv_shared_layers=15,
)  # fmt: skip
_GEMMA4 = _like(
    "Gemma4ForCausalLM", "gemma4_text", tie_word_embeddings=True, max_position_embeddings=131072,
    rms_norm_eps=1e-6, sliding_window=1024, hidden_size_per_layer_input=0, final_logit_softcapping=30.0,
)  # fmt: skip
_LLAMA31_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_GLM4 = {"head_dim": 128, "rms_norm_eps": 1.5625e-7, "pad_token_id": 151329}


def _latent(rank: int, plain: int, rope: int, value: int, query_rank: int | None) -> dict[str, Any]:
    """The sizes of latent attention."""
    return {
        "kv_lora_rank": rank, "qk_nope_head_dim": plain, "qk_rope_head_dim": rope, "v_head_dim": value,
        "q_lora_rank": query_rank,
    }  # fmt: skip


def _deepseek_rope(mscale: float) -> dict[str, Any]:
    return {
        "rope_type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": mscale,
        "mscale_all_dim": mscale, "original_max_position_embeddings": 4096,
    }  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    """With the experts in MXFP4, as the hub's folders have them."""
    return _llama(
        2880, layers, 64, 8, 2880, 201088, head_dim=64, max_position_embeddings=131072, rope_theta=150000.0
    ) | _like("GptOssForCausalLM", "gpt_oss", num_local_experts=experts, num_experts_per_tok=4) | {
        "sliding_window": 128, "quantization_config": {"quant_method": "mxfp4"},
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    }  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
    "cpm-1": _gpt2(2560, 32, 32, 30000),
    "cpm-2": _t5(
        "MT5ForConditionalGeneration", 4096, 64, 64, 10240, 24, 26240,
        model_type="mt5", decoder_start_token_id=1, eos_token_id=7, pad_token_id=5,
    ),
    "eva": _t5(
        "EVAModel", 2048, 32, 64, 5120, 24, 30000,
        model_type="eva", attn_scale=True, bos_token_id=29810, eos_token_id=4, pad_token_id=5,
    ),
    "cpm-ant": {
        "architectures": ["CpmAntForCausalLM"], "model_type": "cpmant", "hidden_size": 4096,
        "num_hidden_layers": 48, "num_attention_heads": 32, "dim_head": 128, "dim_ff": 10240,
        "vocab_size": 30720,
    },
    "minicpm-2b": _llama(2304, 40, 36, 36, 5760, 122753, tie_word_embeddings=True) | _MINICPM,
    # Without the factors of its rope, which a plan does not need.
    "minicpm4-8b": _llama(
        4096, 32, 32, 2, 16384, 73448, max_position_embeddings=32768, rms_norm_eps=1e-6
    )
    | _MINICPM,
    # Without the factors of its rope as well.
    "minicpm3-4b": _llama(2560, 62, 40, 40, 6400, 73448, max_position_embeddings=32768)
    | _MINICPM
    | _like("MiniCPM3ForCausalLM", "minicpm3", tie_word_embeddings=True)
    | _latent(256, 64, 32, 64, 768),
    "tinyllama-1.1b": _llama(2048, 22, 32, 4, 5632, 32000, max_position_embeddings=2048),
    "llama-2-7b": _llama(4096, 32, 32, 32, 11008, 32000),
    "llama-2-13b": _llama(5120, 40, 40, 40, 13824, 32000),
    "llama-3-8b": _llama(4096, 32, 32, 8, 14336, 128256, max_position_embeddings=8192, rope_theta=500000.0),
    "llama-3.1-8b": _llama(
        4096, 32, 32, 8, 14336, 128256, max_position_embeddings=131072, rope_theta=500000.0
    )
    | {"rope_scaling": _LLAMA31_ROPE},
    "llama-3-70b": _llama(8192, 80, 64, 8, 28672, 128256, max_position_embeddings=8192, rope_theta=500000.0),
    "solar-10.7b": _llama(4096, 48, 32, 8, 14336, 32000),
    "falcon3-10b": _llama(
        3072, 40, 12, 4, 23040, 131072, head_dim=256, max_position_embeddings=32768, rope_theta=1000042.0
    ),
    "mistral-7b": _llama(4096, 32, 32, 8, 14336, 32768, max_position_embeddings=32768, rope_theta=1e6)
    | _like("MistralForCausalLM", "mistral", sliding_window=None),
    "qwen2.5-7b": _llama(3584, 28, 28, 4, 18944, 152064, max_position_embeddings=32768, rope_theta=1e6)
    | _like("Qwen2ForCausalLM", "qwen2"),
    "qwen3-8b": _llama(4096, 36, 32, 8, 12288, 151936, max_position_embeddings=40960) | _QWEN3,
    "qwen3-14b": _llama(5120, 40, 40, 8, 17408, 151936, max_position_embeddings=40960) | _QWEN3,
    "qwen3-32b": _llama(5120, 64, 64, 8, 25600, 151936, max_position_embeddings=40960) | _QWEN3,
    "qwen2-57b-a14b": _llama(
        3584, 28, 28, 4, 18944, 151936, max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=1e6
    )
    | _like("Qwen2MoeForCausalLM", "qwen2_moe", num_experts=64, num_experts_per_tok=8)
    | {"moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480, "norm_topk_prob": False},
    "qwen3-30b-a3b": _llama(
        2048, 48, 32, 4, 6144, 151936, max_position_embeddings=40960, rms_norm_eps=1e-6
    )
    | _QWEN3
    | _like("Qwen3MoeForCausalLM", "qwen3_moe", num_experts=128, num_experts_per_tok=8)
    | {"moe_intermediate_size": 768, "norm_topk_prob": True},
    "mixtral-8x7b": _llama(4096, 32, 32, 8, 14336, 32000, max_position_embeddings=32768, rope_theta=1e6)
    | _like("MixtralForCausalLM", "mixtral", num_local_experts=8, num_experts_per_tok=2),
    "olmoe-1b-7b": _llama(2048, 16, 16, 16, 1024, 50304)
    | _like("OlmoeForCausalLM", "olmoe", num_experts=64, num_experts_per_tok=8, norm_topk_prob=False),
    "deepseek-v2-lite": _llama(2048, 27, 16, 16, 10944, 102400, max_position_embeddings=163840)
    | _like("DeepseekV2ForCausalLM", "deepseek_v2", n_routed_experts=64, num_experts_per_tok=6)
    | {"moe_intermediate_size": 1408, "n_shared_experts": 2, "first_k_dense_replace": 1}
    | _latent(512, 128, 64, 128, None)
    | {"topk_method": "greedy", "rms_norm_eps": 1e-6, "rope_scaling": _deepseek_rope(0.707)},
    "deepseek-v3": _llama(7168, 61, 128, 128, 18432, 129280, max_position_embeddings=163840)
    | _like("DeepseekV3ForCausalLM", "deepseek_v3", n_routed_experts=256, num_experts_per_tok=8)
    | {"moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3}
    | _latent(512, 128, 64, 128, 1536)
    | {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
    | {"rms_norm_eps": 1e-6, "rope_scaling": _deepseek_rope(1.0), "scoring_func": "sigmoid"},
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "glm-4.5-air": _llama(
        4096, 46, 96, 8, 10944, 151552, head_dim=128, max_position_embeddings=131072, rope_theta=1e6
    )
    | _like("Glm4MoeForCausalLM", "glm4_moe", n_routed_experts=128, num_experts_per_tok=8)
    | {
        "moe_intermediate_size": 1408, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "attention_bias": True, "partial_rotary_factor": 0.5, "norm_topk_prob": True,
    },
    "phi-3-mini": _llama(3072, 32, 32, 32, 8192, 32064)
    | _like("Phi3ForCausalLM", "phi3", pad_token_id=32000),
    "phi-4": _llama(5120, 40, 40, 10, 17920, 100352, max_position_embeddings=16384, rope_theta=250000.0)
    | _like("Phi3ForCausalLM", "phi3", pad_token_id=100349),
    "gemma-2-9b": _llama(3584, 42, 16, 8, 14336, 256000, max_position_embeddings=8192, head_dim=256)
    | _like("Gemma2ForCausalLM", "gemma2", tie_word_embeddings=True, query_pre_attn_scalar=256),
    "gemma-7b": _llama(3072, 28, 16, 16, 24576, 256000, max_position_embeddings=8192, head_dim=256)
    | _like("GemmaForCausalLM", "gemma", tie_word_embeddings=True, rms_norm_eps=1e-6),
    "gemma-3-4b": _llama(2560, 34, 8, 4, 10240, 262208, head_dim=256) | _GEMMA3,
    "gemma-3-12b": _llama(3840, 48, 16, 8, 15360, 262208, head_dim=256) | _GEMMA3,
    "gemma-3-27b": _llama(5376, 62, 32, 16, 21504, 262208, head_dim=128, query_pre_attn_scalar=168) | _GEMMA3,
    # Text parts alone.
    "gemma-3n-e4b": _llama(2048, 35, 8, 2, 16384, 262400, head_dim=256) | _GEMMA3N,
    "gemma-4-e4b": _llama(2560, 42, 8, 2, 10240, 262144, head_dim=256)
    | _GEMMA4
    | {"hidden_size_per_layer_input": 256, "num_kv_shared_layers": 18, "sliding_window": 512},
    "gemma-4-26b-a4b": _llama(2816, 30, 16, 8, 2112, 262144, head_dim=256)
    | _GEMMA4
    | {
        "attention_k_eq_v": True, "num_global_key_value_heads": 2, "enable_moe_block": True,
        "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
    },
    "gemma-4-31b": _llama(5376, 60, 32, 16, 21504, 262144, head_dim=256)
    | _GEMMA4
    | {"attention_k_eq_v": True, "num_global_key_value_heads": 4},
    "mistral-small-24b": _llama(
        5120, 40, 32, 8, 32768, 131072, head_dim=128, max_position_embeddings=32768, rope_theta=1e8
    )
    | _like("MistralForCausalLM", "mistral", sliding_window=None),
    "glm-4-9b": _llama(4096, 40, 32, 2, 13696, 151552, max_position_embeddings=131072)
    | _like("GlmForCausalLM", "glm", attention_bias=True)
    | _GLM4,
    "glm-4-32b": _llama(6144, 61, 48, 2, 23040, 151552, max_position_embeddings=32768)
    | _like("Glm4ForCausalLM", "glm4", attention_bias=False)
    | _GLM4,
    "olmo-2-7b": _llama(4096, 32, 32, 32, 11008, 100352, rope_theta=500000.0, rms_norm_eps=1e-6)
    | _like("Olmo2ForCausalLM", "olmo2"),
    "olmo-2-13b": _llama(5120, 40, 40, 40, 13824, 100352, rope_theta=500000.0, rms_norm_eps=1e-6)
    | _like("Olmo2ForCausalLM", "olmo2"),
    "granite-3.3-8b": _llama(4096, 40, 32, 8, 12800, 49159, max_position_embeddings=131072, rope_theta=1e7)
    | _like(
        "GraniteForCausalLM", "granite", tie_word_embeddings=True, attention_multiplier=0.0078125,
        embedding_multiplier=12.0, logits_scaling=16.0, residual_multiplier=0.22,
    ),
    "smollm3-3b": _llama(2048, 36, 16, 4, 11008, 128256, max_position_embeddings=65536, rope_theta=5e6)
    | _like("SmolLM3ForCausalLM", "smollm3", tie_word_embeddings=True),
    "command-r7b": _llama(4096, 32, 32, 8, 14336, 256000, max_position_embeddings=8192, rope_theta=50000.0)
    | _like("Cohere2ForCausalLM", "cohere2", tie_word_embeddings=True, logit_scale=0.25, sliding_window=4096),
    "exaone-4-32b": _llama(
        5120, 64, 40, 8, 27392, 102400, head_dim=128, max_position_embeddings=131072, rope_theta=1e6
    )
    | _like("Exaone4ForCausalLM", "exaone4", sliding_window=4096, sliding_window_pattern=4),
    "seed-oss-36b": _llama(
        5120, 64, 80, 8, 27648, 155136, head_dim=128, max_position_embeddings=524288, rope_theta=1e7
    )
    | _like("SeedOssForCausalLM", "seed_oss", attention_bias=True),
    "apertus-8b": _llama(4096, 32, 32, 8, 21504, 131072, max_position_embeddings=65536, rope_theta=12e6)
    | _like("ApertusForCausalLM", "apertus", hidden_act="xielu"),
    "gpt2-xl": _gpt2(1600, 48, 25, 50257),
    "opt-6.7b": {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 4096, "ffn_dim": 16384,
        "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 50272, "word_embed_proj_dim": 4096,
        "max_position_embeddings": 2048, "do_layer_norm_before": True,
    },
    "gpt-j-6b": {
        "architectures": ["GPTJForCausalLM"], "model_type": "gptj", "n_embd": 4096, "n_layer": 28,
        "n_head": 16, "rotary_dim": 64, "vocab_size": 50400, "n_positions": 2048,
        "tie_word_embeddings": False,
    },
    "gpt-neox-20b": {
        "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_size": 6144,
        "num_hidden_layers": 44, "num_attention_heads": 64, "intermediate_size": 24576, "vocab_size": 50432,
        "max_position_embeddings": 2048, "rotary_pct": 0.25, "tie_word_embeddings": False,
    },
    "bloom-7b1": {
        "architectures": ["BloomForCausalLM"], "model_type": "bloom", "hidden_size": 4096, "n_layer": 30,
        "n_head": 32, "vocab_size": 250880,
    },
    "falcon-7b": {
        "architectures": ["FalconForCausalLM"], "model_type": "falcon", "hidden_size": 4544,
        "num_hidden_layers": 32, "num_attention_heads": 71, "vocab_size": 65024, "multi_query": True,
        "parallel_attn": True, "new_decoder_architecture": False, "alibi": False, "bias": False,
    },
    "falcon-40b": {
        "architectures": ["FalconForCausalLM"], "model_type": "falcon", "hidden_size": 8192,
        "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8, "vocab_size": 65024,
        "new_decoder_architecture": True, "parallel_attn": True, "alibi": False, "bias": False,
    },
    "mpt-7b": {
        "architectures": ["MptForCausalLM"], "model_type": "mpt", "d_model": 4096, "n_layers": 32,
        "n_heads": 32, "vocab_size": 50432, "max_seq_len": 2048,
    },
    "phi-2": {
        "architectures": ["PhiForCausalLM"], "model_type": "phi", "hidden_size": 2560,
        "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 10240, "vocab_size": 51200,
        "max_position_embeddings": 2048, "partial_rotary_factor": 0.4, "tie_word_embeddings": False,
    },
    "stablelm-2-12b": {
        "architectures": ["StableLmForCausalLM"], "model_type": "stablelm", "hidden_size": 5120,
        "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 13824, "vocab_size": 100352, "max_position_embeddings": 4096,
        "partial_rotary_factor": 0.25, "use_parallel_residual": True, "qk_layernorm": True,
        "use_qkv_bias": False, "tie_word_embeddings": False,
    },
    "starcoder2-15b": {
        "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "hidden_size": 6144,
        "num_hidden_layers": 40, "num_attention_heads": 48, "num_key_value_heads": 4,
        "intermediate_size": 24576, "vocab_size": 49152, "max_position_embeddings": 16384,
        "sliding_window": 4096, "rope_theta": 100000,
    },
    "t5-11b": _t5(
        "T5ForConditionalGeneration", 1024, 128, 128, 65536, 24, 32128,
        feed_forward_proj="relu", tie_word_embeddings=True,
    ),
    "flan-t5-xxl": _t5("T5ForConditionalGeneration", 4096, 64, 64, 10240, 24, 32128),
    "flan-ul2": _t5(
        "T5ForConditionalGeneration", 4096, 16, 256, 16384, 32, 32128, feed_forward_proj="gated-silu"
    ),
} | HYBRIDS  # fmt: skip

#: Well-known models of the line of CPM-1 that are not computed, and what is missing for them.
_NOT_COMPUTED = {
    "cpm-bee": "biases of attention between more than two segments, which CPM-Bee has; see cpm-ant",
}

#: The repository on the hub that has a shape. CPM-2 has none: its files came from another place.
REPOSITORIES = {
    "cpm-1": "TsinghuaAI/CPM-Generate",
    "eva": "thu-coai/EVA2.0-xlarge",
    "cpm-ant": "openbmb/cpm-ant-10b",
    "minicpm-2b": "openbmb/MiniCPM-2B-sft-bf16",
    "minicpm4-8b": "openbmb/MiniCPM4-8B",
    "minicpm3-4b": "openbmb/MiniCPM3-4B",
    "tinyllama-1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "llama-2-7b": "meta-llama/Llama-2-7b-chat-hf",
    "llama-2-13b": "meta-llama/Llama-2-13b-chat-hf",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B-Instruct",
    "solar-10.7b": "upstage/SOLAR-10.7B-Instruct-v1.0",
    "falcon3-10b": "tiiuae/Falcon3-10B-Instruct",
    "mistral-7b": "mistralai/Mistral-7B-Instruct-v0.3",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-14b": "Qwen/Qwen3-14B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen2-57b-a14b": "Qwen/Qwen2-57B-A14B-Instruct",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "olmoe-1b-7b": "allenai/OLMoE-1B-7B-0924-Instruct",
    "deepseek-v2-lite": "deepseek-ai/DeepSeek-V2-Lite-Chat",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3-0324",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "glm-4.5-air": "zai-org/GLM-4.5-Air",
    "phi-3-mini": "microsoft/Phi-3-mini-4k-instruct",
    "phi-4": "microsoft/phi-4",
    "gemma-2-9b": "google/gemma-2-9b-it",
    "gemma-7b": "google/gemma-7b-it",
    "gemma-3-4b": "google/gemma-3-4b-it",
    "gemma-3-12b": "google/gemma-3-12b-it",
    "gemma-3-27b": "google/gemma-3-27b-it",
    "gemma-3n-e4b": "google/gemma-3n-E4B-it",
    "gemma-4-e4b": "google/gemma-4-E4B-it",
    "gemma-4-26b-a4b": "google/gemma-4-26B-A4B-it",
    "gemma-4-31b": "google/gemma-4-31B-it",
    "mistral-small-24b": "mistralai/Mistral-Small-24B-Instruct-2501",
    "glm-4-9b": "THUDM/glm-4-9b-chat-hf",
    "glm-4-32b": "THUDM/GLM-4-32B-0414",
    "olmo-2-7b": "allenai/OLMo-2-1124-7B-Instruct",
    "olmo-2-13b": "allenai/OLMo-2-1124-13B-Instruct",
    "granite-3.3-8b": "ibm-granite/granite-3.3-8b-instruct",
    "smollm3-3b": "HuggingFaceTB/SmolLM3-3B",
    "command-r7b": "CohereLabs/c4ai-command-r7b-12-2024",
    "exaone-4-32b": "LGAI-EXAONE/EXAONE-4.0-32B",
    "seed-oss-36b": "ByteDance-Seed/Seed-OSS-36B-Instruct",
    "apertus-8b": "swiss-ai/Apertus-8B-Instruct-2509",
    "gpt2-xl": "openai-community/gpt2-xl",
    "opt-6.7b": "facebook/opt-6.7b",
    "gpt-j-6b": "EleutherAI/gpt-j-6b",
    "gpt-neox-20b": "EleutherAI/gpt-neox-20b",
    "bloom-7b1": "bigscience/bloom-7b1",
    "falcon-7b": "tiiuae/falcon-7b-instruct",
    "falcon-40b": "tiiuae/falcon-40b-instruct",
    "mpt-7b": "mosaicml/mpt-7b-instruct",
    "phi-2": "microsoft/phi-2",
    "stablelm-2-12b": "stabilityai/stablelm-2-12b-chat",
    "starcoder2-15b": "bigcode/starcoder2-15b",
    "t5-11b": "google-t5/t5-11b",
    "flan-t5-xxl": "google/flan-t5-xxl",
    "flan-ul2": "google/flan-ul2",
} | HYBRID_REPOSITORIES


def find_shape(name: str) -> dict[str, Any]:
    """A config.json by the model's name. Raises ConfigError, which lists the known names."""
    if name.lower() in _NOT_COMPUTED:
        raise ConfigError(f"shape {name!r} is not planned: Penstock lacks {_NOT_COMPUTED[name.lower()]}")
    if name.lower() not in SHAPES:
        raise ConfigError(f"shape {name!r} is not known; known shapes: {', '.join(SHAPES)}")
    return SHAPES[name.lower()]
