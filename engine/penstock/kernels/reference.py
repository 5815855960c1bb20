"""ReferenceKernels: the arithmetic of a layer in plain torch. Fast kernels are tested against this definition
of correct.

Batch invariance: every bit of an output row depends on the row's own input (and the K and V of its own
sequence) alone, not on the rest of the batch. Products are exact integer sums, so the order of their
additions is free. Attention goes token by token, so that a token meets the same shapes in every chunk.
"""

from __future__ import annotations

from functools import cached_property
from typing import Self, cast

import torch
from torch import Tensor

from penstock.config import COMPUTED_GROUP_SIZES, KernelChoice
from penstock.kernels.clamp_notice import ClampNotice
from penstock.kernels.experts import ExpertCalls, PlainExperts
from penstock.kernels.head_blocks import HeadBlocks
from penstock.kernels.int4_tensor import Int4Tensor, StackedMatrix
from penstock.kernels.int8_kv import quantize_kv
from penstock.kernels.low_rank import PlainLowRank
from penstock.kernels.mixture.routing import Routed, Router, Routing, plain_route
from penstock.kernels.operands import (
    KV_CODES,
    ActivationFunction,
    AttentionSpec,
    BatchLayout,
    ClampedGate,
    DistanceBias,
    GatedFunction,
    LayerKV,
    LimitedGate,
    Matrix,
    QuantizedTensor,
    RouterFunction,
)
from penstock.kernels.planes_tensor import PlanesTensor
from penstock.kernels.protocol import KernelTraits
from penstock.kernels.recurrent.plain import PlainRecurrences
from penstock.spec import INT8

#: Largest magnitude of an activation as an integer. 32512 = 127 * 256 keeps `hi` within int8.
ACTIVATION_LIMIT = {"int16": 32512.0, "int8": 127.0}
#: A scale below the smallest normal float32 has too few bits to divide by: the row counts as zero.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
#: Sums in float64 and copies take this many times the native kernels' memory.
PLAIN_WORKSPACE = 2.5


def quantize_activations(x: Tensor, activations: str) -> tuple[Tensor, Tensor]:
    """Each row as integers: float32 [num_tokens, in_features] -> (int32 of that shape, float32
    [num_tokens]), x ~ q * scale. Rounds half to even."""
    # The limit is a tensor on x's device: divided by a number of the host, CUDA multiplies by its reciprocal.
    scale = x.abs().amax(dim=-1) / x.new_tensor(ACTIVATION_LIMIT[activations])
    scale = torch.where(scale < SMALLEST_SCALE, 0.0, scale)
    scale = torch.where(scale.isfinite(), scale, torch.nan)  # NaN or infinity in x makes the whole row NaN
    divisor = torch.where(scale > 0, scale, torch.inf)
    return torch.round(x / divisor[:, None]).nan_to_num(0.0).to(torch.int32), scale


def split_rows(q: Tensor) -> tuple[Tensor, Tensor]:
    """16-bit integers as two INT8 rows, q = 256 * hi + lo."""
    hi = (q + 128) >> 8
    return hi.to(torch.int8), (q - (hi << 8)).to(torch.int8)


def scale_sums(sums: Tensor, token_scale: Tensor, weight_scale: Tensor) -> Tensor:
    """Exact integer sums (as float64) -> float32. Both scales make one float64 factor, and the scaled sum
    rounds once to float32."""
    factor = token_scale.double()[:, None] * weight_scale.double()
    return (sums * factor).float()


def linear(x: Tensor, weight: QuantizedTensor, bias: Tensor | None, activations: str) -> Tensor:
    """x W^T + bias: float32 [num_tokens, in_features] -> float32 [num_tokens, out_features]."""
    q, token_scale = quantize_activations(x, activations)
    # float64 holds every partial sum exactly (below 2^53), so this is integer arithmetic.
    if weight.num_groups == 1:
        y = scale_sums(q.double() @ weight.qweight.double().t(), token_scale, weight.scale.flatten())
    else:
        y = _grouped_linear(q.double(), token_scale, weight)
    return y if bias is None else y + bias


def _grouped_linear(q: Tensor, token_scale: Tensor, weight: QuantizedTensor) -> Tensor:
    """Groups are added one after the other. With at most 128 inputs, a group's exact sum (29 bits) times a
    scale (24 bits) is exact in float64 as well. So only the additions of groups round, always in the same
    order."""
    size = weight.qweight.shape[1] // weight.num_groups
    total = torch.zeros(q.shape[0], weight.qweight.shape[0], dtype=torch.float64, device=q.device)
    for group, scale in enumerate(weight.scale.double().t()):
        inputs = slice(group * size, (group + 1) * size)
        total += (q[:, inputs] @ weight.qweight[:, inputs].double().t()) * scale
    return (total * token_scale.double()[:, None]).float()


