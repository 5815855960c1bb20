"""Tiny random models of every family, made by transformers' own classes and saved as it saves them. MiniCPM,
which transformers lacks, has a twin of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import minicpm_twin
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
GPT2: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 192,
    "initializer_range": 0.14, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
OPT = NO_GROUPS | {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.14, "pad_token_id": 1}
BLOOM: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "n_layer": 3, "n_head": 4,
    "initializer_range": 0.14, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
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
    "Gemma 2": ("Gemma2", GEMMA2),
    "Gemma 2, untied": ("Gemma2", GEMMA2 | UNTIED),
    "GPT-2": ("GPT2", GPT2),
    "GPT-2, untied, narrow mlp": ("GPT2", GPT2 | UNTIED | {"n_inner": 96}),
    "OPT": ("OPT", OPT),
    "OPT, untied": ("OPT", OPT | UNTIED),
    "GPT-NeoX": ("GPTNeoX", NO_GROUPS),
    "GPT-NeoX, sequential": ("GPTNeoX", NO_GROUPS | {"use_parallel_residual": False}),
    "GPT-NeoX, tied, whole heads": (
        "GPTNeoX",
        NO_GROUPS
        | {"tie_word_embeddings": True, "hidden_act": "gelu_fast",
           "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    ),
    "BLOOM": ("Bloom", BLOOM),
    "BLOOM, untied": ("Bloom", BLOOM | UNTIED),
    "BLOOM, 6 heads": ("Bloom", BLOOM | {"hidden_size": 96, "n_layer": 2, "n_head": 6}),
    "Falcon": ("Falcon", NO_GROUPS | {"ffn_hidden_size": 96}),
    "Falcon, untied, biases": ("Falcon", NO_GROUPS | UNTIED | {"bias": True}),
}  # fmt: skip
FAMILY_NAMES = tuple(MODELS)


def build(name: str, folder: Path, **overrides: Any) -> transformers.PreTrainedModel:
    """Make a model of MODELS, its config with `overrides`, save it in `folder` and return it (float32, eager
    attention).

    Norms and biases, which start as ones and zeros, are moved, so that forgetting one shows.
    """
    kind, sizes = MODELS[name]
    library: Any = minicpm_twin if kind == "MiniCPM" else transformers
    config = getattr(library, f"{kind}Config")(**(sizes | overrides))
    config._attn_implementation = "eager"
    suffix = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    torch.manual_seed(10)
    model = getattr(library, f"{kind}{suffix}")(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                spread = 0.1 if parameter_name.endswith("bias") else 0.3
                parameter += spread * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model
