"""Gemma 1 to 4 in GGUF files. Norms of the first three have 1 added; later files have them as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from penstock.errors import UnsupportedModel
from penstock.weights.checkpoints.gguf_files.gguf_architecture import Architecture, Rule, Stored, whole
from penstock.weights.checkpoints.gguf_files.gguf_mixture_file import MixtureFile
from penstock.weights.checkpoints.gguf_files.gguf_numbers import Numbers, window_layers
from penstock.weights.checkpoints.gguf_files.gguf_rope import read_rope
from penstock.weights.checkpoints.gguf_files.gguf_rows import read_vector, renamed
from penstock.weights.checkpoints.tensor_entry import TensorEntry

FOUR_NORMS: dict[str, str | Rule] = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
#: A factor of rope's frequencies that stands for no rotation, at least.
NO_ROTATION = 1e10


def _stack(module: str) -> Rule:
    """Modules that lie in one tensor of three axes."""

    def rule(stored: Stored) -> Iterator[TensorEntry]:
        entry, count = stored.entry, stored.entry.shape[0]
        size = entry.num_bytes // count
        for index in range(count):
            one = replace(entry, shape=entry.shape[1:], offset=entry.offset + index * size, num_bytes=size)
            yield renamed(f"{module}.{index}.weight", one)

    return rule


def _gemma_config(numbers: Numbers) -> dict[str, Any]:
    return {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}


def _gemma2_config(numbers: Numbers) -> dict[str, Any]:
    # Only the 27B models, of Gemma 2 and of 3, have another scale than their heads'. llama.cpp tells them by
    # the number of layers, too.
    is_27b = numbers.integer("block_count") == (62 if numbers.architecture == "gemma3" else 46)
    width = numbers.integer("embedding_length") // numbers.num_heads if is_27b else numbers.head_dim
    usual = 4096 if numbers.architecture == "gemma2" else 0
    window = numbers.integer("attention.sliding_window", usual)
    return {
        "query_pre_attn_scalar": width,
        "attn_logit_softcapping": numbers.real("attn_logit_softcapping", 0.0) or None,
        "final_logit_softcapping": numbers.real("final_logit_softcapping", 0.0) or None,
        "sliding_window": window or numbers.integer("context_length"),  # which no layer has then
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": window_layers(numbers, 2, window),
    }


def _gemma3_config(numbers: Numbers) -> dict[str, Any]:
    window = numbers.integer("attention.sliding_window", 0)
    return _gemma2_config(numbers) | {
        "model_type": "gemma3_text",
        "rope_parameters": _two_ropes(numbers, read_rope(numbers)),
        "layer_types": window_layers(numbers, 6, window),
    }


def _two_ropes(numbers: Numbers, full: dict[str, Any]) -> dict[str, Any]:
    own = {"rope_type": "default", "rope_theta": numbers.real("rope.freq_base_swa", 10000.0)}
    return {"full_attention": full, "sliding_attention": own}


def _gemma3n_config(numbers: Numbers) -> dict[str, Any]:
    window, count = numbers.integer("attention.sliding_window"), numbers.num_layers
    scales = numbers.get("activation_sparsity_scale", [])
    usual = [0.95] * 10 + [0.0] * (count - 10)
    sizes = numbers.get("feed_forward_length")
    return {
        "model_type": "gemma3n_text",
        "intermediate_size": sizes[:count] if isinstance(sizes, list) else [sizes] * count,
        "final_logit_softcapping": numbers.real("final_logit_softcapping", 0.0) or None,
        "sliding_window": window,
        "layer_types": window_layers(numbers, 5, window),
        "rope_parameters": _two_ropes(numbers, read_rope(numbers)),
        "hidden_activation": "gelu_pytorch_tanh",
        # llama.cpp: the first 20 layers have keys and values.
        "num_kv_shared_layers": int(numbers.get("attention.shared_kv_layers", count - 20)),
        "hidden_size_per_layer_input": numbers.integer("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": numbers.tensors["per_layer_token_embd.weight"].shape[0],
        "altup_num_inputs": numbers.integer("altup.num_inputs"),
        "altup_active_idx": int(numbers.get("altup.active_idx", 0)),
        "laurel_rank": numbers.tensors["blk.0.laurel_l.weight"].shape[0],
        # The file has the point of the normal distribution that this share of it lies below.
        "activation_sparsity_pattern": [NormalDist().cdf(scale) for scale in scales[:count]] or usual,
    }


def _gemma4_config(numbers: Numbers) -> dict[str, Any]:
    window, count = numbers.integer("attention.sliding_window"), numbers.num_layers
    kinds = window_layers(numbers, 6, window)
    first = {kind: kinds.index(kind) for kind in ("sliding_attention", "full_attention") if kind in kinds}
    full, sliding = first.get("full_attention", 0), first.get("sliding_attention", 0)
    heads, sizes = numbers.get("attention.head_count_kv"), numbers.get("feed_forward_length")
    kv_heads = heads if isinstance(heads, list) else [heads] * count
    width, narrow = numbers.integer("attention.key_length"), numbers.integer("attention.key_length_swa")
    numbers.get("attention.value_length_swa")
    inputs = numbers.tensors.get("per_layer_token_embd.weight")
    return {
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": narrow,
        "global_head_dim": width,
        "num_key_value_heads": kv_heads[sliding],
        "num_global_key_value_heads": kv_heads[full],
        "attention_k_eq_v": not numbers.has(full, "attn_v"),
        "intermediate_size": min(sizes) if isinstance(sizes, list) else sizes,
        "use_double_wide_mlp": isinstance(sizes, list) and min(sizes) != max(sizes),
        "sliding_window": window,
        "layer_types": kinds,
        "rope_parameters": _gemma4_ropes(numbers, width, narrow),
        "final_logit_softcapping": numbers.real("final_logit_softcapping", 0.0) or None,
        "num_kv_shared_layers": int(numbers.get("attention.shared_kv_layers", 0)),
        "hidden_size_per_layer_input": int(numbers.get("embedding_length_per_layer_input", 0)),
        "vocab_size_per_layer_input": inputs.shape[0] if inputs is not None else 1,
    }


def _gemma4_ropes(numbers: Numbers, width: int, narrow: int) -> dict[str, Any]:
    """Full layers rotate the first dimensions: the file has a factor for each, which is huge for the others.
    Raises UnsupportedModel."""
    base, stored = numbers.real("rope.freq_base", 1e6), numbers.tensors.get("rope_freqs.weight")
    factors = read_vector(stored, width // 2) if stored is not None else [1.0] * (width // 2)
    num_rotated = sum(factor == 1.0 for factor in factors)
    if not all(factor == 1.0 or factor > NO_ROTATION for factor in factors):
        raise UnsupportedModel(f"{numbers.path} has factors of rope's frequencies that Gemma 4 does not have")
    if numbers.integer("rope.dimension_count_swa", narrow) != narrow:
        raise UnsupportedModel(f"{numbers.path} rotates a part of each head in layers with a window")
    share = 2 * num_rotated / width
    full = {"rope_type": "proportional", "rope_theta": base, "partial_rotary_factor": share}
    return _two_ropes(numbers, full)


def _gemma4_mixture(numbers: Numbers) -> dict[str, Any]:
    return {"enable_moe_block": True, "top_k_experts": numbers.integer("expert_used_count")}


_INPUTS: dict[str, str | Rule] = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}  # fmt: skip
_GEMMA3N = FOUR_NORMS | _INPUTS | {
    "altup_proj": _stack("model.altup_projections"),
    "altup_unembd_proj": _stack("model.altup_unembed_projections"),
    "altup_correct_scale": whole("altup.correct_output_scale"),
    "altup_correct_coef": "altup.correction_coefs", "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router", "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left", "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}  # fmt: skip
_GEMMA4 = FOUR_NORMS | _INPUTS | {
    "layer_output_scale": whole("layer_scalar"),
    "ffn_gate_inp.scale": whole("router.scale"),
    "ffn_down_exps.scale": whole("router.per_expert_scale"),
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}  # fmt: skip
#: By llama.cpp's name of the architecture.
GEMMAS = {
    "gemma": Architecture("Gemma", _gemma_config, norm_offset=1.0),
    "gemma2": Architecture("Gemma2", _gemma2_config, FOUR_NORMS, norm_offset=1.0),
    "gemma3": Architecture("Gemma3", _gemma3_config, FOUR_NORMS, norm_offset=1.0),
    "gemma3n": Architecture("Gemma3n", _gemma3n_config, _GEMMA3N),
    "gemma4": Architecture("Gemma4", _gemma4_config, _GEMMA4, has_kv_shapes=True),
}
GEMMA4_EXPERTS = replace(
    GEMMAS["gemma4"],
    mixture=MixtureFile(_gemma4_mixture, "experts.", names={"ffn_gate_inp": "router.proj"}),
)