def int4_linear(x: Tensor, weight: Int4Tensor, bias: Tensor | None, activations: str) -> Tensor:
    """linear() with 4-bit codes. A group's exact sum times a scale, and the sum of its inputs times a
    minimum, are exact in float64. So their difference rounds once, and the additions of groups round, in the
    groups' order."""
    if weight.order is not None:
        x = x[:, weight.order.long()]
    q, token_scale = quantize_activations(x, activations)
    exact, values, size = q.double(), weight.integers().double(), weight.group_size
    scale, minimum = weight.group_scales()
    total = torch.zeros(x.shape[0], weight.out_features, dtype=torch.float64, device=x.device)
    for group in range(weight.num_groups):
        inputs = exact[:, group * size : (group + 1) * size]
        part = (inputs @ values[:, group * size : (group + 1) * size].t()) * scale[:, group]
        if minimum is not None:
            part -= inputs.sum(1, keepdim=True) * minimum[:, group]
        total += part
    y = (total * token_scale.double()[:, None]).float()
    return y if bias is None else y + bias


def paged_attention(q: Tensor, kv: LayerKV, batch: BatchLayout, spec: AttentionSpec) -> Tensor:
    """Kernels.paged_attention(), token by token."""
    y = q.new_empty(q.shape[0], q.shape[1] * (spec.latent_dim or q.shape[2]))
    starts, lengths = batch.query_start.tolist(), batch.context_lens.tolist()
    prefixes = [0] * batch.num_seqs if batch.prefix_lens is None else batch.prefix_lens.tolist()
    for seq in range(batch.num_seqs):
        shift = lengths[seq] - starts[seq + 1]
        for token in range(starts[seq], starts[seq + 1]):
            table, position = batch.block_tables[seq], token + shift
            num_keys = max(position + 1, prefixes[seq])
            y[token] = _attend(q[token], kv, table, position, num_keys, spec).flatten()
    return y


