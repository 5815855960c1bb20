"""Architectures of GGUF files whose layers are GPT's: layer norms and a plain mlp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from penstock.errors import UnsupportedModel
from penstock.weights.checkpoints.gguf_files.gguf_architecture import (
    Architecture,
    Rule,
    Stored,
    by_group,
    by_head,
    part,
    parted,
    qkv_sizes,
    row_slice,
)
from penstock.weights.checkpoints.gguf_files.gguf_numbers import Numbers
from penstock.weights.checkpoints.gguf_files.gguf_rows import renamed
from penstock.weights.checkpoints.tensor_entry import TensorEntry


def _turned(module: str) -> Rule:
    """A matrix that GPT-2's own files have transposed."""

    def rule(stored: Stored) -> Iterator[TensorEntry]:
        entry = renamed(stored.name(module), stored.entry)
        yield replace(entry, has_outputs_first=len(entry.shape) == 2)

    return rule


def _apart(module: str) -> Rule:
    """The norms of heads, each of which is a module of its own."""

    def rule(stored: Stored) -> Iterator[TensorEntry]:
        for head in range(stored.entry.shape[0]):
            row = row_slice(stored.entry, head, 1)
            yield renamed(f"{stored.prefix}{module}.{head}.weight", replace(row, shape=row.shape[1:]))

    return rule


def _has_bias(numbers: Numbers, word: str) -> bool:
    return f"blk.0.{word}.bias" in numbers.tensors


def _gpt2_config(numbers: Numbers) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": numbers.integer("embedding_length"),
        "n_layer": numbers.num_layers,
        "n_head": numbers.num_heads,
        "n_positions": numbers.tensors["position_embd.weight"].shape[0],
        "n_inner": numbers.tensors["blk.0.ffn_up.weight"].shape[0],
    }


def _starcoder_config(numbers: Numbers) -> dict[str, Any]:
    return _gpt2_config(numbers) | {"model_type": "gpt_bigcode", "multi_query": numbers.num_kv_heads == 1}


def _gptneox_config(numbers: Numbers) -> dict[str, Any]:
    is_parallel = bool(numbers.get("use_parallel_residual", True))
    return {"model_type": "gpt_neox", "use_parallel_residual": is_parallel, "hidden_act": "gelu"}


def _bloom_config(numbers: Numbers) -> dict[str, Any]:
    return {
        "n_layer": numbers.num_layers,
        "n_head": numbers.num_heads,
        "seq_length": numbers.integer("context_length"),
    }


def _falcon_config(numbers: Numbers) -> dict[str, Any]:
    # The 7B model has one head of k and v for all heads of q, and others have groups with two norms.
    is_new = "blk.0.attn_norm_2.weight" in numbers.tensors
    many = numbers.num_kv_heads > 1
    return {
        "new_decoder_architecture": is_new or many,
        "num_ln_in_parallel_attn": 2 if is_new else 1,
        "num_kv_heads": numbers.num_kv_heads,
        "multi_query": not many,
        "parallel_attn": True,
        "bias": _has_bias(numbers, "attn_qkv"),
        "ffn_hidden_size": numbers.tensors["blk.0.ffn_up.weight"].shape[0],
        "alibi": False,
    }


def _mpt_config(numbers: Numbers) -> dict[str, Any]:
    bias = numbers.real("attention.max_alibi_bias", 0.0)
    if not bias or "position_embd.weight" in numbers.tensors:
        raise UnsupportedModel(f"{numbers.path} holds an MPT without ALiBi; Penstock computes MPTs with it")
    width = numbers.integer("embedding_length")
    return {
        "d_model": width,
        "n_heads": numbers.num_heads,
        "n_layers": numbers.num_layers,
        "max_seq_len": numbers.integer("context_length"),
        "expansion_ratio": numbers.tensors["blk.0.ffn_up.weight"].shape[0] // width,
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": int(bias),
            "clip_qkv": numbers.real("attention.clamp_kqv", 0.0) or None,
        },
    }


def _phi2_config(numbers: Numbers) -> dict[str, Any]:
    rows = numbers.tensors["blk.0.ffn_up.weight"].shape[0]  # some converters have 4 times the width
    return {"model_type": "phi", "intermediate_size": rows}


def _stablelm_config(numbers: Numbers) -> dict[str, Any]:
    is_parallel = not numbers.has(0, "ffn_norm")
    numbers.get("use_parallel_residual")
    return {
        "use_parallel_residual": is_parallel,
        "qk_layernorm": numbers.has(0, "attn_q_norm"),
        "use_qkv_bias": _has_bias(numbers, "attn_q"),
    }


