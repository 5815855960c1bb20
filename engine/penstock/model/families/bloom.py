"""BLOOM (arXiv 2211.05100) has ALiBi instead of positions, and a norm on the embedding."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.kernels import AttentionSpec, BatchLayout, LayerKV
from penstock.kernels.reference import ReferenceKernels
from penstock.model.architecture import layer_norm_tensors, linear_tensors
from penstock.model.config_values import count, flag, num_layers_of, number, require
from penstock.model.family import Family
from penstock.model.layers import attend, layer_norm, mlp
from penstock.spec import ModelSpec
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec
from penstock.weights.weight_format import INT8


class Bloom(Family):
    """A layer has layer norms, qkv fused per head, and a plain mlp."""

    architectures = ("BloomForCausalLM",)
    optional_prefix = "transformer."

    def attention_spec(self) -> AttentionSpec:
        slopes = alibi_slopes(self.spec.num_heads).to(self.device)
        return replace(super().attention_spec(), alibi_slopes=slopes)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> ModelSpec:
        require(config, "apply_residual_connection_post_layernorm", False)
        hidden_size = count(config, "hidden_size", "n_embed")
        num_heads = count(config, "n_head", "num_attention_heads")
        return ModelSpec(
            architecture=cls.architectures[0],
            hidden_size=hidden_size,
            num_layers=num_layers_of(config, "n_layer", "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=hidden_size // num_heads,
            intermediate_size=4 * hidden_size,
            vocab_size=count(config, "vocab_size"),
            # ALiBi has no table and so no limit: seq_length is the length of the training texts.
            max_position_embeddings=count(config, "seq_length", default=2048),
            norm_eps=number(config, "layer_norm_epsilon", 1e-5),
            is_tied=flag(config, "tie_word_embeddings", True),
        )

    @classmethod
    def embedding_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        shape, name = (spec.vocab_size, spec.hidden_size), "transformer.word_embeddings"
        return (
            TensorSpec("embedding", shape, (f"{name}.weight",), INT8),
            *layer_norm_tensors("embedding_norm", spec.hidden_size, f"{name}_layernorm"),
        )

    @classmethod
    def layer_tensors(cls, spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
        prefix, hidden, ffn = f"transformer.h.{index}.", spec.hidden_size, spec.intermediate_size
        qkv = (f"{prefix}self_attention.query_key_value",)
        return (
            *layer_norm_tensors("input_norm", hidden, f"{prefix}input_layernorm"),
            *linear_tensors("qkv", (3 * hidden, hidden), qkv),
            *linear_tensors("o", (hidden, hidden), (f"{prefix}self_attention.dense",)),
            *layer_norm_tensors("post_norm", hidden, f"{prefix}post_attention_layernorm"),
            *linear_tensors("up", (ffn, hidden), (f"{prefix}mlp.dense_h_to_4h",)),
            *linear_tensors("down", (hidden, ffn), (f"{prefix}mlp.dense_4h_to_h",)),
        )

    @classmethod
    def head_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        norm = layer_norm_tensors("final_norm", spec.hidden_size, "transformer.ln_f")
        head = TensorSpec("head", (spec.vocab_size, spec.hidden_size), ("lm_head.weight",), INT8)
        return norm if spec.is_tied else (*norm, head)

    def place(self, weights: LayerWeights, vectors: Tensor, positions: Tensor) -> Tensor:
        # The embedding is computed on the host, while self.kernels may be a GPU's.
        norm, bias = weights.vector("embedding_norm"), weights.vector("embedding_norm.bias")
        return ReferenceKernels().layer_norm(vectors, norm, bias, self.spec.norm_eps)

    def layer(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        x = layer_norm(self, "input_norm", weights, hidden)
        hidden = hidden + attend(self, index, weights, x, kv, batch, is_per_head=True)
        x = layer_norm(self, "post_norm", weights, hidden)
        return hidden + mlp(self, weights, x, "gelu_tanh")

    def norm_final(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        return layer_norm(self, "final_norm", weights, hidden)


def alibi_slopes(num_heads: int) -> Tensor:
    """float32 [num_heads] (arXiv 2108.12409). n heads have the slopes 2^(-8/n), 2^(-16/n), ... if n is a
    power of two. Otherwise the first heads have the slopes of the next lower power of two, and the others
    have every second slope of the next higher one."""
    lower = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / lower) for i in range(lower)]
    slopes += [2 ** (-4 * (2 * i + 1) / lower) for i in range(num_heads - lower)]
    return torch.tensor(slopes, dtype=torch.float32)
