"""LaterGemma: what Gemma 3n and Gemma 4 have in common. Heads of layers with a window and of full layers may
have different widths; the last layers read the keys and values of an earlier layer; and each layer has an
input of its own beside the hidden state, made of the token and of its embedding."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.kernels import BatchLayout, LayerKV
from penstock.model.architecture import linear_tensors
from penstock.model.config_values import flag, number, refuse, require
from penstock.model.families.gemma.gemma import Gemma2
from penstock.model.families.llama import Llama
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.family import GivenRows
from penstock.model.layers import activation_function
from penstock.model.norms import RMS, Norm
from penstock.spec import ModelSpec
from penstock.weights.formats.weight_format import INT8
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import ModelTensors, TensorSpec

#: The norm of values has no weights.
VALUE_NORM = Norm(has_weight=False)


@dataclass(frozen=True, kw_only=True)
class LaterGemmaSpec(LlamaSpec):
    """Where layers differ, and their inputs."""

    #: Per layer: the layer whose keys and values it reads; itself, or an earlier one.
    kv_sources: tuple[int, ...]
    #: Per layer: the inner width of its mlp.
    mlp_sizes: tuple[int, ...]
    #: Layers whose values are made of the projection of their keys.
    values_of_keys: frozenset[int] = frozenset()
    #: Numbers of a layer's input for each token; 0: layers have no inputs.
    input_size: int = 0
    #: Tokens with a number from here on share the inputs of token 0.
    input_vocab: int = 0

    @property
    def state_width(self) -> int:
        """Numbers of a token's row that go through all layers. After them are the inputs of the layers that
        are still to come."""
        return self.hidden_size

    @property
    def row_size(self) -> int:
        return self.state_width + self.num_layers * self.input_size


class LaterGemma(Llama):
    """Norms before and after attention and mlp, heads of q, k and v with norms, scores without a factor."""

    norm_parts = Gemma2.norm_parts
    spec: LaterGemmaSpec

    @classmethod
    def _later(cls, config: dict[str, Any], **differences: Any) -> dict[str, Any]:
        """What LlamaSpec says of both; `differences` are added."""
        require(config, "use_bidirectional_attention", None, False, "vision")  # of images
        has_bias = flag(config, "attention_bias", False)
        return {
            "has_qkv_bias": has_bias,
            "has_o_bias": has_bias,
            "is_tied": flag(config, "tie_word_embeddings", True),
            "activation": activation_function(config.get("hidden_activation") or "gelu_pytorch_tanh"),
            "norm_places": "both",
            "attention_scale": 1.0,
            "norm_eps": number(config, "rms_norm_eps", 1e-6),
        } | differences

    def kv_layer(self, stack: str, index: int) -> int:
        return self.spec.kv_sources[index]

    @classmethod
    def has_attention(cls, spec: LlamaSpec, index: int) -> bool:
        return True

    @classmethod
    def embedding_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, LaterGemmaSpec)
        width, size = spec.num_layers * spec.input_size, spec.input_size
        tables = super().embedding_tensors(spec)
        if not size:
            return tables
        table, project = "model.embed_tokens_per_layer.weight", "model.per_layer_model_projection"
        return (
            *tables,
            TensorSpec("inputs", (spec.input_vocab, width), (table,), INT8),
            *linear_tensors("project_inputs", (width, spec.hidden_size), (project,), has_bias=False),
            TensorSpec("inputs_norm", (size,), ("model.per_layer_projection_norm.weight",)),
        )

    @classmethod
    def layer_tensors(cls, spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, LaterGemmaSpec)
        tensors, prefix = super().layer_tensors(spec, index), f"model.layers.{index}."
        if not spec.input_size:
            return tensors
        hidden, size = spec.hidden_size, spec.input_size
        gate, out = f"{prefix}per_layer_input_gate", f"{prefix}per_layer_projection"
        return (
            *tensors,
            *linear_tensors("input_gate", (size, hidden), (gate,), has_bias=False),
            *linear_tensors("input_out", (hidden, size), (out,), has_bias=False),
            *RMS.tensors("input_out_norm", (hidden,), f"{prefix}post_per_layer_input_norm"),
        )

    @classmethod
    def attention_tensors(cls, spec: LlamaSpec, index: int, prefix: str) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, LaterGemmaSpec)
        (num_kv_heads, head_dim), hidden, has_bias = spec.kv_shape(index), spec.hidden_size, spec.has_qkv_bias
        parts = tuple(prefix + part for part in ("k_proj", "v_proj"))
        parts = parts[:1] if index in spec.values_of_keys else parts
        shape = (len(parts) * num_kv_heads * head_dim, hidden)
        own = (
            *linear_tensors("kv", shape, parts, has_bias),
            *RMS.tensors("k_norm", (head_dim,), f"{prefix}k_norm"),
        )
        q_rows = spec.num_heads * head_dim
        return (
            *linear_tensors("q", (q_rows, hidden), (f"{prefix}q_proj",), has_bias),
            *RMS.tensors("q_norm", (head_dim,), f"{prefix}q_norm"),
            *(own if spec.kv_sources[index] == index else ()),
            *linear_tensors("o", (hidden, q_rows), (f"{prefix}o_proj",), spec.has_o_bias),
        )

    @classmethod
    def mlp_tensors(cls, spec: LlamaSpec, index: int, prefix: str) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, LaterGemmaSpec)
        return super().mlp_tensors(replace(spec, intermediate_size=spec.mlp_sizes[index]), index, prefix)

    @classmethod
    def model_tensors(cls, spec: ModelSpec) -> ModelTensors:
        """Checkpoints have keys and values also of layers that read those of another layer."""
        assert isinstance(spec, LaterGemmaSpec)
        tensors = super().model_tensors(spec)
        idle = tuple(
            rf"^model\.layers\.{index}\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\."
            for index, source in enumerate(spec.kv_sources)
            if source != index
        )
        return replace(tensors, unused=tensors.unused + idle)

    def embed(
        self, weights: LayerWeights, input_ids: Tensor, positions: Tensor, given: GivenRows | None = None
    ) -> Tensor:
        hidden = super().embed(weights, input_ids, positions, given)
        state = self.spread(weights, hidden)
        if not self.spec.input_size:
            return state
        return torch.cat((state, self._inputs(weights, hidden, input_ids, given)), dim=1)

    def spread(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        """What goes through all layers, of embedded tokens: [num_tokens, state_width]."""
        return hidden

    def _inputs(
        self, weights: LayerWeights, hidden: Tensor, input_ids: Tensor, given: GivenRows | None
    ) -> Tensor:
        """The inputs of all layers, [num_tokens, num_layers * input_size]. A token's own input is added to
        what its embedding gives, and a given vector has no token."""
        spec, kernels = self.spec, self.host_kernels
        found = kernels.linear(hidden, weights.matrix("project_inputs")) * spec.hidden_size**-0.5
        rows = found.view(-1, spec.input_size)
        found = kernels.rms_norm(rows, weights.vector("inputs_norm"), spec.norm_eps).view(found.shape)
        known = torch.where((input_ids >= 0) & (input_ids < spec.input_vocab), input_ids, 0)
        own = weights.matrix("inputs").look_up(known) * math.sqrt(spec.input_size)
        both: Tensor = (found + own) * 2.0**-0.5
        if given is not None:
            both[given.rows] = found[given.rows]
        return both

    def take_input(self, weights: LayerWeights, x: Tensor, inputs: Tensor) -> Tensor:
        """What a layer's input adds, [num_tokens, hidden_size], where x is the hidden state."""
        gate = self.kernels.activation(self.project(weights, "input_gate", x), self.spec.activation)
        return self._norm("input_out_norm", weights, self.project(weights, "input_out", gate * inputs))

    def parted(self, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What goes through all layers, the input of the next layer, and those of the layers after it."""
        width, size = self.spec.state_width, self.spec.input_size
        return row[:, :width].contiguous(), row[:, width : width + size].contiguous(), row[:, width + size :]

    def attention(
        self, index: int, weights: LayerWeights, x: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        kernels, rope, (_, head_dim) = self.kernels, self.ropes[index], self.spec.kv_shape(index)
        q = self.project(weights, "q", x).view(-1, self.spec.num_heads, head_dim)
        q = self._norm("q_norm", weights, q)
        assert rope is not None
        rope.turn(kernels, q, batch)
        if "kv" in weights:
            self._write(index, weights, x, kv, batch)
        return self.project(weights, "o", kernels.paged_attention(q, kv, batch, self.attentions[index]))

    def _write(self, index: int, weights: LayerWeights, x: Tensor, kv: LayerKV, batch: BatchLayout) -> None:
        """Keys and values of a layer that has its own."""
        kernels, rope, (num_kv_heads, head_dim) = self.kernels, self.ropes[index], self.spec.kv_shape(index)
        heads = self.project(weights, "kv", x).view(len(x), -1, head_dim)
        k, v = heads[:, :num_kv_heads].contiguous(), heads[:, -num_kv_heads:].contiguous()
        k = self._norm("k_norm", weights, k)
        assert rope is not None
        rope.turn(kernels, k, batch)
        v = VALUE_NORM.apply(kernels, weights, "v_norm", v, self.spec.norm_eps)
        batch.write_kv(kernels, k, v, kv)


def kv_sources(kinds: tuple[str, ...], num_shared: int) -> tuple[int, ...]:
    """Per layer: the layer whose keys and values it reads. The last `num_shared` layers read those of the
    last layer before them that is of their kind. Raises InvalidConfig if there is none."""
    first = len(kinds) - num_shared
    last = {kind: index for index, kind in enumerate(kinds[: max(first, 0)])}
    if not all(kind in last for kind in kinds):
        expected = (
            f"so few that each kind of layers is among the first ones ({', '.join(sorted(set(kinds)))})"
        )
        refuse("num_kv_shared_layers", num_shared, expected)
    return tuple(index if index < first else last[kind] for index, kind in enumerate(kinds))


def mean_square(x: Tensor) -> Tensor:
    """[..., width] -> [..., 1]. Sums are in float64: their last bits depend on the number of rows, and
    rounding to float32 removes them."""
    return x.double().square().mean(-1, keepdim=True).float()
