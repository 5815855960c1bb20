"""Falcon as in the 7B model (arXiv 2311.16867): one head of k and v serves all heads of q, attention and mlp
read the same normed hidden state, and positions are rope's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.kernels import ActivationFunction, BatchLayout, LayerKV
from penstock.model.architecture import layer_norm_tensors, linear_tensors
from penstock.model.config_values import count, flag, num_layers_of, number, require
from penstock.model.family import Family
from penstock.model.layers import activation_function, attend, layer_norm, mlp
from penstock.model.rope import context_length, read_rope
from penstock.spec import ModelSpec
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec
from penstock.weights.weight_format import INT8


@dataclass(frozen=True)
class FalconSpec(ModelSpec):
    """Configs differ in the activation, and in biases: all matrices have one, or none has."""

    activation: ActivationFunction = "gelu"
    has_bias: bool = False


class Falcon(Family):
    """The 40B and 180B models (several heads of k and v, two norms) and models with ALiBi are refused."""

    architectures = ("FalconForCausalLM",)
    optional_prefix = "transformer."
    spec: FalconSpec

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> FalconSpec:
        require(config, "new_decoder_architecture", False)
        require(config, "multi_query", True)
        require(config, "parallel_attn", True)
        require(config, "num_ln_in_parallel_attn", None, 1)
        require(config, "alibi", False)
        hidden_size = count(config, "hidden_size", "n_embed")
        num_heads = count(config, "num_attention_heads", "n_head")
        head_dim = hidden_size // num_heads
        rope = read_rope(config, head_dim)
        return FalconSpec(
            architecture=cls.architectures[0],
            hidden_size=hidden_size,
            num_layers=num_layers_of(config, "num_hidden_layers", "n_layer"),
            num_heads=num_heads,
            # The config's num_kv_heads holds only for the newer architecture, which is refused.
            num_kv_heads=1,
            head_dim=head_dim,
            intermediate_size=count(config, "ffn_hidden_size", default=4 * hidden_size),
            vocab_size=count(config, "vocab_size"),
            max_position_embeddings=context_length(
                rope, count(config, "max_position_embeddings", default=2048)
            ),
            norm_eps=number(config, "layer_norm_epsilon", 1e-5),
            is_tied=flag(config, "tie_word_embeddings", True),
            rope=rope,
            activation=activation_function(config.get("activation", "gelu")),
            has_bias=flag(config, "bias", False),
        )

    @classmethod
    def embedding_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        shape = (spec.vocab_size, spec.hidden_size)
        return (TensorSpec("embedding", shape, ("transformer.word_embeddings.weight",), INT8),)

    @classmethod
    def layer_tensors(cls, spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, FalconSpec)
        prefix, hidden, ffn = f"transformer.h.{index}.", spec.hidden_size, spec.intermediate_size

        def linear(name: str, rows: int, columns: int, part: str) -> tuple[TensorSpec, ...]:
            return linear_tensors(name, (rows, columns), (prefix + part,), spec.has_bias)

        return (
            *layer_norm_tensors("input_norm", hidden, f"{prefix}input_layernorm"),
            # The rows are q of all heads, then k, then v, which is our order.
            *linear("qkv", hidden + 2 * spec.head_dim, hidden, "self_attention.query_key_value"),
            *linear("o", hidden, hidden, "self_attention.dense"),
            *linear("up", ffn, hidden, "mlp.dense_h_to_4h"),
            *linear("down", hidden, ffn, "mlp.dense_4h_to_h"),
        )

    @classmethod
    def head_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        norm = layer_norm_tensors("final_norm", spec.hidden_size, "transformer.ln_f")
        head = TensorSpec("head", (spec.vocab_size, spec.hidden_size), ("lm_head.weight",), INT8)
        return norm if spec.is_tied else (*norm, head)

    def layer(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        x = layer_norm(self, "input_norm", weights, hidden)
        attended = attend(self, index, weights, x, kv, batch)
        return hidden + attended + mlp(self, weights, x, self.spec.activation)

    def norm_final(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        return layer_norm(self, "final_norm", weights, hidden)
