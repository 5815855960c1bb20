"""BERT in GGUF files: an encoder, whose hidden states are pooled."""

from __future__ import annotations

from typing import Any

from penstock.errors import UnsupportedModel
from penstock.weights.checkpoints.gguf_files.gguf_architecture import Architecture, parted, qkv_sizes
from penstock.weights.checkpoints.gguf_files.gguf_numbers import Numbers


def _bert_config(numbers: Numbers) -> dict[str, Any]:
    if numbers.get("attention.causal", False):
        raise UnsupportedModel(f"{numbers.path} has a causal BERT; Penstock computes BERT as an encoder")
    if "cls.weight" in numbers.tensors or "cls.output.weight" in numbers.tensors:
        raise UnsupportedModel(
            f"{numbers.path} has a layer for scores, which Penstock reads in Hugging Face's folders: use the "
            "original repository"
        )
    types = numbers.tensors.get("token_types.weight")
    return {
        "max_position_embeddings": numbers.tensors["position_embd.weight"].shape[0],
        "type_vocab_size": types.shape[0] if types is not None else 1,
        "hidden_act": "gelu",
    }


_ATTENTION = tuple(f"attention.self.{part}" for part in ("query", "key", "value"))
#: By llama.cpp's name of the architecture.
ENCODERS = {
    "bert": Architecture(
        "BertModel",
        _bert_config,
        {
            "token_embd": "embeddings.word_embeddings", "position_embd": "embeddings.position_embeddings",
            "token_types": "embeddings.token_type_embeddings", "token_embd_norm": "embeddings.LayerNorm",
            "attn_q": _ATTENTION[0], "attn_k": _ATTENTION[1], "attn_v": _ATTENTION[2],
            "attn_qkv": parted(*_ATTENTION, sizes=qkv_sizes), "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm", "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense", "layer_output_norm": "output.LayerNorm",
        },
        norm_eps="layer_norm_eps",
        last="layer_output_norm",
        layers="encoder.layer.",
    ),
}  # fmt: skip
