"""Blocks that layers of several families share: functions of (weights, inputs), with the kernels handed
in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from penstock.errors import UnsupportedModel
from penstock.kernels import ActivationFunction, BatchLayout, GatedFunction, LayerKV
from penstock.model.architecture import linear_tensors
from penstock.model.family import Family
from penstock.model.norms import HeadNorms
from penstock.spec import ModelSpec
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec

ACTIVATION_FUNCTIONS: dict[str, ActivationFunction] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def activation_function(name: str) -> ActivationFunction:
    """The activation function by its name in a config.json. Raises UnsupportedModel."""
    if name not in ACTIVATION_FUNCTIONS:
        raise UnsupportedModel(
            f"activation {name!r} is not supported. Supported are: {', '.join(ACTIVATION_FUNCTIONS)}"
        )
    return ACTIVATION_FUNCTIONS[name]


def layer_norm(family: Family, name: str, weights: LayerWeights, x: Tensor) -> Tensor:
    """The layer norm that layer_norm_tensors() declared."""
    bias = weights.optional(f"{name}.bias")
    return family.kernels.layer_norm(x, weights.vector(name), bias, family.spec.norm_eps)


@dataclass(frozen=True)
class QueryGrowth:
    """q at position p is multiplied by 1 + rate * log(1 + floor((p + first) / length)), so that attention
    over a long context stays sharp (scalable softmax, arXiv 2501.19399)."""

    rate: float
    length: int
    first: int = 0

    def apply(self, q: Tensor, positions: Tensor) -> Tensor:
        """q [num_tokens, num_heads, head_dim] and its positions. The logarithm is computed in float64: its
        last bits depend on where in a tensor a number lies, and rounding to float32 removes them."""
        steps = (positions + self.first).div(self.length, rounding_mode="floor").double()
        return q * (1.0 + self.rate * steps.log1p()).float().view(-1, 1, 1)


@dataclass(frozen=True)
class OutputGate:
    """A gate of attention's output with a matrix of its own, "out_gate": a function of its product with x
    multiplies each number of the output, or each head."""

    #: The module in a checkpoint.
    part: str
    function: Literal["sigmoid", "softplus"] = "sigmoid"
    is_per_head: bool = False

    def tensors(self, prefix: str, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        """Of a layer with spec.num_heads heads, whose names in a checkpoint begin with `prefix`."""
        rows = spec.num_heads * (1 if self.is_per_head else spec.head_dim)
        return linear_tensors("out_gate", (rows, spec.hidden_size), (prefix + self.part,), has_bias=False)

    def apply(self, family: Family, weights: LayerWeights, x: Tensor, attended: Tensor) -> Tensor:
        """attended [num_tokens, num_heads * head_dim], gated by normed x [num_tokens, hidden_size]. softplus
        is computed in float64, as the logarithm of QueryGrowth is, and for the same reason."""
        gate = family.project(weights, "out_gate", x)
        if self.function == "sigmoid":
            gate = family.kernels.activation(gate, "sigmoid")
        else:
            gate = torch.nn.functional.softplus(gate.double()).float()
        return (attended.view(*gate.shape, -1) * gate[..., None]).flatten(1)


@dataclass(frozen=True)
class AttentionForm:
    """What a family's attention does with q, k and v before they meet. The defaults are Llama's."""

    #: The rows of "qkv" are, for each KV head, its heads of q, then k, then v. Otherwise all q come first,
    #: then all k, then all v.
    is_grouped: bool = False
    #: q, k and v are limited to this size; 0 is no limit.
    clip: float = 0.0
    norms: HeadNorms | None = None
    #: Of q after rope and norms.
    growth: QueryGrowth | None = None
    #: Each head has a score beside those of its keys, "sinks" (AttentionSpec).
    has_sinks: bool = False
    #: "qkv" has rows of a gate after those of each head of q. The sigmoid of the gate multiplies the head's
    #: output.
    has_gate: bool = False
    out_gate: OutputGate | None = None


PLAIN, GROUPED = AttentionForm(), AttentionForm(is_grouped=True)


def attend(
    family: Family,
    index: int,
    weights: LayerWeights,
    x: Tensor,
    kv: LayerKV,
    batch: BatchLayout,
    form: AttentionForm = PLAIN,
) -> Tensor:
    """Self-attention of normed x [num_tokens, hidden_size], with the output projection.

    `weights` has the matrices "qkv" and "o", with optional biases, and the norms of `form`.
    """
    kernels, norms, rope = family.kernels, form.norms, family.ropes[index]
    qkv = family.project(weights, "qkv", x)
    if form.clip:
        qkv.clamp_(-form.clip, form.clip)
    q, k, v, gate = _heads(family, qkv, form, family.attentions[index].num_heads)
    if norms is not None and not norms.is_after_rope:
        q, k = _normed(family, weights, q, k, norms)
    if rope is not None:
        rope.turn(kernels, q, batch)
        rope.turn(kernels, k, batch)
    if norms is not None and norms.is_after_rope:
        q, k = _normed(family, weights, q, k, norms)
    if form.growth is not None:
        q = form.growth.apply(q, batch.positions)
    batch.write_kv(kernels, k, v, kv)
    spec = family.attentions[index]
    spec = replace(spec, sinks=weights.vector("sinks")) if form.has_sinks else spec
    attended = kernels.paged_attention(q, kv, batch, spec)
    if gate is not None:
        attended *= kernels.activation(gate, "sigmoid")
    if form.out_gate is not None:
        attended = form.out_gate.apply(family, weights, x, attended)
    return family.project(weights, "o", attended)


def _heads(
    family: Family, qkv: Tensor, form: AttentionForm, num_heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q [num_tokens, num_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim], and the gate
    [num_tokens, num_heads * head_dim] if the form has one. The heads of a token lie one after the other."""
    num_kv_heads, head_dim = family.spec.num_kv_heads, family.spec.head_dim
    if form.has_gate:
        heads = qkv.view(-1, 2 * (num_heads + num_kv_heads), head_dim)
        q, k, v = heads.split_with_sizes((2 * num_heads, num_kv_heads, num_kv_heads), dim=1)
        return q[:, 0::2].contiguous(), k, v, q[:, 1::2].flatten(1)
    if not form.is_grouped:
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
        q, k, v = heads.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=1)
        return q, k, v, None
    groups = qkv.view(-1, num_kv_heads, num_heads // num_kv_heads + 2, head_dim)
    q = groups[:, :, :-2].reshape(-1, num_heads, head_dim)
    return q.contiguous(), groups[:, :, -2].contiguous(), groups[:, :, -1].contiguous(), None


def _normed(
    family: Family, weights: LayerWeights, q: Tensor, k: Tensor, norms: HeadNorms
) -> tuple[Tensor, Tensor]:
    kernels, eps = family.kernels, family.spec.norm_eps
    q, k = norms.apply(kernels, weights, "q_norm", q, eps), norms.apply(kernels, weights, "k_norm", k, eps)
    return q, k


def gated_mlp(family: Family, weights: LayerWeights, x: Tensor, function: GatedFunction) -> Tensor:
    """down(f(gate x) * up x). The matrix "gate_up" has the gate's rows first (arXiv 2002.05202)."""
    sublayers = family.kernels.sublayers
    if sublayers is not None and weights.adapted is None:
        y = sublayers.gated_mlp(weights.gated, x, function)
        if y is not None:
            return y
    gate_up = family.project(weights, "gate_up", x)
    return family.project(weights, "down", family.kernels.gated_activation(gate_up, function))


def mlp(family: Family, weights: LayerWeights, x: Tensor, function: ActivationFunction) -> Tensor:
    """down(f(up x))."""
    up = family.project(weights, "up", x)
    return family.project(weights, "down", family.kernels.activation(up, function))
