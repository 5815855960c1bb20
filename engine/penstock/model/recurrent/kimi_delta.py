"""KimiDeltaAttention: the linear attention of Kimi Linear (KDA, arXiv 2510.26692) and Ling 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.kernels import BatchLayout, LayerKV
from penstock.kernels.sublayers.mixer import Mixer
from penstock.model.architecture import CONV, linear_tensors
from penstock.model.config_values import count
from penstock.model.family import Family
from penstock.model.recurrent.delta_net import LENGTH_EPS, length_weight, of_length
from penstock.model.recurrent.form import Fed, convolve, recur
from penstock.spec import ModelSpec
from penstock.state_layout import StateLayout, StatePart
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec


@dataclass(frozen=True)
class KimiDeltaAttention:
    """Gated DeltaNet whose decay has a factor for each dimension of a key. Each head has q, k and v of its
    own, of one size."""

    num_heads: int
    head_dim: int
    #: Tokens that the convolutions of q, k and v see.
    width: int
    #: The decay and the output's gate are products of two narrow matrices, whose rank is the size of a head.
    #: Otherwise each is a product with one matrix (Ling 3).
    is_narrow: bool = True
    #: The decay is e^(bound * sigmoid(e^a * step)); None: e^(-e^a * softplus(step)).
    lower_bound: float | None = None

    @classmethod
    def of(cls, config: dict[str, Any]) -> KimiDeltaAttention:
        """The sizes by their names in the config.json that transformers writes. Raises InvalidConfig."""
        return cls(
            count(config, "linear_num_heads", default=32),
            count(config, "linear_head_dim", default=128),
            count(config, "linear_conv_kernel_dim", default=4),
        )

    @property
    def layout(self) -> StateLayout:
        channels, head = 3 * self._num_values, (self.num_heads, self.head_dim)
        rows = StatePart("rows", (self.width - 1, channels), fed=((channels,),))
        heads = StatePart("heads", (*head, self.head_dim), fed=(head, head, head, (self.num_heads,)))
        return StateLayout((rows, heads))

    @property
    def _num_values(self) -> int:
        return self.num_heads * self.head_dim

    def tensors(self, spec: ModelSpec, prefix: str) -> tuple[TensorSpec, ...]:
        hidden, heads, dim, values = spec.hidden_size, self.num_heads, self.head_dim, self._num_values
        part = f"{prefix}self_attn."

        def matrix(name: str, rows: int, inputs: int, *own: str) -> tuple[TensorSpec, ...]:
            return linear_tensors(name, (rows, inputs), tuple(part + each for each in own), has_bias=False)

        def exact(name: str, shape: tuple[int, ...], *own: str) -> TensorSpec:
            """Float32: also beta and the decay, which decide how long a state remembers."""
            return TensorSpec(name, shape, tuple(part + each for each in own))

        convolutions = (f"{each}_conv1d.weight" for each in "qkv")
        if self.is_narrow:
            gates = (
                *matrix("mixer_gate_a", dim, hidden, "g_a_proj"),
                *matrix("mixer_gate_b", values, dim, "g_b_proj"),
                exact("gates", (heads + dim, hidden), "b_proj.weight", "f_a_proj.weight"),
                exact("decay_b", (values, dim), "f_b_proj.weight"),
            )
        else:  # the decay's matrix is as large as q's, and too large for float32
            gates = (
                *matrix("mixer_gate", values, hidden, "g_proj"),
                *matrix("mixer_decay", values, hidden, "f_proj"),
                exact("gates", (heads, hidden), "b_proj.weight"),
            )
        return (
            *matrix("mixer_in", 3 * values, hidden, "q_proj", "k_proj", "v_proj"),
            *gates,
            exact(CONV, (3 * values, 1, self.width), *convolutions),
            exact("dt_bias", (values,), "dt_bias"),
            exact("a_log", (1, 1, heads, 1) if self.is_narrow else (heads,), "A_log"),
            exact("mixer_norm", (dim,), "o_norm.weight"),
            *matrix("mixer_out", hidden, values, "o_proj"),
        )

    def mix(
        self, family: Family, weights: LayerWeights, x: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        kernels, dim = family.kernels, self.head_dim
        mixed, (beta, decay) = family.project(weights, "mixer_in", x), self._gates(family, weights, x)
        if self.is_narrow:
            gate = family.project(weights, "mixer_gate_b", family.project(weights, "mixer_gate_a", x))
        else:
            gate = family.project(weights, "mixer_gate", x)
        mixed = kernels.activation(convolve(family, weights, mixed, kv, batch), "silu")
        q, k, v = (each.view(-1, self.num_heads, dim) for each in mixed.chunk(3, dim=1))
        q, k = of_length(kernels, q, dim**-0.5), of_length(kernels, k, 1.0)
        y = recur(family, Fed(q, k, v, decay, beta), kv, batch)
        y = kernels.rms_norm(y, weights.vector("mixer_norm"), family.spec.norm_eps).flatten(1)
        return family.project(weights, "mixer_out", y * kernels.gates(gate))

    def _gates(self, family: Family, weights: LayerWeights, x: Tensor) -> tuple[Tensor, Tensor]:
        """beta [num_tokens, num_heads] and the decay [num_tokens, num_heads, head_dim]."""
        scores = family.kernels.router_scores
        beta, bias = scores(x, weights.vector("gates"), None, "none"), weights.vector("dt_bias")
        if self.is_narrow:
            beta, narrow = beta.split_with_sizes((self.num_heads, self.head_dim), dim=1)
            step, own = scores(narrow, weights.vector("decay_b"), bias, "none"), None
        else:
            step, own = family.project(weights, "mixer_decay", x), bias
        step = step.view(-1, self.num_heads, self.head_dim)
        _, decay = family.kernels.decays(step, own, weights.vector("a_log"), bound=self.lower_bound)
        return family.kernels.gates(beta), decay

    def mixer(self, spec: ModelSpec, weights: LayerWeights) -> Mixer:
        dim, is_narrow = self.head_dim, self.is_narrow
        return Mixer(
            kind="kimi delta",
            into=weights.matrix("mixer_in"),
            gate_in=weights.matrix("mixer_gate_a") if is_narrow else None,
            gate=weights.matrix("mixer_gate_b" if is_narrow else "mixer_gate"),
            step=None if is_narrow else weights.matrix("mixer_decay"),
            out=weights.matrix("mixer_out"),
            gates=weights.vector("gates"),
            decay=weights.vector("decay_b") if is_narrow else None,
            conv=weights.vector(CONV),
            dt_bias=weights.vector("dt_bias"),
            a_log=weights.vector("a_log"),
            norm=weights.vector("mixer_norm"),
            norm_eps=spec.norm_eps,
            num_heads=self.num_heads,
            num_key_heads=self.num_heads,
            key_dim=dim,
            value_dim=dim,
            bound=self.lower_bound,
            lengths=(length_weight(dim, dim**-0.5), length_weight(dim, 1.0)),
            length_eps=LENGTH_EPS / dim,
        )
