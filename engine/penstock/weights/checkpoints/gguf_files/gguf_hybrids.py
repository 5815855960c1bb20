"""Hybrids in GGUF files: Gated DeltaNet, Mamba-2 or a short convolution in most layers, attention in the
others. A layer's tensors tell its kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CorruptFile
from penstock.weights.checkpoints.gguf_files.gguf_architecture import (
    Architecture,
    Rule,
    Stored,
    joined,
    part,
    reshaped,
    whole,
)
from penstock.weights.checkpoints.gguf_files.gguf_dense import granite_config
from penstock.weights.checkpoints.gguf_files.gguf_mixtures import (
    QWEN_NAMES,
    SHARED_GATE,
    UP,
    MixtureFile,
    sigmoid_config,
)
from penstock.weights.checkpoints.gguf_files.gguf_numbers import Numbers
from penstock.weights.checkpoints.gguf_files.gguf_rows import Matrix, made_of
from penstock.weights.checkpoints.tensor_entry import TensorEntry


def _log_of_negative(rows: Tensor) -> Tensor:
    """A_log of what the file has, -exp(A_log)."""
    return (-rows).log()


def _kinds(numbers: Numbers, words: Mapping[str, str]) -> list[str]:
    """The kind of each layer, by a weight that only such layers have. Raises CorruptFile."""
    found = []
    for layer in range(numbers.num_layers):
        kind = next((kind for word, kind in words.items() if numbers.has(layer, word)), None)
        if kind is None:
            raise CorruptFile(
                f"{numbers.path} has no {' or '.join(words)} in layer {layer}; download it again"
            )
        found.append(kind)
    return found


# ---- Gated DeltaNet


def _delta_config(numbers: Numbers) -> dict[str, Any]:
    numbers.get("full_attention_interval")
    numbers.get("nextn_predict_layers")
    values = numbers.integer("ssm.time_step_rank")
    return {
        "linear_num_key_heads": numbers.integer("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": numbers.integer("ssm.state_size"),
        "linear_value_head_dim": numbers.integer("ssm.inner_size") // values,
        "linear_conv_kernel_dim": numbers.integer("ssm.conv_kernel"),
        "layer_types": _kinds(numbers, {"ssm_out": "linear_attention", "attn_q": "full_attention"}),
        "attention_bias": any(name.endswith("attn_q.bias") for name in numbers.tensors),
    }


def _qwen35_config(numbers: Numbers) -> dict[str, Any]:
    kind = "qwen3_5_moe_text" if numbers.architecture == "qwen35moe" else "qwen3_5_text"
    return _delta_config(numbers) | {"model_type": kind}


def _shared_config(numbers: Numbers) -> dict[str, Any]:
    width = _shared_width(numbers)
    if not width:
        raise CorruptFile(f"{numbers.path} has no ffn_up_shexp.weight; download it again")
    return {
        "shared_expert_intermediate_size": width,
        "norm_topk_prob": bool(numbers.get("expert_weights_norm", True)),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _shared_width(numbers: Numbers) -> int:
    """The inner width of the shared expert; 0: there is none."""
    found = (each for name, each in numbers.tensors.items() if name.endswith("ffn_up_shexp.weight"))
    shared = next(found, None)
    return shared.shape[0] if shared is not None else 0


def _value_heads(numbers: Numbers) -> Tensor:
    """Qwen3.5's heads of v: those of a key head follow each other in the model's own code; in the file, the
    first heads of all key heads come first."""
    keys, values = numbers.integer("ssm.group_count"), numbers.integer("ssm.time_step_rank")
    if values % keys:
        raise CorruptFile(f"{numbers.path} has {values} heads of v for {keys} of k; download it again")
    return torch.arange(values).view(-1, keys).T.flatten()


def _value_rows(numbers: Numbers, num_rows: int) -> Tensor:
    """The rows of heads of v, behind rows of q and k where there are more."""
    heads = _value_heads(numbers)
    size = numbers.integer("ssm.inner_size") if num_rows >= numbers.integer("ssm.inner_size") else len(heads)
    before = num_rows - size
    behind = before + torch.arange(size).view(len(heads), -1)[heads].flatten()
    return torch.cat((torch.arange(before), behind))


def _value_columns(stored: Stored) -> Iterator[TensorEntry]:
    matrix = Matrix((stored.entry,), columns=_value_heads(stored.numbers))
    yield made_of(stored.name("linear_attn.out_proj"), matrix)


def _of_values(name: str, change: Any = None, is_conv: bool = False) -> Rule:
    """A tensor of heads of v, whose name is no module's."""

    def rule(stored: Stored) -> Iterator[TensorEntry]:
        entry = stored.entry
        rows = _value_rows(stored.numbers, entry.shape[0])
        entry = reshaped(entry, entry.shape[0], 1, -1) if is_conv else entry
        yield made_of(stored.prefix + name, Matrix((entry,), rows), change)

    return rule


def _conv(name: str) -> Rule:
    """The weight [channels, width] of a convolution, which the model's own code has as [channels, 1, width];
    or its bias."""

    def rule(stored: Stored) -> Iterator[TensorEntry]:
        entry = stored.entry
        is_bias = stored.kind == "bias"
        entry = entry if is_bias else reshaped(entry, entry.shape[0], 1, -1)
        yield made_of(stored.name(name), Matrix((entry,)))

    return rule


