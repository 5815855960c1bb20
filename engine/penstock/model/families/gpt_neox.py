"""GPT-NeoX and Pythia (arXiv 2204.06745) have rope on part of each head, and attention and mlp in
parallel."""

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
class GPTNeoXSpec(ModelSpec):
    """Configs differ in the activation, and in whether attention and mlp read the same hidden state."""

    activation: ActivationFunction = "gelu"
    is_parallel: bool = True


class GPTNeoX(Family):
    """A layer has layer norms, qkv fused per head, and a plain mlp."""

    architectures = ("GPTNeoXForCausalLM",)
    optional_prefix = "gpt_neox."
    unused_tensors = (r"\.attention\.(bias|masked_bias)$",)
    spec: GPTNeoXSpec

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> GPTNeoXSpec:
        require(config, "attention_bias", True)
        hidden_size, num_heads = count(config, "hidden_size"), count(config, "num_attention_heads")
        head_dim = hidden_size // num_heads
        rope_parameters = config.get("rope_parameters") or {}
        share = rope_parameters.get("partial_rotary_factor") or config.get("rotary_pct", 0.25)
        rope = read_rope(config, int(head_dim * float(share)))
        return GPTNeoXSpec(
            architecture=cls.architectures[0],
            hidden_size=hidden_size,
            num_layers=num_layers_of(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            intermediate_size=count(config, "intermediate_size"),
            vocab_size=count(config, "vocab_size"),
            max_position_embeddings=context_length(rope, count(config, "max_position_embeddings")),
            norm_eps=number(config, "layer_norm_eps", 1e-5),
            is_tied=flag(config, "tie_word_embeddings", False),
            rope=rope,
            activation=activation_function(config.get("hidden_act", "gelu")),
            is_parallel=flag(config, "use_parallel_residual", True),
        )

    @classmethod
    def embedding_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        shape = (spec.vocab_size, spec.hidden_size)
        return (TensorSpec("embedding", shape, ("gpt_neox.embed_in.weight",), INT8),)

    @classmethod
    def layer_tensors(cls, spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
        prefix, hidden, ffn = f"gpt_neox.layers.{index}.", spec.hidden_size, spec.intermediate_size
        qkv = (f"{prefix}attention.query_key_value",)
        return (
            *layer_norm_tensors("input_norm", hidden, f"{prefix}input_layernorm"),
            *linear_tensors("qkv", (3 * hidden, hidden), qkv),
            *linear_tensors("o", (hidden, hidden), (f"{prefix}attention.dense",)),
            *layer_norm_tensors("post_norm", hidden, f"{prefix}post_attention_layernorm"),
            *linear_tensors("up", (ffn, hidden), (f"{prefix}mlp.dense_h_to_4h",)),
            *linear_tensors("down", (hidden, ffn), (f"{prefix}mlp.dense_4h_to_h",)),
        )

    @classmethod
    def head_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        norm = layer_norm_tensors("final_norm", spec.hidden_size, "gpt_neox.final_layer_norm")
        head = TensorSpec("head", (spec.vocab_size, spec.hidden_size), ("embed_out.weight",), INT8)
        return norm if spec.is_tied else (*norm, head)

    def layer(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        x = layer_norm(self, "input_norm", weights, hidden)
        attended = hidden + attend(self, index, weights, x, kv, batch, is_per_head=True)
        x = layer_norm(self, "post_norm", weights, hidden if self.spec.is_parallel else attended)
        return attended + mlp(self, weights, x, self.spec.activation)

    def norm_final(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        return layer_norm(self, "final_norm", weights, hidden)