def _attend(
    q: Tensor, kv: LayerKV, block_table: Tensor, position: int, num_keys: int, spec: AttentionSpec
) -> Tensor:
    """One token, which sees the first `num_keys` keys: q [num_heads, head_dim] -> [num_heads, head_dim], or
    [num_heads, latent_dim]."""
    num_kv_heads, head_dim, block_size = kv.sizes
    k, v = _gather(kv, block_table[: -(-num_keys // block_size)].long())
    # [num_kv_heads, head_dim, num_keys] and [num_kv_heads, num_keys, head_dim]
    keys = k.permute(1, 2, 0, 3).flatten(2)[..., :num_keys]
    if v is None:
        values = keys[:, : spec.latent_dim].transpose(1, 2)
    else:
        values = v.permute(1, 0, 2, 3).flatten(1, 2)[:, :num_keys]
    scores = (q.view(num_kv_heads, -1, head_dim) @ keys) * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    distance = torch.arange(num_keys, device=q.device) - position
    if spec.alibi_slopes is not None:
        scores = scores + spec.alibi_slopes.view(num_kv_heads, -1, 1) * distance
    if spec.distance_bias is not None:
        scores = scores + _distance_bias(spec.distance_bias, position, distance).view_as(scores)
    scores[..., : spec.first_seen(position)] = -torch.inf
    if spec.sinks is not None:
        scores = torch.cat((scores, spec.sinks.view(num_kv_heads, -1, 1)), dim=-1)
    return (torch.softmax(scores, dim=-1)[..., :num_keys] @ values).reshape(q.shape[0], -1)


def _gather(kv: LayerKV, blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    """K and V of some blocks (int64 [num_blocks]) as float32, in the shapes of LayerKV.plain without INT8."""
    _, k, v = kv.plain
    if kv.layout is not INT8:
        return k[blocks].float(), None if v is None else v[blocks].float()
    k, v, k_scale, v_scale = (part[blocks].float() for part in kv.int8_parts())
    return k * k_scale[:, :, None], v * v_scale[..., None]  # exact: 7 bits times 8 bits


def _distance_bias(bias: DistanceBias, position: int, distance: Tensor) -> Tensor:
    """float32 [num_heads, num_keys] of a query at `position`; `distance` is int64 [num_keys]."""
    most = bias.max_distance
    found = bias.table[:, distance.clamp(-most, most) + most]
    if bias.across is None:
        return found
    is_first = position < bias.boundary
    is_across = (distance + position < bias.boundary) != is_first
    return torch.where(is_across, bias.across[0 if is_first else 1][:, None], found)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as a smaller type; what is beyond its range becomes its largest finite value."""
    if x.dtype == dtype:
        return x
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


class PlainOperations(PlainRecurrences):
    """Everything but products, which all sets of kernels in plain torch share."""

    sublayers = None

    @cached_property
    def _notice(self) -> ClampNotice:
        return ClampNotice()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        inverse = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps).float()
        return x * inverse * (weight + offset)

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        exact = x.double()
        centred = exact - exact.mean(-1, keepdim=True)
        y = (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)).float()
        y = y if weight is None else y * weight
        return y if bias is None else y + bias

    def activation(self, x: Tensor, function: ActivationFunction) -> Tensor:
        wide = x.double()
        if function == "silu":
            y = wide * torch.sigmoid(wide)
        elif function == "sigmoid":
            y = torch.sigmoid(wide)
        elif function == "relu":
            y = wide.clamp_min(0)
        elif function == "relu2":
            y = wide.clamp_min(0).square()
        else:
            approximate = "tanh" if function == "gelu_tanh" else "none"
            y = torch.nn.functional.gelu(wide, approximate=approximate)
        return y.float()

    def gated_activation(self, gate_up: Tensor, function: GatedFunction) -> Tensor:
        if isinstance(function, ClampedGate | LimitedGate):
            return function.apply(self.activation, gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return self.activation(gate, function) * up

    @property
    def experts(self) -> PlainExperts:
        return PlainExperts(cast(ExpertCalls, self))  # subclasses have linear()

    @property
    def adapters(self) -> PlainLowRank:
        return PlainLowRank()

    def router_scores(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, function: RouterFunction
    ) -> Tensor:
        """Row by row: a product of matrices would add in another order in other company."""
        exact = weight.double()
        logits = x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float64)
        for row, logit in zip(x.double(), logits, strict=True):
            logit.copy_((exact * row).sum(-1))
            if bias is not None:
                logit.add_(bias)
            if function == "softmax":
                logit.copy_(logit.softmax(-1))
        return (torch.sigmoid(logits) if function == "sigmoid" else logits).float()

    def route(self, x: Tensor, router: Router, routing: Routing) -> Routed:
        return plain_route(self, x, router, routing)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool = False) -> None:
        half = cos.shape[-1]
        rotated = x[..., : 2 * half]
        first = rotated[..., 0::2] if is_interleaved else rotated[..., :half]
        second = rotated[..., 1::2] if is_interleaved else rotated[..., half:]
        c, s = cos[:, None], sin[:, None]
        new_first, new_second = first * c - second * s, second * c + first * s
        first.copy_(new_first)
        second.copy_(new_second)

    def write_kv(self, k: Tensor, v: Tensor, kv: LayerKV, slot_mapping: Tensor) -> None:
        _, keys, values = kv.plain
        block_size = kv.sizes[2]
        block, offset = slot_mapping // block_size, slot_mapping % block_size
        if kv.layout is INT8:
            keys, values, k_scale, v_scale = kv.int8_parts()
            keys[block, :, :, offset], k_scale[block, :, offset] = quantize_kv(k)
            values[block, :, offset], v_scale[block, :, offset] = quantize_kv(v)
            return
        if keys.dtype == torch.float16:
            self._notice.look_at(k, v)
        keys[block, :, :, offset] = _rounded(k, keys.dtype)
        if values is not None:
            values[block, :, offset] = _rounded(v, values.dtype)

    def paged_attention(self, q: Tensor, kv: LayerKV, batch: BatchLayout, spec: AttentionSpec) -> Tensor:
        return paged_attention(q, kv, batch, spec)


class PlainKernels(PlainOperations):
    """What kernels of torch alone share: operations, and the function that a product's weights call for."""

    traits: KernelTraits

    def __init__(self, activations: str = "int16") -> None:
        self.activations = activations

    def without_arithmetic(self, longest: int) -> Self:
        """The same kernels: their operations can't allocate without computing."""
        return self

    def with_int8_activations(self) -> Self:
        return type(self)("int8")

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, StackedMatrix):
            return weight.product(self.linear, x, bias)
        if isinstance(weight, HeadBlocks):
            return weight.product(self.linear, x)
        if isinstance(weight, Int4Tensor):
            return self._int4_linear(x, weight, bias)
        if isinstance(weight, PlanesTensor):
            weight = weight.joined()
        if not isinstance(weight, QuantizedTensor):
            raise self.traits.unknown_matrix(weight)
        return self._int8_linear(x, weight, bias)

    def _int8_linear(self, x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias, self.activations)

    def _int4_linear(self, x: Tensor, weight: Int4Tensor, bias: Tensor | None) -> Tensor:
        return int4_linear(x, weight, bias, self.activations)


def plain_traits(name: KernelChoice) -> KernelTraits:
    """The traits of kernels of torch alone."""
    return KernelTraits(
        name=name,
        has_own_threads=False,
        gathers_keys=True,
        workspace_factor=PLAIN_WORKSPACE,
        matrices=(QuantizedTensor, Int4Tensor, PlanesTensor, StackedMatrix, HeadBlocks),
        group_sizes=COMPUTED_GROUP_SIZES,
        kv_layouts=tuple(KV_CODES),
    )


class ReferenceKernels(PlainKernels):
    """Plain torch and nothing else."""

    traits = plain_traits("reference")
