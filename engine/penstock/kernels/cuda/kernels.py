"""CudaKernels: the interface of all kernels, computed by the .cu files of this folder on an NVIDIA card."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import cast

from torch import Tensor

from penstock.config import COMPUTED_GROUP_SIZES
from penstock.kernels.cuda.attention import CudaAttention
from penstock.kernels.cuda.grouped import CudaGroupedLinear
from penstock.kernels.cuda.launcher import OPEN, THREADS, Launcher, Prepared, ceil_div
from penstock.kernels.cuda.linear import CudaLinear
from penstock.kernels.cuda.recurrence import CudaRecurrences
from penstock.kernels.experts import PlainExperts
from penstock.kernels.head_blocks import HeadBlocks
from penstock.kernels.int4_tensor import Int4Tensor, StackedMatrix
from penstock.kernels.low_rank import PlainLowRank
from penstock.kernels.mixture.routing import Routed, Router, Routing, plain_route
from penstock.kernels.operands import (
    ACTIVATION_CODES,
    KV_CODES,
    ROUTER_CODES,
    ActivationFunction,
    AttentionSpec,
    BatchLayout,
    ClampedGate,
    GatedFunction,
    LayerKV,
    LimitedGate,
    Matrix,
    QuantizedTensor,
    RouterFunction,
)
from penstock.kernels.planes_tensor import PlanesTensor
from penstock.kernels.protocol import KernelTraits
from penstock.kernels.shared.attended import AttentionBeside
from penstock.spec import INT8

#: Rows of up to this width are summed by one warp.
NARROW_ROW = 256
#: Warps of a block that multiplies a token with a router; each warp has one expert.
ROUTER_WARPS = 8
#: Launches of one kernel that are kept prepared.
MAX_PREPARED = 256
_Int8 = QuantizedTensor | PlanesTensor


class CudaKernels(CudaRecurrences):
    """All tensors are on one device and float32, and a row's elements are contiguous. Every call launches
    kernels and waits for nothing."""

    traits = KernelTraits(
        name="native",
        has_own_threads=True,
        gathers_keys=False,
        workspace_factor=1.0,
        matrices=(QuantizedTensor, Int4Tensor, PlanesTensor, StackedMatrix, HeadBlocks),
        group_sizes=COMPUTED_GROUP_SIZES,
        kv_layouts=tuple(KV_CODES),
    )
    sublayers = None

    def __init__(self, launcher: Launcher, activations: str = "int16") -> None:
        self.activations = activations
        self._launcher = launcher
        self._linear = CudaLinear(launcher, activations)
        self._grouped_linear = CudaGroupedLinear(launcher, activations)
        self._attention = CudaAttention(launcher)
        self._fetches: dict[tuple[int, int], Prepared] = {}
        # No cycle: a closed engine gives its memory back at once, that of prepared launches included.
        self.experts = PlainExperts(weakref.proxy(self))
        self.adapters = PlainLowRank()

    def without_arithmetic(self, longest: int) -> CudaKernels:
        """The same kernels: a GPU computes so fast that leaving the arithmetic out saves nothing."""
        return self

    def with_int8_activations(self) -> CudaKernels:
        return CudaKernels(self._launcher, "int8")

    def beside(self, others: AttentionBeside) -> CudaKernels:
        """The same kernels, which leave keys and values in RAM to the processor."""
        twin = CudaKernels(self._launcher, self.activations)
        twin._attention = CudaAttention(self._launcher, others)
        return twin

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, StackedMatrix):
            return weight.product(self.linear, x, bias)
        if isinstance(weight, HeadBlocks):
            return weight.product(self.linear, x)
        if isinstance(weight, Int4Tensor):
            return self._grouped_linear.int4_product(x, weight, bias)
        if isinstance(weight, PlanesTensor):
            grouped = weight.num_groups > 1
            product = self._grouped_linear.planes_product if grouped else self._linear.product
            return product(x, weight, bias)
        if not isinstance(weight, QuantizedTensor):
            raise self.traits.unknown_matrix(weight)
        if weight.num_groups > 1:
            return self._grouped_linear.int8_product(x, weight, bias)
        return self._linear.product(x, weight, bias)

    def write_products(self, x: Tensor, weights: Sequence[Matrix], y: Tensor) -> None:
        """linear() with each of some matrices of one format, into the first columns of y, one beside the
        other."""
        if all(isinstance(each, _Int8) and each.num_groups == 1 for each in weights):
            self._linear.write_products(x, cast(Sequence[_Int8], weights), y)
            return
        column = 0
        for each in weights:
            end = column + each.out_features
            if isinstance(each, Int4Tensor):
                self._grouped_linear.int4_product(x, each, None, y[:, column:end])
            elif isinstance(each, QuantizedTensor):
                self._grouped_linear.int8_product(x, each, None, y[:, column:end])
            elif isinstance(each, PlanesTensor):
                self._grouped_linear.planes_product(x, each, None, y[:, column:end])
            else:
                y[:, column:end] = self.linear(x, each)
            column = end

    def fetch(self, address: int, y: Tensor) -> None:
        """Fill y, float32 [count] or [num_rows, width] with gaps between rows, from an address that the card
        sees, such as one of the host's pinned memory, beside copies that are under way."""
        count, width, stride = y.numel(), y.shape[-1], y.stride(0)
        fetch = self._fetches.get((count, width))
        if fetch is None:
            if len(self._fetches) >= MAX_PREPARED:
                self._fetches.clear()
            grid = (min(ceil_div(count, THREADS), 2 * self._launcher.num_multiprocessors),)
            fetch = self._launcher.prepare("fetch", grid, THREADS, OPEN, count, width, OPEN, OPEN)
            self._fetches[count, width] = fetch
        fetch(address, y, stride)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        y, rows = x.new_empty(x.shape), x if x.dim() == 2 else x.flatten(0, -2)
        num_rows, width = rows.shape
        self._launcher.launch(
            "rms_norm", (num_rows,), _row_threads(width), rows, rows.stride(0), width, weight, eps, offset, y
        )
        return y

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        y, rows = x.new_empty(x.shape), x if x.dim() == 2 else x.flatten(0, -2)
        num_rows, width = rows.shape
        self._launcher.launch(
            "layer_norm", (num_rows,), _row_threads(width), rows, rows.stride(0), width, weight, bias, eps, y
        )
        return y

    def activation(self, x: Tensor, function: ActivationFunction) -> Tensor:
        return self._activate(x, x.shape[1], function, False)

    def gated_activation(self, gate_up: Tensor, function: GatedFunction) -> Tensor:
        if isinstance(function, ClampedGate | LimitedGate):
            return function.apply(self.activation, gate_up)
        return self._activate(gate_up, gate_up.shape[1] // 2, function, True)

    def _activate(self, x: Tensor, width: int, function: ActivationFunction, is_gated: bool) -> Tensor:
        y = x.new_empty(x.shape[0], width)
        self._launcher.launch(
            "activation", (x.shape[0], ceil_div(width, THREADS)), THREADS,
            x, x.stride(0), width, ACTIVATION_CODES[function], is_gated, y,
        )  # fmt: skip
        return y

    def router_scores(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, function: RouterFunction
    ) -> Tensor:
        num_tokens, (num_experts, in_features) = x.shape[0], weight.shape
        y = x.new_empty(num_tokens, num_experts)
        self._launcher.launch(
            "router_logits", (num_tokens, ceil_div(num_experts, ROUTER_WARPS)), 32 * ROUTER_WARPS,
            x, x.stride(0), in_features, weight, bias, num_experts, y,
        )  # fmt: skip
        if function != "none":
            self._launcher.launch("router_scores", (num_tokens,), 32, y, num_experts, ROUTER_CODES[function])
        return y

    def route(self, x: Tensor, router: Router, routing: Routing) -> Routed:
        return plain_route(self, x, router, routing)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool = False) -> None:
        num_tokens, num_heads, head_dim = x.shape
        assert _has_whole_rows(x)
        self._launcher.launch(
            "rope", (num_tokens,), THREADS,
            x, x.stride(0), num_heads, head_dim, cos.shape[1], cos, sin, is_interleaved,
        )  # fmt: skip

    def write_kv(self, k: Tensor, v: Tensor, kv: LayerKV, slot_mapping: Tensor) -> None:
        code, keys, values = kv.plain
        num_kv_heads, head_dim, block_size = kv.sizes
        assert _has_whole_rows(k) and (values is None or _has_whole_rows(v))
        if kv.layout is INT8:
            self._launcher.launch(
                "write_kv_int8", (k.shape[0], 2), THREADS,
                k, k.stride(0), v, v.stride(0), slot_mapping, keys, values,
                num_kv_heads, head_dim, block_size,
            )  # fmt: skip
            return
        self._launcher.launch(
            "write_kv", (k.shape[0],), THREADS,
            k, k.stride(0), v, v.stride(0), slot_mapping, keys, values, code,
            num_kv_heads, head_dim, block_size,
        )  # fmt: skip

    def paged_attention(self, q: Tensor, kv: LayerKV, batch: BatchLayout, spec: AttentionSpec) -> Tensor:
        return self._attention.mix(q, kv, batch, spec)


def _has_whole_rows(x: Tensor) -> bool:
    """Whether a token's heads lie side by side in x [num_tokens, num_heads, head_dim]. The stride of a single
    head may be any number."""
    return x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])


def _row_threads(width: int) -> int:
    """Threads of a block that sums a row. The width alone decides, as threads decide the order of a sum."""
    return 32 if width <= NARROW_ROW else THREADS
