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


_MINICPM: dict[str, Any] = {
    "architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4,
    "dim_model_base": 256,
}  # fmt: skip

#: The shapes are those of these repositories on the hub: TinyLlama/TinyLlama-1.1B-Chat-v1.0,
#: TsinghuaAI/CPM-Generate, openbmb/MiniCPM-2B-sft-bf16, meta-llama/Llama-2-7b-hf, openbmb/MiniCPM4-8B
#: (without the factors of its rope, which a plan does not need), upstage/SOLAR-10.7B-v1.0,
#: tiiuae/Falcon3-10B-Base, meta-llama/Llama-2-13b-hf, Qwen/Qwen3-14B, meta-llama/Meta-Llama-3-70B.
SHAPES: dict[str, dict[str, Any]] = {
    "tinyllama-1.1b": _llama(2048, 22, 32, 4, 5632, 32000, max_position_embeddings=2048),
    "cpm-1": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 2560, "n_layer": 32,
        "n_head": 32, "vocab_size": 30000, "n_positions": 1024, "tie_word_embeddings": True,
    },
    "minicpm-2b": _llama(2304, 40, 36, 36, 5760, 122753, tie_word_embeddings=True) | _MINICPM,
    "llama-2-7b": _llama(4096, 32, 32, 32, 11008, 32000),
    "minicpm4-8b": _llama(
        4096, 32, 32, 2, 16384, 73448, max_position_embeddings=32768, rms_norm_eps=1e-6
    )
    | _MINICPM,
    "solar-10.7b": _llama(4096, 48, 32, 8, 14336, 32000),
    "falcon3-10b": _llama(
        3072, 40, 12, 4, 23040, 131072, head_dim=256, max_position_embeddings=32768, rope_theta=1000042.0
    ),
    "llama-2-13b": _llama(5120, 40, 40, 40, 13824, 32000),
    "qwen3-14b": _llama(
        5120, 40, 40, 8, 17408, 151936, head_dim=128, max_position_embeddings=40960, rope_theta=1e6
    )
    | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "llama-3-70b": _llama(8192, 80, 64, 8, 28672, 128256, max_position_embeddings=8192, rope_theta=500000.0),
}  # fmt: skip


def find_shape(name: str) -> dict[str, Any]:
    """A config.json by the model's name. Raises ConfigError, which lists the known names."""
    if name.lower() not in SHAPES:
        raise ConfigError(f"shape {name!r} is not known; known shapes: {', '.join(SHAPES)}")
    return SHAPES[name.lower()]
