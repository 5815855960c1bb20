"""Known shapes: the config.json of well-known models, so that one can plan and measure before downloading
anything. This file imports no torch, because `penstock plan --help` lists the names."""

from __future__ import annotations

from typing import Any

from penstock.errors import ConfigError


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
    "tinyllama-1.1b": _llama(2048, 22, 32, 4, 5632, 32000, max_position_embeddings=2048),
    "llama-2-7b": _llama(4096, 32, 32, 32, 11008, 32000),
    "llama-2-13b": _llama(5120, 40, 40, 40, 13824, 32000),
    "llama-3-8b": _llama(4096, 32, 32, 8, 14336, 128256, max_position_embeddings=8192, rope_theta=500000.0),
    "llama-3-70b": _llama(8192, 80, 64, 8, 28672, 128256, max_position_embeddings=8192, rope_theta=500000.0),
    "solar-10.7b": _llama(4096, 48, 32, 8, 14336, 32000),
    "falcon3-10b": _llama(
        3072, 40, 12, 4, 23040, 131072, head_dim=256, max_position_embeddings=32768, rope_theta=1000042.0
    ),
    "mistral-7b": _llama(4096, 32, 32, 8, 14336, 32768, max_position_embeddings=32768, rope_theta=1e6)
    | _like("MistralForCausalLM", "mistral"),
    "qwen2.5-7b": _llama(3584, 28, 28, 4, 18944, 152064, max_position_embeddings=32768, rope_theta=1e6)
    | _like("Qwen2ForCausalLM", "qwen2"),
    "qwen3-8b": _llama(4096, 36, 32, 8, 12288, 151936, max_position_embeddings=40960) | _QWEN3,
    "qwen3-14b": _llama(5120, 40, 40, 8, 17408, 151936, max_position_embeddings=40960) | _QWEN3,
    "phi-3-mini": _llama(3072, 32, 32, 32, 8192, 32064)
    | _like("Phi3ForCausalLM", "phi3", pad_token_id=32000),
    "phi-4": _llama(5120, 40, 40, 10, 17920, 100352, max_position_embeddings=16384, rope_theta=250000.0)
    | _like("Phi3ForCausalLM", "phi3", pad_token_id=100349),
    "gemma-2-9b": _llama(3584, 42, 16, 8, 14336, 256000, max_position_embeddings=8192, head_dim=256)
    | _like("Gemma2ForCausalLM", "gemma2", tie_word_embeddings=True, query_pre_attn_scalar=256),
    "gpt2-xl": _gpt2(1600, 48, 25, 50257),
    "opt-6.7b": {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 4096, "ffn_dim": 16384,
        "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 50272, "word_embed_proj_dim": 4096,
        "max_position_embeddings": 2048, "do_layer_norm_before": True,
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
    "t5-11b": _t5(
        "T5ForConditionalGeneration", 1024, 128, 128, 65536, 24, 32128,
        feed_forward_proj="relu", tie_word_embeddings=True,
    ),
    "flan-t5-xxl": _t5("T5ForConditionalGeneration", 4096, 64, 64, 10240, 24, 32128),
    "flan-ul2": _t5(
        "T5ForConditionalGeneration", 4096, 16, 256, 16384, 32, 32128, feed_forward_proj="gated-silu"
    ),
}  # fmt: skip

#: Well-known models of the line of CPM-1 that are not computed, and what is missing for them.
_NOT_COMPUTED = {
    "cpm-bee": "biases of attention between more than two segments, which CPM-Bee has; see cpm-ant",
    "minicpm3-4b": "the latent attention of MiniCPM3; see minicpm-2b and minicpm4-8b",
}

#: The repository on the hub that has a shape. CPM-2 has none: its files came from another place.
REPOSITORIES = {
    "cpm-1": "TsinghuaAI/CPM-Generate",
    "eva": "thu-coai/EVA2.0-xlarge",
    "cpm-ant": "openbmb/cpm-ant-10b",
    "minicpm-2b": "openbmb/MiniCPM-2B-sft-bf16",
    "minicpm4-8b": "openbmb/MiniCPM4-8B",
    "tinyllama-1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "llama-2-7b": "meta-llama/Llama-2-7b-chat-hf",
    "llama-2-13b": "meta-llama/Llama-2-13b-chat-hf",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B-Instruct",
    "solar-10.7b": "upstage/SOLAR-10.7B-Instruct-v1.0",
    "falcon3-10b": "tiiuae/Falcon3-10B-Instruct",
    "mistral-7b": "mistralai/Mistral-7B-Instruct-v0.3",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-14b": "Qwen/Qwen3-14B",
    "phi-3-mini": "microsoft/Phi-3-mini-4k-instruct",
    "phi-4": "microsoft/phi-4",
    "gemma-2-9b": "google/gemma-2-9b-it",
    "gpt2-xl": "openai-community/gpt2-xl",
    "opt-6.7b": "facebook/opt-6.7b",
    "gpt-neox-20b": "EleutherAI/gpt-neox-20b",
    "bloom-7b1": "bigscience/bloom-7b1",
    "falcon-7b": "tiiuae/falcon-7b-instruct",
    "t5-11b": "google-t5/t5-11b",
    "flan-t5-xxl": "google/flan-t5-xxl",
    "flan-ul2": "google/flan-ul2",
}


def find_shape(name: str) -> dict[str, Any]:
    """A config.json by the model's name. Raises ConfigError, which lists the known names."""
    if name.lower() in _NOT_COMPUTED:
        raise ConfigError(f"shape {name!r} is not planned: Penstock lacks {_NOT_COMPUTED[name.lower()]}")
    if name.lower() not in SHAPES:
        raise ConfigError(f"shape {name!r} is not known; known shapes: {', '.join(SHAPES)}")
    return SHAPES[name.lower()]
