"""Known shapes of models with recurrent states, as known_shapes.py has those of others. This file imports no
torch."""

from __future__ import annotations

from typing import Any


def _hybrid(
    architecture: str,
    model_type: str,
    hidden: int,
    layers: int,
    heads: tuple[int, int],
    ffn: int,
    vocab: int,
    **other: Any,
) -> dict[str, Any]:
    """`heads`: of queries, and of keys and values."""
    return {
        "architectures": [architecture], "model_type": model_type, "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads[0], "num_key_value_heads": heads[1],
        "intermediate_size": ffn, "vocab_size": vocab, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    } | other  # fmt: skip


def _delta(value_heads: int = 32, **other: Any) -> dict[str, Any]:
    """Gated DeltaNet in three of four layers."""
    return {
        "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": value_heads,
        "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    } | other  # fmt: skip


def _delta_experts(experts: int, chosen: int) -> dict[str, Any]:
    """The same with experts in all layers."""
    return _delta(
        moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts=experts,
        num_experts_per_tok=chosen, norm_topk_prob=True,
    )  # fmt: skip


def _qwen35(hidden: int, layers: int, heads: tuple[int, int], ffn: int, **other: Any) -> dict[str, Any]:
    return _hybrid(
        "Qwen3_5ForCausalLM", "qwen3_5_text", hidden, layers, heads, ffn, 248320, **_delta(**other)
    )


_QWEN35_27B = _qwen35(5120, 64, (24, 4), 17408, value_heads=48)


def _granite4(hidden: int, heads: tuple[int, int], width: int, **other: Any) -> dict[str, Any]:
    """Four of forty layers have attention, the others Mamba-2; `width` is an expert's."""
    kinds = ["attention" if index % 10 == 5 else "mamba" for index in range(40)]
    numbers = {
        "layer_types": kinds, "mamba_d_state": 128, "mamba_d_head": 64, "mamba_n_groups": 1,
        "mamba_expand": 2, "mamba_d_conv": 4, "rms_norm_eps": 1e-5, "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 16.0,
        "shared_intermediate_size": 2 * width, "position_embedding_type": "nope",
    }  # fmt: skip
    return _hybrid(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", hidden, 40, heads, width, 100352,
        **(numbers | {"tie_word_embeddings": True} | other),
    )  # fmt: skip


def _nemotron(pattern: str, hidden: int, heads: tuple[int, int], ffn: int, **other: Any) -> dict[str, Any]:
    """`pattern`: M is Mamba-2, * attention, - an mlp, E experts."""
    numbers = {
        "hybrid_override_pattern": pattern, "head_dim": 128, "ssm_state_size": 128, "n_groups": 8,
        "conv_kernel": 4, "mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5,
    }  # fmt: skip
    return _hybrid(
        "NemotronHForCausalLM", "nemotron_h", hidden, len(pattern), heads, ffn, 131072, **(numbers | other)
    )


def _lfm2(architecture: str, layers: int, attention: list[int], ffn: int, **other: Any) -> dict[str, Any]:
    kinds = ["full_attention" if index in attention else "conv" for index in range(layers)]
    numbers = {
        "layer_types": kinds, "conv_L_cache": 3, "conv_bias": False, "norm_eps": 1e-5, "rope_theta": 1e6,
        "max_position_embeddings": 128000, "tie_word_embeddings": True,
    }  # fmt: skip
    kind = "lfm2_moe" if "Moe" in architecture else "lfm2"
    return _hybrid(architecture, kind, 2048, layers, (32, 8), ffn, 65536, **(numbers | other))


def _kimi_linear() -> dict[str, Any]:
    """Every fourth layer and the last one have latent attention, the others Kimi Delta Attention. The sizes
    are those of transformers' default config."""
    attention = [*range(4, 27, 4), 27]
    return _hybrid(
        "KimiLinearForCausalLM", "kimi_linear", 2304, 27, (32, 32), 9216, 163840,
        max_position_embeddings=1048576, rms_norm_eps=1e-5, kv_lora_rank=512, q_lora_rank=None,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, mla_use_nope=True,
        linear_attn_config={
            "full_attn_layers": attention,
            "kda_layers": [layer for layer in range(1, 28) if layer not in attention],
            "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
        },
        num_experts=256, num_experts_per_token=8, num_shared_experts=1, moe_intermediate_size=1024,
        first_k_dense_replace=1, moe_layer_freq=1, num_expert_group=1, topk_group=1, moe_renormalize=True,
        moe_router_activation_func="sigmoid", routed_scaling_factor=2.446,
    )  # fmt: skip


def _ling3() -> dict[str, Any]:
    """Every sixth layer has latent attention, the others Kimi Delta Attention. The sizes are those of
    transformers' default config."""
    return _hybrid(
        "BailingHybridForCausalLM", "bailing_hybrid", 2560, 42, (32, 32), 6144, 157184,
        max_position_embeddings=262144, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, head_dim=128, short_conv_kernel_size=4, layer_group_size=6, kda_safe_gate=True,
        kda_lower_bound=-5.0, num_experts=512, num_experts_per_tok=8, n_shared_experts=1,
        moe_intermediate_size=768, first_k_dense_replace=2, n_group=8, topk_group=4, norm_topk_prob=True,
        routed_scaling_factor=2.5, rope_theta=6e6,
    )  # fmt: skip


HYBRIDS: dict[str, dict[str, Any]] = {
    "kimi-linear-48b-a3b": _kimi_linear(),
    "ling-3.0-flash": _ling3(),
    "qwen3-next-80b-a3b": _hybrid(
        "Qwen3NextForCausalLM", "qwen3_next", 2048, 48, (16, 2), 5120, 151936, **_delta_experts(512, 10)
    ),
    "qwen3.6-35b-a3b": _hybrid(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", 2048, 40, (16, 2), 512, 248320, **_delta_experts(256, 8)
    ),
    "qwen3.5-4b": _qwen35(2560, 32, (16, 4), 9216, tie_word_embeddings=True),
    "qwen3.5-9b": _qwen35(4096, 32, (16, 4), 12288),
    "qwen3.5-27b": _QWEN35_27B,
    "qwen3.6-27b": _QWEN35_27B,
    "qwen3.8-27b": _QWEN35_27B,
    "granite-4-h-tiny": _granite4(
        1536, (12, 4), 512, mamba_n_heads=48, num_local_experts=64, num_experts_per_tok=6
    ),
    "granite-4-h-small": _granite4(
        4096, (32, 8), 768, mamba_n_heads=128, num_local_experts=72, num_experts_per_tok=10
    ),
    "nemotron-nano-9b-v2": _nemotron(
        "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", 4480, (40, 8), 15680,
        mamba_num_heads=128, mamba_head_dim=80,
    ),
    "nemotron-3-nano-30b-a3b": _nemotron(
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", 2688, (32, 2), 1856,
        mamba_num_heads=64, mamba_head_dim=64, n_routed_experts=128, num_experts_per_tok=6,
        moe_intermediate_size=1856, n_shared_experts=1, moe_shared_expert_intermediate_size=3712,
        routed_scaling_factor=2.5,
    ),
    "lfm2-1.2b": _lfm2(
        "Lfm2ForCausalLM", 16, [2, 5, 8, 10, 12, 14], 12288,
        block_auto_adjust_ff_dim=True, block_multiple_of=256, block_ffn_dim_multiplier=1.0,
    ),
    "lfm2-8b-a1b": _lfm2(
        "Lfm2MoeForCausalLM", 24, [2, 6, 10, 14, 18, 21], 7168,
        moe_intermediate_size=1792, num_dense_layers=2, num_experts=32, num_experts_per_tok=4,
        use_expert_bias=True, norm_topk_prob=True,
    ),
}  # fmt: skip
HYBRID_REPOSITORIES = {
    "kimi-linear-48b-a3b": "moonshotai/Kimi-Linear-48B-A3B-Instruct",
    "ling-3.0-flash": "inclusionAI/Ling-3.0-Flash",
    "qwen3-next-80b-a3b": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "qwen3.6-35b-a3b": "Qwen/Qwen3.6-35B-A3B",
    "qwen3.5-4b": "Qwen/Qwen3.5-4B",
    "qwen3.5-9b": "Qwen/Qwen3.5-9B",
    "qwen3.5-27b": "Qwen/Qwen3.5-27B",
    "qwen3.6-27b": "Qwen/Qwen3.6-27B",
    "qwen3.8-27b": "Qwen/Qwen3.8-27B",
    "granite-4-h-tiny": "ibm-granite/granite-4.0-h-tiny",
    "granite-4-h-small": "ibm-granite/granite-4.0-h-small",
    "nemotron-nano-9b-v2": "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
    "nemotron-3-nano-30b-a3b": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "lfm2-1.2b": "LiquidAI/LFM2-1.2B",
    "lfm2-8b-a1b": "LiquidAI/LFM2-8B-A1B",
}
