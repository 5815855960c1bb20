"""EncoderDecoder: what models of two stacks have in common, whatever their layers compute."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from penstock.kernels import BatchLayout, LayerKV
from penstock.model.family import Family, LayerFunction
from penstock.spec import CROSS, ENCODER
from penstock.weights.layer_weights import LayerWeights


class EncoderDecoder(Family):
    """An encoder, then the projections "cross_kv", which make the encoded input's keys and values for each
    layer of the decoder, then the decoder."""

    def layer_of(self, stack: str) -> LayerFunction:
        functions: dict[str, LayerFunction] = {ENCODER: self.encode, CROSS: self._project_input}
        return functions.get(stack, self.layer)

    def kv_layer(self, stack: str, index: int) -> int:
        """A layer of the encoder needs its keys and values only while it is computed: all of them use the
        places of the decoder's first layer, which the stack CROSS fills afterwards."""
        if stack == CROSS:
            return index - self.spec.num_encoder_layers
        return 0 if stack == ENCODER else index

    @abstractmethod
    def encode(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        """A layer of the encoder, as Family.layer() has it."""

    def _project_input(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        """Keys and values of the encoded input for one layer of the decoder; `hidden` goes on as it is."""
        heads = self.project(weights, "cross_kv", hidden).view(
            -1, 2 * self.spec.num_heads, self.spec.head_dim
        )
        k, v = heads.split_with_sizes((self.spec.num_heads, self.spec.num_heads), dim=1)
        batch.write_kv(self.kernels, k, v, kv)
        return hidden

    def attend_input(
        self, index: int, weights: LayerWeights, x: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        """Attention of the decoder's x [num_tokens, hidden_size] to the encoded inputs, with the output
        projection."""
        assert batch.cross is not None, "a decoder's step says where its encoded inputs lie"
        q = self.project(weights, "cross_q", x).view(-1, self.spec.num_heads, self.spec.head_dim)
        mixed = self.kernels.paged_attention(q, kv, batch.cross, self.attentions[index])
        return self.project(weights, "cross_o", mixed)
