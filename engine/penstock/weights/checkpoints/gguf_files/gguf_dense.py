"""Architectures of GGUF files whose layers are Llama's, with other names, numbers and norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CorruptFile, UnsupportedModel
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.gguf_files.gguf_architecture import (
    Architecture,
    Rule,
    exchanged,
    part,
    parted,
    qkv_sizes,
)
from penstock.weights.checkpoints.gguf_files.gguf_numbers import Numbers, window_layers
from penstock.weights.checkpoints.gguf_files.gguf_rope import read_rope
from penstock.weights.checkpoints.tensor_entry import TensorEntry

#: Norms after attention and mlp, and none before them.
NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
#: q, k and v, where a file has them as one tensor.
SPLIT_QKV = parted("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", sizes=qkv_sizes)


def llama_config(numbers: Numbers) -> dict[str, Any]:
    return {
        "attention_bias": "blk.0.attn_output.bias" in numbers.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in numbers.tensors,
    }


def _type(model_type: str, *others: Callable[[Numbers], dict[str, Any]]) -> Any:
    """The type that config.json has, where it is not llama.cpp's name."""

    def config(numbers: Numbers) -> dict[str, Any]:
        found = {"model_type": model_type}
        for other in others:
            found |= other(numbers)
        return found

    return config


def _qwen_config(numbers: Numbers) -> dict[str, Any]:
    numbers.get("n_deepstack_layers")  # says where images come in
    return llama_config(numbers)


