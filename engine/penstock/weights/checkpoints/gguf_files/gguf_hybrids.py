"""Hybrids in GGUF files: Mamba-2 or a short convolution in most layers, attention in the others. A layer's
tensors tell its kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.weights.checkpoints.gguf_files.gguf_architecture import (
    Architecture,
    Rule,
    convolution,
    joined,
    log_of_negative,
    whole,
)
from penstock.weights.checkpoints.gguf_files.gguf_deltas import DELTA_MIXTURES, DELTAS
from penstock.weights.checkpoints.gguf_files.gguf_dense import granite_config
from penstock.weights.checkpoints.gguf_files.gguf_mixture_file import (
    UP,
    MixtureFile,
    shared_width,
    sigmoid_config,
)
from penstock.weights.checkpoints.gguf_files.gguf_mixtures import GRANITE_EXPERTS
from penstock.weights.checkpoints.gguf_files.gguf_numbers import Numbers

# ---- Mamba-2


def _mamba_names(part_name: str) -> dict[str, str | Rule]:
    return {
        "ssm_in": f"{part_name}in_proj", "ssm_conv1d": convolution(f"{part_name}conv1d"),
        "ssm_dt": whole(f"{part_name}dt_bias"), "ssm_a": whole(f"{part_name}A_log", log_of_negative, -1),
        "ssm_d": whole(f"{part_name}D", None, -1), "ssm_norm": whole(f"{part_name}norm.weight", None, -1),
        "ssm_out": f"{part_name}out_proj",
    }  # fmt: skip


def _mamba_config(numbers: Numbers) -> dict[str, Any]:
    heads, width = numbers.integer("ssm.time_step_rank"), numbers.integer("ssm.inner_size")
    first = next((index for index in range(numbers.num_layers) if numbers.has(index, "ssm_in")), 0)
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": width // heads,
        "mamba_n_groups": numbers.integer("ssm.group_count"),
        "mamba_d_state": numbers.integer("ssm.state_size"),
        "mamba_d_conv": numbers.integer("ssm.conv_kernel"),
        "mamba_expand": width / numbers.integer("embedding_length"),
        "mamba_proj_bias": f"blk.{first}.ssm_in.bias" in numbers.tensors,
        "mamba_conv_bias": f"blk.{first}.ssm_conv1d.bias" in numbers.tensors,
    }


def _granite_config(numbers: Numbers) -> dict[str, Any]:
    kinds = numbers.layer_kinds({"ssm_in": "linear_attention", "attn_q": "full_attention"})
    word = "ffn_up_shexp" if numbers.get("expert_count") else "ffn_up"
    up = numbers.tensors.get(f"blk.0.{word}.weight")
    has_rope = bool(numbers.get("rope.scaling.finetuned", True))
    numbers.get("expert_used_count")  # which dense models may have, too
    expand = _mamba_config(numbers)
    return granite_config(numbers) | expand | {
        "model_type": "granitemoehybrid",
        "mamba_expand": int(expand["mamba_expand"]),
        "layer_types": kinds,
        "shared_intermediate_size": up.shape[0] if up is not None else 0,
        "num_local_experts": int(numbers.get("expert_count", 0)),
        "position_embedding_type": "rope" if has_rope else None,
        "attention_bias": any(name.endswith("attn_q.bias") for name in numbers.tensors),
    }  # fmt: skip


def _falcon_h1_config(numbers: Numbers) -> dict[str, Any]:
    """The converter has multiplied the tensors by Falcon-H1's factors."""
    numbers.get("ssm.group_count")
    return _mamba_config(numbers) | {
        "mamba_d_ssm": numbers.integer("ssm.inner_size"),
        "mamba_expand": 2,
        "mamba_rms_norm": numbers.has(0, "ssm_norm"),
        "mamba_norm_before_gate": False,
        "projectors_bias": "blk.0.ssm_out.bias" in numbers.tensors,
        "attention_bias": "blk.0.attn_q.bias" in numbers.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in numbers.tensors,
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
    } | {
        f"{name}_multiplier": 1.0
        for name in (
            "attention_in", "attention_out", "embedding", "key", "lm_head", "ssm_in", "ssm_out",
        )
    }  # fmt: skip


_NEMOTRON_KINDS = {
    "ssm_in": "linear_attention", "attn_q": "full_attention", UP: "moe", "ffn_up": "mlp",
}  # fmt: skip


