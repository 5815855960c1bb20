"""Gemma 2 (arXiv 2408.00118) has four norms in a layer, soft caps, and a window in every second layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.kernels import AttentionSpec, BatchLayout, LayerKV
from penstock.model.architecture import sliding_windows
from penstock.model.config_values import num_layers_of, number, require
from penstock.model.families.llama import Llama, LlamaSpec
from penstock.model.layers import activation_function, attend, gated_mlp
from penstock.spec import ModelSpec
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec


@dataclass(frozen=True)
class Gemma2Spec(LlamaSpec):
    """A cap of 0 means no cap."""

    attention_scale: float = 1.0
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0


class Gemma2(Llama):
    """Norm weights are stored as their difference from 1; the embedding is scaled by sqrt(hidden_size)."""

    architectures = ("Gemma2ForCausalLM",)
    spec: Gemma2Spec

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> Gemma2Spec:
        require(config, "attention_bias", False)
        require(config, "use_bidirectional_attention", None, False)
        num_layers = num_layers_of(config, "num_hidden_layers")
        types = config.get("layer_types") or [
            "full_attention" if index % 2 else "sliding_attention" for index in range(num_layers)
        ]
        base = cls._spec(
            config | {"tie_word_embeddings": config.get("tie_word_embeddings", True)},
            sliding_windows=sliding_windows(config | {"layer_types": types}, num_layers),
        )
        function = config.get("hidden_activation") or "gelu_pytorch_tanh"
        return Gemma2Spec(
            **vars(base) | {"activation": activation_function(function)},
            attention_scale=number(config, "query_pre_attn_scalar") ** -0.5,
            attention_softcap=number(config, "attn_logit_softcapping", 0.0),
            logits_softcap=number(config, "final_logit_softcapping", 0.0),
        )

    @classmethod
    def layer_tensors(cls, spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
        def norm(name: str, part: str) -> TensorSpec:
            return TensorSpec(name, (spec.hidden_size,), (f"model.layers.{index}.{part}.weight",))

        return (
            *super().layer_tensors(spec, index),
            norm("pre_mlp_norm", "pre_feedforward_layernorm"),
            norm("post_mlp_norm", "post_feedforward_layernorm"),
        )

    def attention_spec(self) -> AttentionSpec:
        spec = self.spec
        return AttentionSpec(spec.num_heads, spec.attention_scale, softcap=spec.attention_softcap)

    def scale_tokens(self, vectors: Tensor) -> Tensor:
        return vectors * math.sqrt(self.spec.hidden_size)

    def layer(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        spec = self.spec
        x = self._norm("input_norm", weights, hidden)
        x = attend(self, index, weights, x, kv, batch)
        hidden = hidden + self._norm("post_norm", weights, x)
        x = self._norm("pre_mlp_norm", weights, hidden)
        x = gated_mlp(self, weights, x, spec.activation)
        return hidden + self._norm("post_mlp_norm", weights, x)

    def norm_final(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        return self._norm("final_norm", weights, hidden)

    def head(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        logits, cap = super().head(weights, hidden), self.spec.logits_softcap
        if not cap:
            return logits
        # tanh runs in float64. torch's vector tanh and scalar tanh differ in the last bit, and an element's
        # place in the batch decides which of the two computes it; rounded to float32 the two agree.
        capped: Tensor = cap * (logits.double() / cap).tanh()
        return capped.float()

    def _norm(self, name: str, weights: LayerWeights, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, weights.vector(name), self.spec.norm_eps, offset=1.0)
