"""HyperConnections: several hidden states of a token, its streams, in place of one (manifold-constrained
hyper-connections of DeepSeek V4). A block reads a mixture of the streams; what it gives is spread over them,
and the streams are mixed with one another by a matrix whose rows and columns add up to one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.model.family import Family
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec


@dataclass(frozen=True)
class HyperConnections:
    """The numbers of the mixtures follow from the streams themselves, and are computed in float64: torch's
    functions of float32 round by where in a tensor a number lies."""

    num_streams: int
    #: Rounds of Sinkhorn's algorithm, which make the matrix doubly stochastic.
    num_rounds: int
    eps: float

    def tensors(self, name: str, hidden_size: int, prefix: str) -> tuple[TensorSpec, ...]:
        """Of mixed(). prefix: the beginning of the names in a checkpoint."""
        rows = (2 + self.num_streams) * self.num_streams
        return _tensors(name, (rows, self.num_streams * hidden_size), 3, prefix)

    def head_tensors(self, name: str, hidden_size: int, prefix: str) -> tuple[TensorSpec, ...]:
        """Of joined()."""
        return _tensors(name, (self.num_streams, self.num_streams * hidden_size), 1, prefix)

    def mixed(
        self, family: Family, weights: LayerWeights, name: str, streams: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What a block gets of streams [num_tokens, num_streams * hidden_size]: [num_tokens, hidden_size];
        and what spread() needs: factors [num_tokens, num_streams], and a matrix for each token."""
        count, scale = self.num_streams, weights.vector(f"{name}.scale").double()
        logits, base = self._logits(family, weights, name, streams), weights.vector(f"{name}.base").double()
        sizes = (count, count, count * count)
        pre, post, matrix = (
            own * factor + start
            for own, factor, start in zip(
                logits.split_with_sizes(sizes, 1), scale, base.split_with_sizes(sizes), strict=True
            )
        )
        matrix = matrix.view(-1, count, count).softmax(-1) + self.eps
        matrix = matrix / (matrix.sum(1, keepdim=True) + self.eps)
        for _ in range(self.num_rounds - 1):
            matrix = matrix / (matrix.sum(2, keepdim=True) + self.eps)
            matrix = matrix / (matrix.sum(1, keepdim=True) + self.eps)
        x = self._sum((pre.sigmoid() + self.eps).float(), streams)
        return x, (2 * post.sigmoid()).float(), matrix.float()

    def spread(self, streams: Tensor, given: Tensor, factors: Tensor, matrix: Tensor) -> Tensor:
        """The streams after a block that gives [num_tokens, hidden_size]."""
        return torch.cat(
            [
                given * factors[:, number, None] + self._sum(matrix[:, :, number], streams)
                for number in range(self.num_streams)
            ],
            dim=1,
        )

    def joined(self, family: Family, weights: LayerWeights, name: str, streams: Tensor) -> Tensor:
        """One hidden state of the last layer's streams."""
        logits = self._logits(family, weights, name, streams) * weights.vector(f"{name}.scale").double()
        factors = (logits + weights.vector(f"{name}.base")).sigmoid() + self.eps
        return self._sum(factors.float(), streams)

    def _logits(self, family: Family, weights: LayerWeights, name: str, streams: Tensor) -> Tensor:
        """float64 [num_tokens, rows of the matrix]."""
        kernels = family.kernels
        normed = kernels.rms_norm(streams, streams.new_ones(streams.shape[1]), family.spec.norm_eps)
        return kernels.router_scores(normed, weights.vector(f"{name}.fn"), None, "none").double()

    def _sum(self, factors: Tensor, streams: Tensor) -> Tensor:
        """The sum of streams times factors [num_tokens, num_streams], stream after stream."""
        first, *others = streams.chunk(self.num_streams, dim=1)
        total = first * factors[:, :1]
        for number, stream in enumerate(others, 1):
            total = total + stream * factors[:, number, None]
        return total


def _tensors(name: str, shape: tuple[int, int], num_scales: int, prefix: str) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec(f"{name}.fn", shape, (f"{prefix}fn",)),
        TensorSpec(f"{name}.base", shape[:1], (f"{prefix}base",)),
        TensorSpec(f"{name}.scale", (num_scales,), (f"{prefix}scale",)),
    )
