"""RecurrentForm: what a layer computes in place of attention, or beside it, with a recurrent state of each
sequence."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.kernels import BatchLayout, LayerKV
from penstock.model.family import Family
from penstock.spec import ModelSpec
from penstock.state_layout import StateLayout
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec

#: The tensor that every form has, and no other layer: the weights of its convolution.
CONV = "conv"


class RecurrentForm(Protocol):
    """The sizes of a recurrence. Tokens of a sequence are computed one after the other, so a chunk of a
    prompt goes on where the last one ended, and its bits don't depend on the chunks."""

    @property
    def layout(self) -> StateLayout:
        """The state of a sequence in one layer."""

    def tensors(self, spec: ModelSpec, prefix: str) -> tuple[TensorSpec, ...]:
        """The tensors of mix(), whose names in a checkpoint begin with `prefix`, that of the layer."""

    def mix(
        self, family: Family, weights: LayerWeights, x: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        """What the recurrence makes of normed x [num_tokens, hidden_size], with the output projection."""


def conv_tensors(channels: int, width: int, part: str, has_bias: bool) -> tuple[TensorSpec, ...]:
    """The weights of a short convolution, and its bias."""
    weight = TensorSpec(CONV, (channels, 1, width), (f"{part}.weight",))
    bias = TensorSpec(f"{CONV}.bias", (channels,), (f"{part}.bias",))
    return (weight, bias) if has_bias else (weight,)


def convolve(family: Family, weights: LayerWeights, x: Tensor, kv: LayerKV, batch: BatchLayout) -> Tensor:
    """The short convolution of x [num_tokens, channels], whose state is the layer's first."""
    weight = weights.vector(CONV)[:, 0].t().contiguous()
    return family.kernels.short_conv(x, weight, weights.optional(f"{CONV}.bias"), kv.states[0], batch)
