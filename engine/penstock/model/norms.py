"""Norm and HeadNorms: kinds of norms as values, with the tensors that they have and what they compute."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels import Kernels
from penstock.spec import ModelSpec
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec


@dataclass(frozen=True)
class Norm:
    """An RMS norm (arXiv 1910.07467) or, if it is centred, a layer norm (arXiv 1607.06450)."""

    is_centred: bool = False
    has_weight: bool = True
    #: Only a centred norm may have a bias.
    has_bias: bool = False
    #: Checkpoints keep each weight as its difference from this number: 0, or 1.
    offset: float = 0.0

    def tensors(self, name: str, shape: tuple[int, ...], *parts: str) -> tuple[TensorSpec, ...]:
        """The norm's weight and bias, from the modules `parts` of a checkpoint."""
        weights, biases = tuple(f"{part}.weight" for part in parts), tuple(f"{part}.bias" for part in parts)
        weight, bias = TensorSpec(name, shape, weights), TensorSpec(f"{name}.bias", shape, biases)
        return (weight,) * self.has_weight + (bias,) * self.has_bias

    def apply(self, kernels: Kernels, weights: LayerWeights, name: str, x: Tensor, eps: float) -> Tensor:
        """The last dimension of x, normalized. Where there are more weights than this dimension has, each
        head has weights of its own."""
        weight = weights.optional(name)
        if weight is not None and weight.numel() > x.shape[-1]:
            return self._plain(kernels, x, eps) * (weight.view(x.shape[-2:]) + self.offset)
        if weight is None:
            return self._plain(kernels, x, eps)
        if not self.is_centred:
            return kernels.rms_norm(x, weight, eps, self.offset)
        shifted = weight + self.offset if self.offset else weight
        return kernels.layer_norm(x, shifted, weights.optional(f"{name}.bias"), eps)

    def _plain(self, kernels: Kernels, x: Tensor, eps: float) -> Tensor:
        """Without weights."""
        if self.is_centred:
            return kernels.layer_norm(x, None, None, eps)
        return kernels.rms_norm(x, x.new_ones(x.shape[-1]), eps)


#: Llama's norm.
RMS = Norm()


@dataclass(frozen=True)
class HeadNorms:
    """The norms of q and k, "q_norm" and "k_norm"."""

    norm: Norm = RMS
    #: All heads of a token are one row, and are normalized together.
    is_whole: bool = False
    #: Each head has weights of its own: [num_heads, head_dim].
    has_own_weights: bool = False
    is_after_rope: bool = False

    def tensors(self, spec: ModelSpec, q_part: str, k_part: str) -> tuple[TensorSpec, ...]:
        """The norms' tensors, from two modules of a checkpoint."""
        q_shape, k_shape = self._shape(spec.num_heads, spec), self._shape(spec.num_kv_heads, spec)
        return self.norm.tensors("q_norm", q_shape, q_part) + self.norm.tensors("k_norm", k_shape, k_part)

    def _shape(self, num_heads: int, spec: ModelSpec) -> tuple[int, ...]:
        if self.is_whole:
            return (num_heads * spec.head_dim,)
        return (num_heads, spec.head_dim) if self.has_own_weights else (spec.head_dim,)

    def apply(self, kernels: Kernels, weights: LayerWeights, name: str, x: Tensor, eps: float) -> Tensor:
        """x [num_tokens, num_heads, head_dim], normalized."""
        rows = x.flatten(1) if self.is_whole else x.contiguous()
        return self.norm.apply(kernels, weights, name, rows, eps).view(x.shape)
