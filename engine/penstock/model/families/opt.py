"""OPT (arXiv 2205.01068) has learned positions that begin at 2, layer norms before each block, and biases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.kernels import ActivationFunction, BatchLayout, LayerKV
from penstock.model.architecture import layer_norm_tensors, linear_tensors
from penstock.model.config_values import count, flag, num_layers_of, require
from penstock.model.family import Family
from penstock.model.layers import activation_function, attend, layer_norm, mlp
from penstock.spec import ModelSpec
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec
from penstock.weights.weight_format import INT8

#: The table of positions begins with two rows that were used only for padding.
POSITION_OFFSET = 2


@dataclass(frozen=True)
class OPTSpec(ModelSpec):
    """Configs differ in the activation."""

    activation: ActivationFunction = "relu"


class OPT(Family):
    """OPT-350m is refused: its norms come after each block."""

    architectures = ("OPTForCausalLM",)
    spec: OPTSpec

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> OPTSpec:
        require(config, "do_layer_norm_before", True)
        require(config, "_remove_final_layer_norm", False)
        require(config, "enable_bias", True)
        require(config, "layer_norm_elementwise_affine", True)
        hidden_size, num_heads = count(config, "hidden_size"), count(config, "num_attention_heads")
        require(config, "word_embed_proj_dim", hidden_size)
        return OPTSpec(
            architecture=cls.architectures[0],
            hidden_size=hidden_size,
            num_layers=num_layers_of(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=hidden_size // num_heads,
            intermediate_size=count(config, "ffn_dim"),
            vocab_size=count(config, "vocab_size"),
            max_position_embeddings=count(config, "max_position_embeddings"),
            norm_eps=1e-5,
            is_tied=flag(config, "tie_word_embeddings", True),
            activation=activation_function(config.get("activation_function", "relu")),
        )

    @classmethod
    def embedding_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        words = (spec.vocab_size, spec.hidden_size)
        positions = (spec.max_position_embeddings + POSITION_OFFSET, spec.hidden_size)
        return (
            TensorSpec("embedding", words, ("model.decoder.embed_tokens.weight",), INT8),
            TensorSpec("positions", positions, ("model.decoder.embed_positions.weight",)),
        )

    @classmethod
    def layer_tensors(cls, spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
        prefix, hidden, ffn = f"model.decoder.layers.{index}.", spec.hidden_size, spec.intermediate_size
        qkv = tuple(f"{prefix}self_attn.{part}_proj" for part in "qkv")
        return (
            *layer_norm_tensors("input_norm", hidden, f"{prefix}self_attn_layer_norm"),
            *linear_tensors("qkv", (3 * hidden, hidden), qkv),
            *linear_tensors("o", (hidden, hidden), (f"{prefix}self_attn.out_proj",)),
            *layer_norm_tensors("post_norm", hidden, f"{prefix}final_layer_norm"),
            *linear_tensors("up", (ffn, hidden), (f"{prefix}fc1",)),
            *linear_tensors("down", (hidden, ffn), (f"{prefix}fc2",)),
        )

    @classmethod
    def head_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        norm = layer_norm_tensors("final_norm", spec.hidden_size, "model.decoder.final_layer_norm")
        head = TensorSpec("head", (spec.vocab_size, spec.hidden_size), ("lm_head.weight",), INT8)
        return norm if spec.is_tied else (*norm, head)

    def place(self, weights: LayerWeights, vectors: Tensor, positions: Tensor) -> Tensor:
        return vectors + weights.vector("positions")[positions + POSITION_OFFSET]

    def layer(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        x = layer_norm(self, "input_norm", weights, hidden)
        hidden = hidden + attend(self, index, weights, x, kv, batch)
        x = layer_norm(self, "post_norm", weights, hidden)
        return hidden + mlp(self, weights, x, self.spec.activation)

    def norm_final(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        return layer_norm(self, "final_norm", weights, hidden)