def _nemotron_config(numbers: Numbers) -> dict[str, Any]:
    mamba, kinds = _mamba_config(numbers), numbers.layer_kinds(_NEMOTRON_KINDS)
    bias = any(name.endswith("ffn_up.bias") for name in numbers.tensors)
    for name in ("expert_count", "expert_used_count", "expert_group_count", "expert_group_used_count"):
        numbers.get(name)
    return {
        "model_type": "nemotron_h",
        "layers_block_type": kinds,
        "layer_norm_epsilon": numbers.real("attention.layer_norm_rms_epsilon"),
        "mamba_num_heads": mamba["mamba_n_heads"],
        "mamba_head_dim": mamba["mamba_d_head"],
        "n_groups": mamba["mamba_n_groups"],
        "ssm_state_size": mamba["mamba_d_state"],
        "conv_kernel": mamba["mamba_d_conv"],
        "expand": 2,
        "use_bias": mamba["mamba_proj_bias"],
        "use_conv_bias": mamba["mamba_conv_bias"],
        "attention_bias": any(name.endswith("attn_q.bias") for name in numbers.tensors),
        "mlp_bias": bias,
        "intermediate_size": numbers.tensors[f"blk.{kinds.index('mlp')}.ffn_up.weight"].shape[0]
        if "mlp" in kinds
        else numbers.integer("expert_feed_forward_length", 1),
    }


def _nemotron_mixture(numbers: Numbers) -> dict[str, Any]:
    latent = numbers.get("moe_latent_size")
    return sigmoid_config(numbers) | {
        "moe_shared_expert_intermediate_size": shared_width(numbers) or 1,
        "norm_topk_prob": bool(numbers.get("expert_weights_norm", True)),
        "moe_latent_size": latent,
    }


_NEMOTRON: dict[str, str | Rule] = _mamba_names("mixer.") | {
    "token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "attn_norm": "norm",
    "attn_q": "mixer.q_proj", "attn_k": "mixer.k_proj", "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj", "ffn_latent_up": "mixer.fc2_latent_proj",
}  # fmt: skip
_NEMOTRON_H = Architecture(
    "NemotronH", _nemotron_config, _NEMOTRON, rotates_part=True, layers="backbone.layers."
)
_NEMOTRON_EXPERTS = MixtureFile(
    _nemotron_mixture,
    "mixer.experts.",
    names={
        "ffn_gate_inp": "mixer.gate", "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
    },
    whole_names={"exp_probs_b": "mixer.gate.e_score_correction_bias"},
    scores=None,
)  # fmt: skip
_GRANITE_HYBRID = Architecture(
    "GraniteMoeHybrid",
    _granite_config,
    _mamba_names("mamba.")
    | {
        "ffn_gate": joined("shared_mlp.input_linear", "ffn_gate", "ffn_up"),
        "ffn_up": joined("shared_mlp.input_linear", "ffn_gate", "ffn_up"),
        "ffn_down": "shared_mlp.output_linear",
    },
    exchanges_rows=True,
)


# ---- short convolutions


def _lfm2_config(numbers: Numbers) -> dict[str, Any]:
    kinds = numbers.layer_kinds({"shortconv.in_proj": "conv", "attn_q": "full_attention"})
    return {
        "norm_eps": numbers.real("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": numbers.integer("shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.in_proj.bias") for name in numbers.tensors),
        "block_auto_adjust_ff_dim": False,
        "intermediate_size": numbers.largest("feed_forward_length"),
        "layer_types": kinds,
        "tie_embedding": "output.weight" not in numbers.tensors,
    }


def _lfm2moe_config(numbers: Numbers) -> dict[str, Any]:
    return {
        "model_type": "lfm2_moe",
        "num_dense_layers": int(numbers.get("leading_dense_block_count", 0)),
        "norm_topk_prob": bool(numbers.get("expert_weights_norm", True)),
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in numbers.tensors),
        "routed_scaling_factor": numbers.real("expert_weights_scale", 1.0),
    }


_LFM2 = Architecture(
    "Lfm2",
    _lfm2_config,
    {
        "token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm",
        "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm",
        "shortconv.in_proj": "conv.in_proj", "shortconv.conv": convolution("conv.conv"),
        "shortconv.out_proj": "conv.out_proj", "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
    },
)  # fmt: skip
#: By llama.cpp's name of the architecture.
HYBRIDS = DELTAS | {
    "granitehybrid": _GRANITE_HYBRID,
    "nemotron_h": _NEMOTRON_H,
    "falcon-h1": Architecture(
        "FalconH1",
        _falcon_h1_config,
        _mamba_names("mamba.")
        | {
            "output_norm": "model.final_layernorm", "ffn_norm": "pre_ff_layernorm",
            "ffn_gate": "feed_forward.gate_proj", "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
        },
    ),
    "lfm2": _LFM2,
}  # fmt: skip
HYBRIDS["nemotron_h_moe"] = HYBRIDS["nemotron_h"]
HYBRID_MIXTURES = DELTA_MIXTURES | {
    "granitehybrid": replace(_GRANITE_HYBRID, mixture=GRANITE_EXPERTS),
    "nemotron_h_moe": replace(_NEMOTRON_H, mixture=_NEMOTRON_EXPERTS),
    "lfm2moe": replace(
        _LFM2,
        model="Lfm2Moe",
        mixture=MixtureFile(
            _lfm2moe_config,
            "feed_forward.experts.",
            ("w1", "w3", "w2"),
            {"ffn_gate_inp": "feed_forward.gate"},
            {"exp_probs_b": "feed_forward.expert_bias"},
            scores=2,
        ),
    ),
}
