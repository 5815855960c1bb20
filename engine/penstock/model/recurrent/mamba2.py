"""Mamba2: the state space of Granite 4, Bamba, Falcon-H1 and Nemotron-H (arXiv 2405.21060)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels import BatchLayout, LayerKV
from penstock.kernels.sublayers.mixer import Mixer
from penstock.model.architecture import CONV, linear_tensors
from penstock.model.family import Family
from penstock.model.recurrent.form import Fed, conv_tensors, convolve, recur
from penstock.spec import ModelSpec
from penstock.state_layout import StateLayout, StatePart
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec


@dataclass(frozen=True)
class Mamba2:
    """A state [state_size, head_dim] of each head: it forgets by a gate, adds what a token brings, and is
    read by the token's own c. A group of heads shares b and c."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    #: Tokens that the convolution sees.
    width: int
    has_conv_bias: bool = True
    has_in_bias: bool = False
    has_out_bias: bool = False
    #: The norm of each group's outputs, after their gate or before it; None: there is no norm.
    norm: str | None = "behind"
    #: Steps lie between these two.
    step_limits: tuple[float, float] = (0.0, math.inf)
    #: The input is multiplied by the first of these, and its products, which are the gate, x, b, c and the
    #: steps, by the others (Falcon-H1).
    in_factors: tuple[float, ...] = ()
    #: The beginning of the tensors' names, after that of a layer.
    part: str = "mamba."

    @property
    def _num_values(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def _num_channels(self) -> int:
        """Numbers of x, b and c of a token, which the convolution mixes with those of the tokens before."""
        return self._num_values + 2 * self.num_groups * self.state_size

    @property
    def layout(self) -> StateLayout:
        heads, k = self.num_heads, (self.num_groups, self.state_size)
        rows = StatePart("rows", (self.width - 1, self._num_channels), fed=((self._num_channels,),))
        fed = (k, (heads, self.head_dim), (heads,))
        return StateLayout((rows, StatePart("heads", (heads, self.state_size, self.head_dim), fed)))

    def tensors(self, spec: ModelSpec, prefix: str) -> tuple[TensorSpec, ...]:
        hidden, heads, part = spec.hidden_size, self.num_heads, prefix + self.part
        rows = self._num_values + self._num_channels + heads
        norm = TensorSpec("mixer_norm", (self._num_values,), (f"{part}norm.weight",))
        return (
            *linear_tensors("mixer_in", (rows, hidden), (f"{part}in_proj",), self.has_in_bias),
            *conv_tensors(self._num_channels, self.width, f"{part}conv1d", self.has_conv_bias),
            TensorSpec("dt_bias", (heads,), (f"{part}dt_bias",)),
            TensorSpec("a_log", (heads,), (f"{part}A_log",)),
            TensorSpec("skip", (heads,), (f"{part}D",)),
            *((norm,) if self.norm else ()),
            *linear_tensors("mixer_out", (hidden, self._num_values), (f"{part}out_proj",), self.has_out_bias),
        )

    def mix(
        self, family: Family, weights: LayerWeights, x: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        kernels = family.kernels
        gate, mixed, step = self._inputs(family, weights, x)
        mixed = kernels.activation(convolve(family, weights, mixed, kv, batch), "silu")
        num_keys = self.num_groups * self.state_size
        x, b, c = mixed.split_with_sizes((self._num_values, num_keys, num_keys), dim=1)
        x = x.view(-1, self.num_heads, self.head_dim)
        b, c = (each.view(-1, self.num_groups, self.state_size) for each in (b, c))
        biases, rates = weights.vector("dt_bias"), weights.vector("a_log")
        step, decay = kernels.decays(step, biases, rates, self.step_limits)
        y = recur(family, Fed(c, b, x * step[..., None], decay), kv, batch)
        y = (y + x * weights.vector("skip")[:, None]).flatten(1)
        return family.project(weights, "mixer_out", self._gated(family, weights, y, gate))

    def mixer(self, spec: ModelSpec, weights: LayerWeights) -> Mixer:
        return Mixer(
            kind="mamba2",
            into=weights.matrix("mixer_in"),
            in_bias=weights.optional("mixer_in.bias"),
            out=weights.matrix("mixer_out"),
            out_bias=weights.optional("mixer_out.bias"),
            conv=weights.vector(CONV),
            conv_bias=weights.optional(f"{CONV}.bias"),
            dt_bias=weights.vector("dt_bias"),
            a_log=weights.vector("a_log"),
            skip=weights.vector("skip"),
            norm=weights.vector("mixer_norm") if self.norm else None,
            norm_eps=spec.norm_eps,
            is_norm_before=self.norm == "before",
            num_heads=self.num_heads,
            num_key_heads=self.num_groups,
            key_dim=self.state_size,
            value_dim=self.head_dim,
            step_limits=self.step_limits,
            factors=self.in_factors,
        )

    def _inputs(self, family: Family, weights: LayerWeights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gate [num_tokens, values]; x, b and c side by side [num_tokens, channels]; the steps
        [num_tokens, num_heads]."""
        if self.in_factors:
            x = x * self.in_factors[0]
        found = family.project(weights, "mixer_in", x)
        keys = self.num_groups * self.state_size
        if self.in_factors:
            sizes = (self._num_values, self._num_values, keys, keys, self.num_heads)
            for part, factor in zip(found.split_with_sizes(sizes, dim=1), self.in_factors[1:], strict=True):
                part *= factor
        sizes3 = (self._num_values, self._num_channels, self.num_heads)
        gate, mixed, step = found.split_with_sizes(sizes3, dim=1)
        return gate, mixed, step

    def _gated(self, family: Family, weights: LayerWeights, y: Tensor, gate: Tensor) -> Tensor:
        """The outputs with their gate and their norm, [num_tokens, values]."""
        factor = family.kernels.activation(gate, "silu")
        if self.norm is None:
            return y * factor
        if self.norm == "before":
            return self._normed(family, weights, y) * factor
        return self._normed(family, weights, y * factor)

    def _normed(self, family: Family, weights: LayerWeights, y: Tensor) -> Tensor:
        groups = y.view(len(y), self.num_groups, -1)
        plain = family.kernels.rms_norm(groups, torch.ones_like(groups[0, 0]), family.spec.norm_eps)
        return plain.flatten(1) * weights.vector("mixer_norm")
