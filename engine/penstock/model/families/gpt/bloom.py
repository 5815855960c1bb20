"""BLOOM (arXiv 2211.05100) has ALiBi instead of positions, and a norm on the embedding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from penstock.kernels import AttentionSpec
from penstock.kernels.reference import ReferenceKernels
from penstock.model.attention.alibi import alibi_slopes
from penstock.model.config_values import flag
from penstock.model.families.gpt.gpt import GPT
from penstock.model.families.gpt.gpt_architecture import GPTSpec, Keys, Names
from penstock.model.layers import GROUPED
from penstock.spec import ModelSpec
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec


class Bloom(GPT):
    """q, k and v are fused per head."""

    architectures = ("BloomForCausalLM",)
    names = Names(
        embedding="transformer.word_embeddings",
        input_norm="input_layernorm",
        qkv=("self_attention.query_key_value",),
        o="self_attention.dense",
        mlp_norm="post_attention_layernorm",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
    )
    keys = Keys(
        ("hidden_size", "n_embed"),
        ("n_head", "num_attention_heads"),
        ("n_layer", "num_hidden_layers"),
        positions="seq_length",
        eps="layer_norm_epsilon",
    )

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> GPTSpec:
        # ALiBi has no table and so no limit: seq_length is the length of the training texts.
        base = cls._spec({"seq_length": 2048} | config, attention=GROUPED, activation="gelu_tanh")
        return replace(
            base,
            intermediate_size=4 * base.hidden_size,
            biases_scores=True,
            has_normed_residual=flag(config, "apply_residual_connection_post_layernorm", False),
        )

    @classmethod
    def embedding_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, GPTSpec)
        norm = spec.norm.tensors("embedding_norm", (spec.hidden_size,), f"{cls.names.embedding}_layernorm")
        return (*super().embedding_tensors(spec), *norm)

    def attention_spec(self) -> AttentionSpec:
        slopes = alibi_slopes(self.spec.num_heads).to(self.device)
        return replace(super().attention_spec(), alibi_slopes=slopes)

    def place(self, weights: LayerWeights, vectors: Tensor, positions: Tensor) -> Tensor:
        # The embedding is computed on the host, while self.kernels may be a GPU's.
        norm, bias = weights.vector("embedding_norm"), weights.vector("embedding_norm.bias")
        return ReferenceKernels().layer_norm(vectors, norm, bias, self.spec.norm_eps)
