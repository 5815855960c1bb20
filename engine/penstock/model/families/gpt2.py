"""GPT-2 (Radford et al., 2019) has learned positions and layer norms. Checkpoints store its matrices as
[in_features, out_features]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.kernels import ActivationFunction, BatchLayout, LayerKV
from penstock.model.architecture import layer_norm_tensors, linear_tensors
from penstock.model.config_values import count, flag, num_layers_of, number, require
from penstock.model.family import Family
from penstock.model.layers import activation_function, attend, layer_norm, mlp
from penstock.spec import ModelSpec
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec
from penstock.weights.weight_format import INT8


@dataclass(frozen=True)
class GPT2Spec(ModelSpec):
    """Configs differ in the activation."""

    activation: ActivationFunction = "gelu_tanh"


class GPT2(Family):
    """A layer has layer norms, fused qkv with biases, and a plain mlp."""

    architectures = ("GPT2LMHeadModel",)
    optional_prefix = "transformer."
    unused_tensors = (r"\.attn\.(bias|masked_bias)$",)
    spec: GPT2Spec

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> GPT2Spec:
        require(config, "scale_attn_weights", True)
        require(config, "scale_attn_by_inverse_layer_idx", False)
        require(config, "add_cross_attention", False)
        hidden_size, num_heads = count(config, "n_embd"), count(config, "n_head")
        return GPT2Spec(
            architecture=cls.architectures[0],
            hidden_size=hidden_size,
            num_layers=num_layers_of(config, "n_layer"),
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=hidden_size // num_heads,
            intermediate_size=count(config, "n_inner", default=4 * hidden_size),
            vocab_size=count(config, "vocab_size"),
            max_position_embeddings=count(config, "n_positions"),
            norm_eps=number(config, "layer_norm_epsilon", 1e-5),
            is_tied=flag(config, "tie_word_embeddings", True),
            activation=activation_function(config.get("activation_function", "gelu_new")),
        )

    @classmethod
    def embedding_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        words = (spec.vocab_size, spec.hidden_size)
        positions = (spec.max_position_embeddings, spec.hidden_size)
        return (
            TensorSpec("embedding", words, ("transformer.wte.weight",), INT8),
            TensorSpec("positions", positions, ("transformer.wpe.weight",)),
        )

    @classmethod
    def layer_tensors(cls, spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
        prefix, hidden, ffn = f"transformer.h.{index}.", spec.hidden_size, spec.intermediate_size

        def linear(name: str, rows: int, columns: int, part: str) -> tuple[TensorSpec, ...]:
            return linear_tensors(name, (rows, columns), (prefix + part,), is_transposed=True)

        return (
            *layer_norm_tensors("input_norm", hidden, f"{prefix}ln_1"),
            *linear("qkv", 3 * hidden, hidden, "attn.c_attn"),
            *linear("o", hidden, hidden, "attn.c_proj"),
            *layer_norm_tensors("post_norm", hidden, f"{prefix}ln_2"),
            *linear("up", ffn, hidden, "mlp.c_fc"),
            *linear("down", hidden, ffn, "mlp.c_proj"),
        )

    @classmethod
    def head_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        norm = layer_norm_tensors("final_norm", spec.hidden_size, "transformer.ln_f")
        head = TensorSpec("head", (spec.vocab_size, spec.hidden_size), ("lm_head.weight",), INT8)
        return norm if spec.is_tied else (*norm, head)

    def place(self, weights: LayerWeights, vectors: Tensor, positions: Tensor) -> Tensor:
        return vectors + weights.vector("positions")[positions]

    def layer(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        x = layer_norm(self, "input_norm", weights, hidden)
        hidden = hidden + attend(self, index, weights, x, kv, batch)
        x = layer_norm(self, "post_norm", weights, hidden)
        return hidden + mlp(self, weights, x, self.spec.activation)

    def norm_final(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        return layer_norm(self, "final_norm", weights, hidden)
