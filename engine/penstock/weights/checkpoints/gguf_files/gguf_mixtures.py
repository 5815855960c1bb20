"""Architectures of GGUF files with experts and attention of the usual kind."""

from __future__ import annotations

from typing import Any

from penstock.errors import CorruptFile
from penstock.weights.checkpoints.gguf_files.gguf_architecture import Architecture, Rule, joined, reshaped
from penstock.weights.checkpoints.gguf_files.gguf_dense import granite_config, llama_config
from penstock.weights.checkpoints.gguf_files.gguf_keys import check_same
from penstock.weights.checkpoints.gguf_files.gguf_mixture_file import (
    DEEPSEEK_NAMES,
    QWEN_NAMES,
    SHARED_GATE,
    SIGMOID,
    SOFTMAX_OF_CHOSEN,
    MixtureFile,
    shared_width,
    sigmoid_config,
)
from penstock.weights.checkpoints.gguf_files.gguf_numbers import Numbers, window_layers
from penstock.weights.checkpoints.gguf_files.gguf_rows import renamed


def _dense_width(numbers: Numbers) -> dict[str, Any]:
    """The width of layers without experts."""
    return {"intermediate_size": numbers.largest("feed_forward_length", 1)}


def _qwen3_config(numbers: Numbers) -> dict[str, Any]:
    numbers.get("n_deepstack_layers")  # says where images come in
    # llama.cpp takes these for granted.
    return _norm(numbers, True) | {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": []}


def _qwen2_config(numbers: Numbers) -> dict[str, Any]:
    shared = numbers.tensors.get("blk.0.ffn_up_shexp.weight")
    if shared is None or len(shared.shape) != 2:
        raise CorruptFile(f"{numbers.path} has no blk.0.ffn_up_shexp.weight; download it again")
    return _qwen3_config(numbers) | {
        **_norm(numbers, False),
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": shared.shape[0],
        "qkv_bias": "blk.0.attn_q.bias" in numbers.tensors,
    }


def _norm(numbers: Numbers, usual: bool) -> dict[str, Any]:
    """Whether the weights of a token's experts add up to one."""
    return {"norm_topk_prob": bool(numbers.get("expert_weights_norm", usual))}


def _mixtral_config(numbers: Numbers) -> dict[str, Any]:
    check_same(numbers, "expert_weights_norm", True, "the weights of a token's experts add up to one here")
    return {"model_type": "mixtral", "sliding_window": None}


def _olmoe_config(numbers: Numbers) -> dict[str, Any]:
    return _norm(numbers, False) | {"clip_qkv": numbers.get("attention.clamp_kqv")}


def _gpt_oss_config(numbers: Numbers) -> dict[str, Any]:
    window = numbers.integer("attention.sliding_window")
    return {
        "attention_bias": True,
        "sliding_window": window,
        "layer_types": window_layers(numbers, 2, window),
    }


def _glm4moe_config(numbers: Numbers) -> dict[str, Any]:
    return sigmoid_config(numbers) | _dense_width(numbers) | {
        "model_type": "glm4_moe",
        "use_qk_norm": numbers.has(0, "attn_q_norm"),
        "attention_bias": "blk.0.attn_q.bias" in numbers.tensors,
        "num_nextn_predict_layers": int(numbers.get("nextn_predict_layers", 0)),
    }  # fmt: skip


def _dots1_config(numbers: Numbers) -> dict[str, Any]:
    own = {"sliding_window": None, "attention_bias": "blk.0.attn_q.bias" in numbers.tensors}
    return sigmoid_config(numbers) | _dense_width(numbers) | own


def _hy_v3_config(numbers: Numbers) -> dict[str, Any]:
    for name in ("leading_dense_block_count", "expert_shared_count"):
        numbers.get(name)
    check_same(numbers, "expert_weights_norm", True, "the weights of a token's experts add up to one here")
    return _dense_width(numbers) | {
        "mlp_layer_types": numbers.layer_kinds({"ffn_gate_inp": "sparse", "ffn_up": "dense"}),
        "num_shared_experts": shared_width(numbers) // numbers.integer("expert_feed_forward_length"),
        "router_scaling_factor": numbers.real("expert_weights_scale", 1.0),
        "num_nextn_predict_layers": int(numbers.get("nextn_predict_layers", 0)),
    }


def _minimax_config(numbers: Numbers) -> dict[str, Any]:
    head_dim = numbers.head_dim
    return {
        "rotary_dim": numbers.integer("rope.dimension_count", head_dim),
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
    }


def _ernie_config(numbers: Numbers) -> dict[str, Any]:
    for name in ("expert_shared_feed_forward_length", "expert_weights_scale"):
        numbers.get(name)
    return _dense_width(numbers) | {
        "moe_num_experts": numbers.integer("expert_count"),
        "moe_k": numbers.integer("expert_used_count"),
        "moe_num_shared_experts": int(numbers.get("expert_shared_count", 0)),
        "moe_layer_start_index": int(numbers.get("leading_dense_block_count", 0)),
        "moe_layer_interval": numbers.integer("interleave_moe_layer_step", 1),
        "moe_layer_end_index": -1,
        "use_bias": False,
    }  # fmt: skip


def _hunyuan_config(numbers: Numbers) -> dict[str, Any]:
    shared = numbers.integer("expert_shared_count", 1)
    width = numbers.integer("expert_shared_feed_forward_length", numbers.integer("feed_forward_length"))
    return {
        "model_type": "hunyuan_v1_moe",
        "intermediate_size": width // shared if width % shared == 0 and shared > 1 else width,
        "moe_topk": numbers.integer("expert_used_count"),
        "num_shared_expert": shared,
        "use_qk_norm": True,
        "moe_layer_num_skipped": 0,
    }


def _phimoe_config(numbers: Numbers) -> dict[str, Any]:
    original = numbers.integer("rope.scaling.original_context_length", 0)
    return {
        "attention_bias": any(f"blk.0.attn_{name}.bias" in numbers.tensors for name in ("q", "qkv")),
        "lm_head_bias": "output.bias" in numbers.tensors,
        "sliding_window": numbers.integer("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": original or numbers.integer("context_length"),
    }


def _llama4_config(numbers: Numbers) -> dict[str, Any]:
    """What files leave out, llama.cpp knows: windows of 8192 tokens and their period, and no norms of q and
    k in the model of 128 experts."""
    layers, count = numbers.num_layers, numbers.integer("expert_count")
    kinds = window_layers(numbers, 4, 1)
    has_chunks = numbers.get("attention.sliding_window", 8192) != 0
    return {
        "model_type": "llama4_text",
        "intermediate_size_mlp": numbers.largest("feed_forward_length"),
        "intermediate_size": numbers.integer("expert_feed_forward_length"),
        "interleave_moe_layer_step": numbers.integer("interleave_moe_layer_step", 1),
        "no_rope_layers": [int(not has_chunks or kind == "sliding_attention") for kind in kinds],
        "attention_chunk_size": 8192 if has_chunks else None,
        "attn_temperature_tuning": has_chunks,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "use_qk_norm": count != 128,
        "layer_types": [
            "chunked_attention" if has_chunks and kind == "sliding_attention" else "full_attention"
            for kind in kinds[:layers]
        ],
    }


def _granitemoe_config(numbers: Numbers) -> dict[str, Any]:
    """Where there is a shared expert, the model is Granite 4 without recurrent layers."""
    found = llama_config(numbers) | granite_config(numbers)
    shared = numbers.tensors.get("blk.0.ffn_up_shexp.weight")
    if shared is None:
        return found
    return found | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "shared_intermediate_size": shared.shape[0],
        "layer_types": ["full_attention"] * numbers.num_layers,
        "position_embedding_type": "rope",
    }


#: Experts of Granite, and the shared one of some models.
GRANITE_EXPERTS = MixtureFile(
    lambda numbers: {},
    "block_sparse_moe.experts.",
    names={
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_gate_shexp": joined("shared_mlp.input_linear", "ffn_gate_shexp", "ffn_up_shexp"),
        "ffn_up_shexp": joined("shared_mlp.input_linear", "ffn_gate_shexp", "ffn_up_shexp"),
        "ffn_down_shexp": "shared_mlp.output_linear",
    },
)
_MIXTRAL_EXPERTS = ("w1", "w3", "w2")
_BLOCK_SPARSE = "block_sparse_moe.experts."
_QWEN3 = MixtureFile(_qwen3_config, names=QWEN_NAMES)
_CORRECTED = {"exp_probs_b": "mlp.gate.e_score_correction_bias"}
#: Heads as GLM-4.5 has them, that guess further tokens: after the layers, under names of their own.
NEXTN: dict[str, str | Rule] = {
    "nextn.eh_proj": "eh_proj", "nextn.enorm": "enorm", "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens", "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
}  # fmt: skip
_AFTER = {"post_attention_norm": "post_attention_layernorm"}
#: By llama.cpp's name of the architecture.
MIXTURES = {
    "llama": Architecture(
        "Mixtral",
        exchanges_rows=True,
        mixture=MixtureFile(
            _mixtral_config, _BLOCK_SPARSE, _MIXTRAL_EXPERTS, {"ffn_gate_inp": "block_sparse_moe.gate"}
        ),
    ),
    "qwen2moe": Architecture(
        "Qwen2Moe",
        mixture=MixtureFile(
            _qwen2_config, names=QWEN_NAMES, whole_names={SHARED_GATE: "mlp.shared_expert_gate.weight"}
        ),
    ),
    "qwen3moe": Architecture("Qwen3Moe", mixture=_QWEN3),
    "qwen3vlmoe": Architecture("Qwen3Moe", mixture=_QWEN3),
    "olmoe": Architecture("Olmoe", mixture=MixtureFile(_olmoe_config, names=QWEN_NAMES)),
    "gpt-oss": Architecture(
        "GptOss",
        names=_AFTER,
        mixture=MixtureFile(
            _gpt_oss_config,
            names={"ffn_gate_inp": "mlp.router"},
            whole_names={"attn_sinks": "self_attn.sinks"},
            has_turns=True,
            scores=SOFTMAX_OF_CHOSEN,
            rope={"truncate": False},
        ),
    ),
    "granitemoe": Architecture(
        "GraniteMoe",
        _granitemoe_config,
        exchanges_rows=True,
        mixture=GRANITE_EXPERTS,
    ),
    "glm4moe": Architecture(
        "Glm4Moe",
        names=_AFTER | NEXTN,
        rotates_part=True,
        mixture=MixtureFile(_glm4moe_config, names=DEEPSEEK_NAMES, whole_names=_CORRECTED, scores=None),
    ),
    "dots1": Architecture(
        "Dots1",
        mixture=MixtureFile(_dots1_config, names=DEEPSEEK_NAMES, whole_names=_CORRECTED, scores=None),
    ),
    "minimax-m2": Architecture(
        "MiniMaxM2",
        rotates_part=True,
        mixture=MixtureFile(
            _minimax_config,
            _BLOCK_SPARSE,
            _MIXTRAL_EXPERTS,
            {"ffn_gate_inp": "block_sparse_moe.gate"},
            {"exp_probs_b": "block_sparse_moe.e_score_correction_bias"},
            scores=SIGMOID,
        ),
    ),
    "hy_v3": Architecture(
        "HYV3",
        names=NEXTN | {"nextn.shared_head_norm": "final_layernorm"},
        mixture=MixtureFile(
            _hy_v3_config,
            names={
                "ffn_gate_inp": "mlp.router.gate", "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
                "ffn_up_shexp": "mlp.shared_mlp.up_proj", "ffn_down_shexp": "mlp.shared_mlp.down_proj",
            },
            whole_names={"exp_probs_b": "mlp.expert_bias"},
            scores=SIGMOID,
        ),
    ),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_Moe",
        names={
            "exp_probs_b": lambda stored: iter(
                (
                    renamed(
                        f"{stored.prefix}mlp.moe_statics.e_score_correction_bias",
                        reshaped(stored.entry, 1, -1),
                    ),
                )
            )
        },
        mixture=MixtureFile(_ernie_config, names=DEEPSEEK_NAMES),
    ),
    "hunyuan-moe": Architecture(
        "HunYuanMoEV1",
        names={"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
        mixture=MixtureFile(
            _hunyuan_config,
            names={
                "ffn_gate_inp": "mlp.gate.wg", "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
                "ffn_up_shexp": "mlp.shared_mlp.up_proj", "ffn_down_shexp": "mlp.shared_mlp.down_proj",
            },
        ),
    ),
    "phimoe": Architecture(
        "Phimoe",
        mixture=MixtureFile(
            _phimoe_config, _BLOCK_SPARSE, _MIXTRAL_EXPERTS, {"ffn_gate_inp": "block_sparse_moe.gate"}
        ),
    ),
    "llama4": Architecture(
        "Llama4",
        names={
            "ffn_gate": "feed_forward.gate_proj", "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
        },
        mixture=MixtureFile(
            _llama4_config,
            "feed_forward.experts.",
            names={
                "ffn_gate_inp": "feed_forward.router",
                "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
                "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
                "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
            },
            scores=SIGMOID,
        ),
    ),
}  # fmt: skip