def _grouped(stored: Stored) -> Iterator[TensorEntry]:
    """Qwen3-Next's q, k, v and gate of each key head together."""
    if stored.numbers.has(stored.layer or 0, "attn_q"):
        return
    numbers, gate = stored.numbers, stored.partner("attn_gate")
    keys, rows = numbers.integer("ssm.group_count"), torch.arange(stored.entry.shape[0] + gate.shape[0])
    num_keys = keys * numbers.integer("ssm.state_size")
    sizes = (num_keys, num_keys, stored.entry.shape[0] - 2 * num_keys, gate.shape[0])
    parts = [rows_of.view(keys, -1) for rows_of in rows.split_with_sizes(sizes)]
    matrix = Matrix((stored.entry, gate), torch.cat(parts, dim=1).flatten())
    yield made_of(stored.name("linear_attn.in_proj_qkvz"), matrix)


_NEXTN: dict[str, str | Rule] = {
    "nextn.eh_proj": lambda stored: _extra(stored, "mtp.fc"),
    "nextn.enorm": lambda stored: _extra(stored, "mtp.pre_fc_norm_embedding", 1.0),
    "nextn.hnorm": lambda stored: _extra(stored, "mtp.pre_fc_norm_hidden", 1.0),
    "nextn.shared_head_norm": lambda stored: _extra(stored, "mtp.norm", 1.0),
}


def _extra(stored: Stored, module: str, offset: float = 0.0) -> Iterator[TensorEntry]:
    """A module of the head that guesses, outside of its layer."""
    change = (lambda rows: rows - offset) if offset else None
    yield made_of(f"{module}.weight", Matrix((stored.entry,)), change)


_QWEN_NORM: dict[str, str | Rule] = {"post_attention_norm": "post_attention_layernorm"}
_QWEN3NEXT: dict[str, str | Rule] = _QWEN_NORM | {
    "attn_qkv": _grouped, "attn_gate": lambda stored: iter(()), "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba", "ssm_conv1d": _conv("linear_attn.conv1d"),
    "ssm_dt": whole("linear_attn.dt_bias"), "ssm_a": whole("linear_attn.A_log", _log_of_negative),
    "ssm_norm": whole("linear_attn.norm.weight"), "ssm_out": "linear_attn.out_proj",
}  # fmt: skip
_QWEN35: dict[str, str | Rule] = _QWEN_NORM | _NEXTN | {
    "attn_qkv": part("linear_attn.in_proj_qkv", _value_rows),
    "attn_gate": part("linear_attn.in_proj_z", _value_rows),
    "ssm_alpha": part("linear_attn.in_proj_a", _value_rows),
    "ssm_beta": part("linear_attn.in_proj_b", _value_rows),
    "ssm_conv1d": _of_values("linear_attn.conv1d.weight", is_conv=True),
    "ssm_dt": _of_values("linear_attn.dt_bias"),
    "ssm_a": _of_values("linear_attn.A_log", _log_of_negative),
    "ssm_norm": whole("linear_attn.norm.weight"), "ssm_out": _value_columns,
}  # fmt: skip
_QWEN_EXPERTS = MixtureFile(
    _shared_config, names=QWEN_NAMES, whole_names={SHARED_GATE: "mlp.shared_expert_gate.weight"}
)
_QWEN35_DENSE = Architecture(
    "Qwen3_5", _qwen35_config, _QWEN35, norm_offset=1.0, rotates_part=True, guessing="mtp.layers."
)


# ---- Mamba-2


def _mamba_names(part_name: str) -> dict[str, str | Rule]:
    return {
        "ssm_in": f"{part_name}in_proj", "ssm_conv1d": _conv(f"{part_name}conv1d"),
        "ssm_dt": whole(f"{part_name}dt_bias"), "ssm_a": whole(f"{part_name}A_log", _log_of_negative, -1),
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
    kinds = _kinds(numbers, {"ssm_in": "linear_attention", "attn_q": "full_attention"})
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
    mamba, kinds = _mamba_config(numbers), _kinds(numbers, _NEMOTRON_KINDS)
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
        "moe_shared_expert_intermediate_size": _shared_width(numbers) or 1,
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
_GRANITE_EXPERTS = MixtureFile(
    lambda numbers: {},
    "block_sparse_moe.experts.",
    names={
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_gate_shexp": joined("shared_mlp.input_linear", "ffn_gate_shexp", "ffn_up_shexp"),
        "ffn_up_shexp": joined("shared_mlp.input_linear", "ffn_gate_shexp", "ffn_up_shexp"),
        "ffn_down_shexp": "shared_mlp.output_linear",
    },
)


# ---- short convolutions


def _lfm2_config(numbers: Numbers) -> dict[str, Any]:
    kinds = _kinds(numbers, {"shortconv.in_proj": "conv", "attn_q": "full_attention"})
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
        "shortconv.in_proj": "conv.in_proj", "shortconv.conv": _conv("conv.conv"),
        "shortconv.out_proj": "conv.out_proj", "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
    },
)  # fmt: skip
#: By llama.cpp's name of the architecture.
HYBRIDS = {
    "qwen35": _QWEN35_DENSE,
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
HYBRID_MIXTURES = {
    "qwen3next": Architecture(
        "Qwen3Next",
        lambda numbers: {"model_type": "qwen3_next"} | _delta_config(numbers),
        _QWEN3NEXT,
        norm_offset=1.0,
        rotates_part=True,
        mixture=_QWEN_EXPERTS,
    ),
    "qwen35moe": replace(_QWEN35_DENSE, model="Qwen3_5Moe", mixture=_QWEN_EXPERTS),
    "granitehybrid": replace(_GRANITE_HYBRID, mixture=_GRANITE_EXPERTS),
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