def _phi3_config(numbers: Numbers) -> dict[str, Any]:
    original = numbers.integer("rope.scaling.original_context_length", 0)
    return {
        "sliding_window": numbers.integer("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": original or numbers.integer("context_length"),
    }


def _baichuan_config(numbers: Numbers) -> dict[str, Any]:
    if numbers.integer("block_count") == 40:
        raise UnsupportedModel(
            f"{numbers.path} holds Baichuan 13B, which has ALiBi; Penstock computes the 7B"
        )
    return {"model_type": "llama"} | llama_config(numbers)


def _ministral3_config(numbers: Numbers) -> dict[str, Any]:
    """Files have one number for YaRN's two, and none for the kind of layers."""
    rope, scale = read_rope(numbers), numbers.real("rope.scaling.yarn_log_multiplier", 0.0)
    beta = numbers.real("attention.temperature_scale", 0.0)
    scales = {"mscale": scale, "mscale_all_dim": scale} if scale else {}
    own = {"llama_4_scaling_beta": beta} if beta else {}
    if own and "original_max_position_embeddings" not in rope:
        own["original_max_position_embeddings"] = numbers.integer("rope.scaling.original_context_length")
    return {"model_type": "ministral3", "rope_parameters": rope | scales | own, "sliding_window": None}


def _glm_config(numbers: Numbers) -> dict[str, Any]:
    has_bias = any(f"blk.0.attn_{name}.bias" in numbers.tensors for name in ("q", "qkv"))
    return {"attention_bias": has_bias}


def _glm_rows(numbers: Numbers, num_rows: int) -> Tensor | None:
    """The files of models that see have halves of heads in place of neighbours."""
    if numbers.get("rope.dimension_sections") is None:
        return None
    head_dim = numbers.head_dim
    return exchanged(num_rows, head_dim, numbers.integer("rope.dimension_count", head_dim)).argsort()


def granite_config(numbers: Numbers) -> dict[str, Any]:
    """Granite's four factors."""
    return {
        "attention_multiplier": numbers.real("attention.scale", 0.0) or numbers.head_dim**-0.5,
        "embedding_multiplier": numbers.real("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": numbers.real("residual_scale", 0.0) or 1.0,
        "logits_scaling": numbers.real("logit_scale", 0.0) or 1.0,
    }


def _olmo_config(numbers: Numbers) -> dict[str, Any]:
    return {"clip_qkv": numbers.real("attention.clamp_kqv", 0.0) or None}


def _olmo2_config(numbers: Numbers) -> dict[str, Any]:
    window = numbers.integer("attention.sliding_window", 0)
    bias = {"attention_bias": "blk.0.attn_q.bias" in numbers.tensors}
    if not window:
        return bias
    rope = read_rope(numbers)
    own = {"rope_type": "default", "rope_theta": numbers.real("rope.freq_base_swa", rope["rope_theta"])}
    return bias | {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": window_layers(numbers, 4, window),
        "rope_parameters": {"full_attention": rope, "sliding_attention": own},
    }


def _cohere_config(numbers: Numbers) -> dict[str, Any]:
    return {
        "model_type": "cohere",
        "logit_scale": numbers.real("logit_scale"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in numbers.tensors,
        "attention_bias": "blk.0.attn_q.bias" in numbers.tensors,
    }


def _cohere2_config(numbers: Numbers) -> dict[str, Any]:
    window = numbers.integer("attention.sliding_window")
    return {
        "logit_scale": numbers.real("logit_scale"),
        "sliding_window": window,
        "layer_types": window_layers(numbers, 4, window),
        "attention_bias": "blk.0.attn_q.bias" in numbers.tensors,
    }


def _exaone4_config(numbers: Numbers) -> dict[str, Any]:
    # llama.cpp gives windows to the model of 64 layers alone, whatever the file says.
    usual = 4096 if numbers.num_layers == 64 else 0
    window = numbers.integer("attention.sliding_window", usual)
    numbers.get("nextn_predict_layers")
    return {"sliding_window": window or None, "layer_types": window_layers(numbers, 4, window)}


def _ernie_config(numbers: Numbers) -> dict[str, Any]:
    return {"use_bias": "blk.0.attn_q.bias" in numbers.tensors}


def _smollm3_config(numbers: Numbers) -> dict[str, Any]:
    # Files say nothing: llama.cpp leaves rope out of every fourth layer.
    flags = [int((index + 1) % 4 != 0) for index in range(numbers.num_layers)]
    return llama_config(numbers) | {"no_rope_layers": flags, "use_sliding_window": False}


def _seed_config(numbers: Numbers) -> dict[str, Any]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in numbers.tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in numbers.tensors,
    }


def _hunyuan_config(numbers: Numbers) -> dict[str, Any]:
    return {"model_type": "hunyuan_v1_dense", "use_qk_norm": True}


def minicpm_factors(numbers: Numbers) -> dict[str, Any]:
    """MiniCPM's three factors; files of the first converter have none, and llama.cpp knows them."""
    layers = math.sqrt(numbers.num_layers)
    width = numbers.integer("embedding_length")
    return {
        "scale_emb": numbers.real("embedding_scale", 12.0),
        "scale_depth": numbers.real("residual_scale", 1.4 / layers) * layers,
        "dim_model_base": round(width / numbers.real("logit_scale", width / 256)),
    }


def _apertus_alphas(numbers: Numbers) -> Iterable[TensorEntry]:
    """The learned numbers of the activation, which lie in the header. Raises CorruptFile."""
    for name, word in (("xielu.alpha_p", "alpha_p"), ("xielu.alpha_n", "alpha_n")):
        values = numbers.metadata.get(name)
        values = values if isinstance(values, list) else [values] * numbers.num_layers
        if len(values) < numbers.num_layers or not all(isinstance(each, int | float) for each in values):
            raise CorruptFile(
                f"{numbers.path} has no {numbers.num_layers} numbers as {name}; download it again"
            )
        for layer in range(numbers.num_layers):
            yield _number(numbers, f"model.layers.{layer}.mlp.act_fn.{word}", float(values[layer]))


def _number(numbers: Numbers, name: str, value: float) -> TensorEntry:
    """A tensor of one number."""

    def decode(checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        return torch.full((stop - start,), value)

    first = numbers.tensors["token_embd.weight"]
    return replace(first, name=name, dtype="F32", shape=(1,), num_bytes=4, decode=decode)


def _apertus_config(numbers: Numbers) -> dict[str, Any]:
    for name, usual in (("xielu.beta", 0.5), ("xielu.eps", -1e-6)):
        values = numbers.metadata.get(name, usual)
        if any(
            abs(each - usual) > 1e-3 * abs(usual)
            for each in (values if isinstance(values, list) else [values])
        ):
            raise UnsupportedModel(
                f"{numbers.path} has {name} other than {usual}, which Penstock computes with"
            )
    return {"hidden_act": "xielu"}


_LLAMA = Architecture("Llama", _type("llama", llama_config), exchanges_rows=True)
_HUNYUAN_NORMS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_GLM: dict[str, str | Rule] = {
    "ffn_up": "mlp.gate_up_proj",
    "attn_q": part("self_attn.q_proj", _glm_rows),
    "attn_k": part("self_attn.k_proj", _glm_rows),
    "attn_qkv": SPLIT_QKV,
}
#: By llama.cpp's name of the architecture.
DENSE = {
    "llama": Architecture("Llama", llama_config, exchanges_rows=True),
    "qwen2": Architecture("Qwen2"),
    "qwen3": Architecture("Qwen3", llama_config),
    "phi3": Architecture("Phi3", _phi3_config, {"ffn_up": "mlp.gate_up_proj"}, rotates_part=True),
    "qwen2vl": Architecture("Qwen2", _type("qwen2")),
    "qwen3vl": Architecture("Qwen3", _type("qwen3", _qwen_config)),
    "mistral3": Architecture("Ministral3", _ministral3_config, exchanges_rows=True),
    "glm4": Architecture(
        "Glm4",
        _glm_config,
        _GLM
        | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
        rotates_part=True,
    ),
    "chatglm": Architecture("Glm", _type("glm", _glm_config), _GLM, rotates_part=True),
    "granite": Architecture("Granite", lambda numbers: llama_config(numbers) | granite_config(numbers),
                            exchanges_rows=True),
    "olmo": Architecture("Olmo", _olmo_config, exchanges_rows=True, norm_eps="", last="attn_output"),
    "olmo2": Architecture("Olmo2", _olmo2_config, NORMS_AFTER, last="attn_output"),
    "command-r": Architecture("Cohere", _cohere_config, norm_eps="layer_norm_eps"),
    "cohere2": Architecture("Cohere2", _cohere2_config, norm_eps="layer_norm_eps"),
    "ernie4_5": Architecture("Ernie4_5", _ernie_config),
    "paddleocr": Architecture("Ernie4_5", _type("ernie4_5", _ernie_config)),
    "exaone4": Architecture("Exaone4", _exaone4_config, NORMS_AFTER, last="attn_output"),
    "exaone": replace(_LLAMA, exchanges_rows=False),
    "internlm2": replace(_LLAMA, names={"attn_qkv": SPLIT_QKV}),
    "xverse": _LLAMA,
    "baichuan": replace(_LLAMA, config=_baichuan_config),
    "smollm3": Architecture("SmolLM3", _smollm3_config, exchanges_rows=True),
    "seed_oss": Architecture("SeedOss", _seed_config, {"post_attention_norm": "post_attention_layernorm"}),
    "hunyuan-dense": Architecture("HunYuanDenseV1", _hunyuan_config, _HUNYUAN_NORMS),
    "arcee": Architecture("Arcee", lambda numbers: llama_config(numbers) | {"hidden_act": "relu2"},
                          exchanges_rows=True),
    "apertus": Architecture(
        "Apertus",
        _apertus_config,
        {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        made=_apertus_alphas,
    ),
    "minicpm": Architecture("MiniCPM", minicpm_factors, exchanges_rows=True),
}  # fmt: skip