def _starcoder2_config(numbers: Numbers) -> dict[str, Any]:
    window = numbers.integer("attention.sliding_window", 0) or None
    return {"use_bias": _has_bias(numbers, "attn_q"), "sliding_window": window}


def _biases(numbers: Numbers) -> dict[str, Any]:
    return {"attention_bias": _has_bias(numbers, "attn_q"), "mlp_bias": _has_bias(numbers, "ffn_up")}


_GPT2_NAMES = {
    "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
    "attn_norm": "ln_1", "ffn_norm": "ln_2",
}  # fmt: skip
_BLOOM_NAMES = {
    "token_embd": "transformer.word_embeddings", "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f", "attn_output": "self_attention.dense", "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}  # fmt: skip
#: By llama.cpp's name of the architecture.
GPTS = {
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        _gpt2_config,
        _GPT2_NAMES
        | {
            "attn_qkv": _turned("attn.c_attn"), "attn_output": _turned("attn.c_proj"),
            "ffn_up": _turned("mlp.c_fc"), "ffn_down": _turned("mlp.c_proj"),
        },
        norm_eps="layer_norm_epsilon",
        layers="transformer.h.",
    ),
    "starcoder": Architecture(
        "GPTBigCode",
        _starcoder_config,
        _GPT2_NAMES
        | {
            "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        norm_eps="layer_norm_epsilon",
        layers="transformer.h.",
    ),
    "gptneox": Architecture(
        "GPTNeoX",
        _gptneox_config,
        {
            "token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out", "attn_qkv": part("attention.query_key_value", by_head),
            "attn_output": "attention.dense", "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        rotates_part=True,
        norm_eps="layer_norm_eps",
        layers="gpt_neox.layers.",
    ),
    "bloom": Architecture(
        "Bloom",
        _bloom_config,
        _BLOOM_NAMES | {"attn_qkv": part("self_attention.query_key_value", by_head)},
        norm_eps="layer_norm_epsilon",
        layers="transformer.h.",
    ),
    "falcon": Architecture(
        "Falcon",
        _falcon_config,
        _BLOOM_NAMES
        | {
            "attn_qkv": part("self_attention.query_key_value", by_group),
            # With two norms, llama.cpp calls that of attention the second.
            "attn_norm": lambda stored: _falcon_norm(stored, "ln_mlp"),
            "attn_norm_2": lambda stored: _falcon_norm(stored, "ln_attn"),
        },
        lacks=("head_dim",),
        norm_eps="layer_norm_epsilon",
        layers="transformer.h.",
    ),
    "mpt": Architecture(
        "MPT",
        _mpt_config,
        {
            "token_embd": "transformer.wte", "output_norm": "transformer.norm_f", "attn_norm": "norm_1",
            "attn_qkv": "attn.Wqkv", "attn_output": "attn.out_proj", "ffn_norm": "norm_2",
            "ffn_up": "ffn.up_proj", "ffn_down": "ffn.down_proj",
        },
        norm_eps="layer_norm_epsilon",
        layers="transformer.blocks.",
    ),
    "phi2": Architecture(
        "Phi",
        _phi2_config,
        {
            "output_norm": "model.final_layernorm", "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
            "attn_qkv": parted("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", sizes=qkv_sizes),
        },
        rotates_part=True,
        norm_eps="layer_norm_eps",
    ),
    "stablelm": Architecture(
        "StableLm",
        _stablelm_config,
        {
            "attn_q_norm": _apart("self_attn.q_layernorm.norms"),
            "attn_k_norm": _apart("self_attn.k_layernorm.norms"),
        },
        rotates_part=True,
        norm_eps="layer_norm_eps",
    ),
    "starcoder2": Architecture(
        "Starcoder2",
        _starcoder2_config,
        {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        norm_eps="norm_epsilon",
    ),
    "nemotron": Architecture(
        "Nemotron", _biases, norm_offset=1.0, rotates_part=True, norm_eps="norm_eps"
    ),
    "jais2": Architecture("Jais2", _biases, norm_eps="layer_norm_eps"),
}  # fmt: skip


def _falcon_norm(stored: Stored, module: str) -> Iterator[TensorEntry]:
    has_two = stored.numbers.has(stored.layer or 0, "attn_norm_2")
    yield renamed(stored.name(module if has_two else "input_layernorm"), stored.entry)
