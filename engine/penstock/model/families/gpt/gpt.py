"""GPT: the layer of the families that resemble GPT. The layer has layer norms and a plain mlp; positions are
learned, ALiBi's or rope's."""

from __future__ import annotations

from torch import Tensor

from penstock.kernels import AttentionSpec, BatchLayout, LayerKV
from penstock.model.families.gpt.gpt_architecture import GPTArchitecture
from penstock.model.layers import attend, gated_mlp, mlp
from penstock.weights.layer_weights import LayerWeights


class GPT(GPTArchitecture):
    """GPTSpec says what a layer has. Families override what GPTSpec can't say."""

    def attention_spec(self) -> AttentionSpec:
        scale = self.spec.attention_scale
        return AttentionSpec(self.spec.num_heads, self.spec.head_dim**-0.5 if scale is None else scale)

    def scale_tokens(self, vectors: Tensor) -> Tensor:
        factor = self.spec.embedding_factor
        return vectors if factor == 1.0 else vectors * factor

    def place(self, weights: LayerWeights, vectors: Tensor, positions: Tensor) -> Tensor:
        if self.position_offset is None:
            return vectors
        return vectors + weights.vector("positions")[positions + self.position_offset]

    def layer(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        spec = self.spec
        if spec.is_post_norm:
            hidden = hidden + self.attention(index, weights, hidden, kv, batch)
            hidden = self._norm("input_norm", weights, hidden)
            return self._norm("mlp_norm", weights, hidden + self._mlp(weights, hidden))
        x = self._norm("input_norm", weights, hidden)
        attended = self.attention(index, weights, x, kv, batch)
        if spec.is_parallel:
            x = self._norm("mlp_norm", weights, hidden) if spec.has_mlp_norm else x
            return hidden + attended + self._mlp(weights, x)
        hidden = (x if spec.has_normed_residual else hidden) + attended
        x = self._norm("mlp_norm", weights, hidden)
        return (x if spec.has_normed_residual else hidden) + self._mlp(weights, x)

    def attention(
        self, index: int, weights: LayerWeights, x: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        """What attention makes of x [num_tokens, hidden_size]."""
        return attend(self, index, weights, x, kv, batch, self.spec.attention)

    def norm_final(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        return self._norm("final_norm", weights, hidden) if self.spec.has_final_norm else hidden

    def _mlp(self, weights: LayerWeights, x: Tensor) -> Tensor:
        return (gated_mlp if self.spec.has_gate else mlp)(self, weights, x, self.spec.activation)

    def _norm(self, name: str, weights: LayerWeights, x: Tensor) -> Tensor:
        return self.spec.norm.apply(self.kernels, weights, name, x, self.spec.norm_eps)
