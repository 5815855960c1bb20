"""GatedConv: the short convolution of LFM2 (arXiv 2511.23404)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels import BatchLayout, LayerKV
from penstock.kernels.sublayers.mixer import Mixer
from penstock.model.architecture import CONV, linear_tensors
from penstock.model.family import Family
from penstock.model.recurrent.form import conv_tensors, convolve
from penstock.spec import ModelSpec
from penstock.state_layout import StateLayout, StatePart
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec


@dataclass(frozen=True)
class GatedConv:
    """out(c * conv(b * x)), where b, c and x are three products of the input."""

    hidden_size: int
    #: Tokens that the convolution sees.
    width: int
    has_bias: bool = False

    @property
    def layout(self) -> StateLayout:
        rows = StatePart("rows", (self.width - 1, self.hidden_size), fed=((self.hidden_size,),))
        return StateLayout((rows,))

    def tensors(self, spec: ModelSpec, prefix: str) -> tuple[TensorSpec, ...]:
        hidden, part = self.hidden_size, f"{prefix}conv."
        return (
            *linear_tensors("mixer_in", (3 * hidden, hidden), (f"{part}in_proj",), self.has_bias),
            *conv_tensors(hidden, self.width, f"{part}conv", self.has_bias),
            *linear_tensors("mixer_out", (hidden, hidden), (f"{part}out_proj",), self.has_bias),
        )

    def mix(
        self, family: Family, weights: LayerWeights, x: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        b, c, x = family.project(weights, "mixer_in", x).chunk(3, dim=1)
        return family.project(weights, "mixer_out", c * convolve(family, weights, b * x, kv, batch))

    def mixer(self, spec: ModelSpec, weights: LayerWeights) -> Mixer:
        return Mixer(
            kind="short conv",
            into=weights.matrix("mixer_in"),
            in_bias=weights.optional("mixer_in.bias"),
            out=weights.matrix("mixer_out"),
            out_bias=weights.optional("mixer_out.bias"),
            conv=weights.vector(CONV),
            conv_bias=weights.optional(f"{CONV}.bias"),
        )
