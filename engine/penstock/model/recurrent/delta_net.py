"""GatedDeltaNet: the linear attention of Qwen3-Next and Qwen3.5 (arXiv 2412.06464)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from penstock.kernels import BatchLayout, Kernels, LayerKV
from penstock.kernels.sublayers.mixer import Mixer
from penstock.model.architecture import CONV, linear_tensors
from penstock.model.config_values import count, refuse
from penstock.model.family import Family
from penstock.model.recurrent.form import Fed, conv_tensors, convolve, recur
from penstock.spec import ModelSpec
from penstock.state_layout import StateLayout, StatePart
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec

#: Of the lengths of q and k.
LENGTH_EPS = 1e-6


@dataclass(frozen=True)
class GatedDeltaNet:
    """A state [key_dim, value_dim] of each head, which forgets by a gate and corrects what it answers to a
    key. A head of q and k serves several heads of v."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    #: Tokens that the convolution of q, k and v sees.
    width: int
    #: The checkpoint has the rows of q, k, v and the output's gate in one tensor, those of each key head
    #: together, and those of beta and the decay likewise (Qwen3-Next). Otherwise the gate, beta and the decay
    #: have tensors of their own.
    is_grouped: bool = False
    #: beta lies between 0 and this. A state may turn a key's answer around where beta is more than 1.
    beta_factor: float = 1.0
    #: Of the norm after the recurrence; None: that of the model's norms.
    norm_eps: float | None = None

    @classmethod
    def of(cls, config: dict[str, Any], is_grouped: bool = False) -> Self:
        """The sizes by their names in a config.json. Raises InvalidConfig."""
        keys = count(config, "linear_num_key_heads", default=16)
        values = count(config, "linear_num_value_heads", default=32)
        if values % keys:
            refuse("linear_num_value_heads", values, f"a multiple of linear_num_key_heads, {keys}")
        return cls(
            keys,
            values,
            count(config, "linear_key_head_dim", default=128),
            count(config, "linear_value_head_dim", default=128),
            count(config, "linear_conv_kernel_dim", default=4),
            is_grouped,
        )

    @property
    def layout(self) -> StateLayout:
        heads, k, v = self.num_value_heads, (self.num_key_heads, self.key_dim), self.value_dim
        rows = StatePart("rows", (self.width - 1, self._num_channels), fed=((self._num_channels,),))
        fed = (k, (heads, v), (heads,), (heads,))
        return StateLayout((rows, StatePart("heads", (heads, self.key_dim, v), fed)))

    @property
    def _num_keys(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def _num_values(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def _num_channels(self) -> int:
        """Numbers of q, k and v of a token, which the convolution mixes with those of the tokens before."""
        return 2 * self._num_keys + self._num_values

    def tensors(self, spec: ModelSpec, prefix: str) -> tuple[TensorSpec, ...]:
        hidden, heads, part = spec.hidden_size, self.num_value_heads, f"{prefix}linear_attn."

        def matrix(name: str, own: str, rows: int, inputs: int = hidden) -> tuple[TensorSpec, ...]:
            return linear_tensors(name, (rows, inputs), (part + own,), has_bias=False)

        def gates(*names: str) -> TensorSpec:
            """Beta and the decay decide how long a state remembers: their weights stay float32."""
            return TensorSpec("gates", (2 * heads, hidden), tuple(f"{part}{name}.weight" for name in names))

        if self.is_grouped:
            inputs = matrix("mixer_in", "in_proj_qkvz", self._num_channels + self._num_values)
        else:
            inputs = matrix("mixer_in", "in_proj_qkv", self._num_channels)
            inputs += matrix("mixer_gate", "in_proj_z", self._num_values)
        return (
            *inputs,
            gates("in_proj_ba") if self.is_grouped else gates("in_proj_b", "in_proj_a"),
            *conv_tensors(self._num_channels, self.width, f"{part}conv1d", has_bias=False),
            TensorSpec("dt_bias", (heads,), (f"{part}dt_bias",)),
            TensorSpec("a_log", (heads,), (f"{part}A_log",)),
            TensorSpec("mixer_norm", (self.value_dim,), (f"{part}norm.weight",)),
            *matrix("mixer_out", "out_proj", hidden, self._num_values),
        )

    def mix(
        self, family: Family, weights: LayerWeights, x: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        kernels = family.kernels
        eps = family.spec.norm_eps if self.norm_eps is None else self.norm_eps
        mixed, gate = self._inputs(family, weights, x)
        beta, decay = self._gates(family, weights, x)
        mixed = kernels.activation(convolve(family, weights, mixed, kv, batch), "silu")
        q, k, v = mixed.split_with_sizes((self._num_keys, self._num_keys, self._num_values), dim=1)
        q, k = (each.reshape(-1, self.num_key_heads, self.key_dim) for each in (q, k))
        q, k = of_length(kernels, q, self.key_dim**-0.5), of_length(kernels, k, 1.0)
        v = v.view(-1, self.num_value_heads, self.value_dim)
        y = recur(family, Fed(q, k, v, decay, beta), kv, batch)
        y = kernels.rms_norm(y, weights.vector("mixer_norm"), eps).flatten(1)
        return family.project(weights, "mixer_out", kernels.activation(gate, "silu") * y)

    def _inputs(self, family: Family, weights: LayerWeights, x: Tensor) -> tuple[Tensor, Tensor]:
        """q, k and v side by side [num_tokens, channels], and the output's gate [num_tokens, values]."""
        mixed = family.project(weights, "mixer_in", x)
        if not self.is_grouped:
            return mixed, family.project(weights, "mixer_gate", x)
        values = self._num_values // self.num_key_heads
        sizes = (self.key_dim, self.key_dim, values, values)
        q, k, v, gate = mixed.view(len(x), self.num_key_heads, -1).split_with_sizes(sizes, dim=2)
        return torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), dim=1), gate.flatten(1)

    def _gates(self, family: Family, weights: LayerWeights, x: Tensor) -> tuple[Tensor, Tensor]:
        """beta and the decay [num_tokens, num_value_heads]."""
        logits = family.kernels.router_scores(x, weights.vector("gates"), None, "none")
        if self.is_grouped:
            logits = logits.view(len(x), self.num_key_heads, 2, -1).transpose(1, 2).reshape(len(x), -1)
        beta, step = logits.chunk(2, dim=1)
        _, decay = family.kernels.decays(step, weights.vector("dt_bias"), weights.vector("a_log"))
        return family.kernels.gates(beta, self.beta_factor), decay

    def mixer(self, spec: ModelSpec, weights: LayerWeights) -> Mixer:
        return Mixer(
            kind="delta net",
            into=weights.matrix("mixer_in"),
            gate=None if self.is_grouped else weights.matrix("mixer_gate"),
            out=weights.matrix("mixer_out"),
            gates=weights.vector("gates"),
            conv=weights.vector(CONV),
            dt_bias=weights.vector("dt_bias"),
            a_log=weights.vector("a_log"),
            norm=weights.vector("mixer_norm"),
            norm_eps=spec.norm_eps if self.norm_eps is None else self.norm_eps,
            num_heads=self.num_value_heads,
            num_key_heads=self.num_key_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            is_grouped=self.is_grouped,
            beta_factor=self.beta_factor,
            lengths=(length_weight(self.key_dim, self.key_dim**-0.5), length_weight(self.key_dim, 1.0)),
            length_eps=LENGTH_EPS / self.key_dim,
        )


def of_length(kernels: Kernels, x: Tensor, length: float) -> Tensor:
    """Each head of q or k [num_tokens, num_heads, dim], made so long. An RMS norm makes a vector as long as
    the root of its dimension, and its eps is a share of that."""
    dim = x.shape[-1]
    return kernels.rms_norm(x, x.new_full((dim,), length_weight(dim, length)), LENGTH_EPS / dim)


def length_weight(dim: int, length: float) -> float:
    """The weight of an RMS norm that makes vectors so long."""
    return float(length * dim**-0.5)
