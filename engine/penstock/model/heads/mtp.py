"""MTPHead: a layer that some checkpoints hold after those of the model, and that predicts one token further
(multi-token prediction: Gloeckle et al. 2024, arXiv 2404.19737; DeepSeek V3, arXiv 2412.19437, 2.2).

The layer gets, for each token but the first, the token's embedding and the model's last hidden state of the
token before, after the final norm. It has a projection of the two, keys and values of its own, and a final
norm; embedding and head are the model's. Applied to its own last state and its own guess, it predicts a
further token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.model.architecture import linear_tensors
from penstock.model.family import Family
from penstock.model.norms import Norm
from penstock.spec import ModelSpec
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec


@dataclass(frozen=True)
class MTPHead:
    """Names of a head's modules in a checkpoint, and in what heads differ."""

    #: The beginning of the names of its layer, which are those of the model's layers otherwise.
    layer: str
    embedding_norm: str
    hidden_norm: str
    #: [hidden_size, 2 * hidden_size]
    projection: str
    final_norm: str
    #: The projection's first inputs are the hidden state; otherwise they are the embedding.
    is_hidden_first: bool = False
    #: What the head gets of itself, to predict a further token, is after its final norm, otherwise before.
    is_normed: bool = False

    @classmethod
    def of_deepseek(cls, index: int) -> MTPHead:
        """DeepSeek V3's names, which GLM-4.5 has, too: the layer counts on after those of the model."""
        layer = f"model.layers.{index}."
        return cls(layer, f"{layer}enorm", f"{layer}hnorm", f"{layer}eh_proj", f"{layer}shared_head.norm")

    @classmethod
    def of_qwen(cls) -> MTPHead:
        """The names of Qwen3-Next and Qwen3.5, whose head has a layer with attention."""
        norms = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
        return cls("mtp.layers.0.", *norms, "mtp.fc", "mtp.norm", is_normed=True)

    def tensors(self, spec: ModelSpec, norm: Norm) -> tuple[TensorSpec, ...]:
        """What join() needs."""
        width = spec.hidden_size
        return (
            *norm.tensors("embedding_norm", (width,), self.embedding_norm),
            *norm.tensors("hidden_norm", (width,), self.hidden_norm),
            *linear_tensors("projection", (width, 2 * width), (self.projection,), has_bias=False),
        )

    def join(
        self, family: Family, norm: Norm, weights: LayerWeights, vectors: Tensor, hidden: Tensor
    ) -> Tensor:
        """What the layer gets of tokens' embeddings and hidden states, both float32 [num_tokens,
        hidden_size]."""
        kernels, eps = family.host_kernels, family.spec.norm_eps
        vectors = norm.apply(kernels, weights, "embedding_norm", vectors, eps)
        hidden = norm.apply(kernels, weights, "hidden_norm", hidden, eps)
        pair = (hidden, vectors) if self.is_hidden_first else (vectors, hidden)
        return kernels.linear(torch.cat(pair, dim=1), weights.matrix("projection"), None)
