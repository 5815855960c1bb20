"""Blocks that layers of several families share: functions of (weights, inputs), with the kernels handed
in."""

from __future__ import annotations

from torch import Tensor

from penstock.errors import UnsupportedModel
from penstock.kernels import (
    ActivationFunction,
    BatchLayout,
    LayerKV,
)
from penstock.model.family import Family
from penstock.weights.layer_weights import LayerWeights

ACTIVATION_FUNCTIONS: dict[str, ActivationFunction] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
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


def attend(
    family: Family,
    index: int,
    weights: LayerWeights,
    x: Tensor,
    kv: LayerKV,
    batch: BatchLayout,
    head_norm_offset: float | None = None,
    is_per_head: bool = False,
) -> Tensor:
    """Self-attention of normed x [num_tokens, hidden_size], with the output projection.

    `weights` has the matrices "qkv" (q rows, k rows, v rows) and "o", with optional biases. With
    `head_norm_offset`, "q_norm" and "k_norm" first rms-normalize each head of q and k; the offset, 0 or 1, is
    added to their weights. With `is_per_head`, the rows of "qkv" are q, k and v of the first head, then q, k
    and v of the second, and so on.
    """
    spec, kernels = family.spec, family.kernels
    num_heads, num_kv_heads = spec.num_heads, spec.num_kv_heads
    qkv = family.project(weights, "qkv", x)
    if is_per_head:
        q, k, v = (part.contiguous() for part in qkv.view(-1, num_heads, 3, spec.head_dim).unbind(2))
    else:
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, spec.head_dim)
        q, k, v = heads.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if head_norm_offset is not None:
        offset = head_norm_offset
        q = kernels.rms_norm(q.contiguous(), weights.vector("q_norm"), spec.norm_eps, offset)
        k = kernels.rms_norm(k.contiguous(), weights.vector("k_norm"), spec.norm_eps, offset)
    if family.rope_table is not None:
        cos, sin = family.rope_table.at(batch)
        kernels.rope(q, cos, sin)
        kernels.rope(k, cos, sin)
    kernels.write_kv(k, v, kv, batch.slot_mapping)
    mixed = kernels.paged_attention(q, kv, batch, family.attentions[index])
    return family.project(weights, "o", mixed)


def gated_mlp(family: Family, weights: LayerWeights, x: Tensor, function: ActivationFunction) -> Tensor:
    """down(f(gate x) * up x). The matrix "gate_up" has the gate's rows first (arXiv 2002.05202)."""
    gate_up = family.project(weights, "gate_up", x)
    return family.project(weights, "down", family.kernels.gated_activation(gate_up, function))


def mlp(family: Family, weights: LayerWeights, x: Tensor, function: ActivationFunction) -> Tensor:
    """down(f(up x))."""
    up = family.project(weights, "up", x)
    return family.project(weights, "down", family.kernels.activation(up, function))
