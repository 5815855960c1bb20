"""NativeKernels: the compiled kernels of cpu.c, for the CPU."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.config import COMPUTED_GROUP_SIZES
from penstock.kernels import reference
from penstock.kernels.clamp_notice import ClampNotice
from penstock.kernels.cpu_builds import load_library
from penstock.kernels.expert_records import MatrixRecord, padded_rows, token_bytes
from penstock.kernels.head_blocks import HeadBlocks
from penstock.kernels.int4_tensor import CODEBOOK_BYTES, Int4Tensor, StackedMatrix
from penstock.kernels.mixture.native import NativeExperts, UncomputedExperts
from penstock.kernels.mixture.routing import Routed, Router, Routing
from penstock.kernels.native_low_rank import NativeLowRank
from penstock.kernels.operands import (
    KV_CODES,
    MAX_IN_FEATURES,
    ROUTER_CODES,
    ActivationFunction,
    AttentionSpec,
    BatchLayout,
    GatedFunction,
    LayerKV,
    Matrix,
    QuantizedTensor,
    RamKV,
    RouterFunction,
    address,
    gated_code,
)
from penstock.kernels.planes_tensor import PlanesTensor
from penstock.kernels.protocol import KernelTraits
from penstock.kernels.recurrent.native import NativeRecurrences
from penstock.kernels.scratch import scratch
from penstock.kernels.sublayers.native import NativeSublayers
from penstock.kernels.sublayers.partial_results import MAX_HEAD_DIM, partial_bytes
from penstock.kernels.sublayers.protocol import Sublayers

if TYPE_CHECKING:
    from penstock.kernels.shared.attended import HandedAttention
    from penstock.kernels.shared.handed_product import HandedParts, HandedProduct

logger = logging.getLogger(__name__)


class NativeKernels(NativeRecurrences):
    """cpu.c, called through ctypes. All tensors are float32 on the CPU, rows contiguous."""

    traits = KernelTraits(
        name="native",
        has_own_threads=True,
        gathers_keys=False,
        workspace_factor=1.0,
        matrices=(QuantizedTensor, Int4Tensor, PlanesTensor, StackedMatrix, HeadBlocks),
        group_sizes=COMPUTED_GROUP_SIZES,
        kv_layouts=tuple(KV_CODES),
    )
    #: In a twin without arithmetic, the tokens of the longest sequence that the original will meet; else 0.
    _longest = 0

    def __init__(self, activations: str = "int16", build: str | None = None) -> None:
        """`build` names one of BUILDS; None takes the best that was compiled and the processor runs.

        Raises ConfigError where there is none.
        """
        self.activations = activations
        self._activation_bits = 16 if activations == "int16" else 8
        self._notice = ClampNotice()
        self.use(*load_library(build))
        if self.build == "amx" and not self._library.penstock_has_tiles():
            logger.warning("AMX can't be used (the system refuses it, or its trial failed): AVX512 serves")

    def use(self, build: str, library: Any) -> None:
        """Compute with this library's functions."""
        self.build, self._library = build, library
        self.experts = NativeExperts(library, self._activation_bits, self)
        self.adapters = NativeLowRank(library)
        self.sublayers: Sublayers | None = NativeSublayers(
            library, self._activation_bits, self.experts, self._notice
        )

    @property
    def multiplies_bytes(self) -> bool:
        """Whether products are faster with 8-bit activations than with 16-bit ones."""
        return bool(self._library.penstock_multiplies_bytes())

    def attended(self, in_ram: RamKV, spec: AttentionSpec) -> HandedAttention:
        """Attention to a layer's keys and values in RAM, for a card to hand over."""
        from penstock.kernels.shared.attended import HandedAttention  # beside a card alone

        return HandedAttention(self._library, in_ram.kv, in_ram.splits, spec)

    def set_num_threads(self, num_threads: int) -> int:
        """Set the threads of all native kernels of this process. Returns how many there are now; the log says
        if the system gives fewer."""
        there: int = self._library.penstock_set_num_threads(num_threads)
        if there != num_threads:
            logger.warning("native kernels compute with %d threads instead of %d", there, num_threads)
        return there

    def without_arithmetic(self, longest: int) -> NativeKernels:
        """A twin whose products, norms and attention compute nothing, and whose route() writes no numbers:
        whoever asks for experts by them has to choose."""
        twin = copy.copy(self)
        twin._library, twin._longest = _Idle(), longest
        twin.sublayers = None
        twin.experts = UncomputedExperts(twin._library, twin._activation_bits, twin)
        return twin

    def with_int8_activations(self) -> NativeKernels:
        twin = copy.copy(self)
        twin.activations, twin._activation_bits = "int8", 8
        twin.use(self.build, self._library)
        return twin

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, QuantizedTensor):  # the usual case, without a further call
            num_tokens, in_features = x.shape
            if in_features > MAX_IN_FEATURES:
                return reference.linear(x, weight, bias, self.activations)
            out_features, num_groups, qweight, scale = weight.native
            y = torch.empty(num_tokens, out_features)
            scratch = _scratch(num_tokens, in_features, num_groups)
            self._library.penstock_int8_linear(
                x.data_ptr(), x.stride(0), num_tokens, in_features, qweight, scale, num_groups,
                None if bias is None else bias.data_ptr(), out_features,
                self._activation_bits, y.data_ptr(), scratch.data_ptr(),
            )  # fmt: skip
            return y
        if isinstance(weight, Int4Tensor):
            return _int4_linear(self._library, self._activation_bits, x, weight, bias)
        if isinstance(weight, PlanesTensor):
            if x.shape[1] > MAX_IN_FEATURES:
                return reference.linear(x, weight.joined(), bias, self.activations)
            return _planes_linear(self._library, self._activation_bits, x, weight, bias)
        if isinstance(weight, StackedMatrix):
            return weight.product(self.linear, x, bias)
        if isinstance(weight, HeadBlocks):
            matrix = weight.matrix
            if not isinstance(matrix, QuantizedTensor) or matrix.num_groups > 1:
                return weight.product(self.linear, x)
            return _head_linear(self._library, self._activation_bits, x, weight, matrix)
        raise self.traits.unknown_matrix(weight)

    def handed(self, weight: Matrix) -> HandedProduct | None:
        """linear() with this matrix for a thread that knows no Python; None: there is no such call for it."""
        from penstock.kernels.shared.handed_product import HandedProduct  # beside a card alone

        matrix: MatrixRecord | None = getattr(weight, "record", None)
        return None if matrix is None else HandedProduct(self._library, self._activation_bits, matrix, weight)

    def handed_parts(self, products: Sequence[tuple[Matrix, Tensor | None, int]]) -> HandedParts | None:
        """linear() with several matrices of one shape, their biases and numbers of rows, which lie one below
        the other, for a thread that knows no Python; None: there is no such call for one of them."""
        from penstock.kernels.shared.handed_product import HandedParts

        return HandedParts.of(self._library, self._activation_bits, products)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        y = torch.empty(x.shape)
        rows = x if x.dim() == 2 else x.flatten(0, -2)
        num_rows, width = rows.shape
        self._library.penstock_rms_norm(
            rows.data_ptr(), rows.stride(0), num_rows, width, weight.data_ptr(), offset, eps, y.data_ptr()
        )
        return y

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        y = torch.empty(x.shape)
        rows = x if x.dim() == 2 else x.flatten(0, -2)
        num_rows, width = rows.shape
        self._library.penstock_layer_norm(
            rows.data_ptr(), rows.stride(0), num_rows, width,
            address(weight), address(bias), eps, y.data_ptr(),
        )  # fmt: skip
        return y

    def activation(self, x: Tensor, function: ActivationFunction) -> Tensor:
        return _activate(self._library, x, x.shape[1], function, False)

    def gated_activation(self, gate_up: Tensor, function: GatedFunction) -> Tensor:
        return _activate(self._library, gate_up, gate_up.shape[1] // 2, function, True)

    def router_scores(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, function: RouterFunction
    ) -> Tensor:
        num_tokens, (num_experts, in_features) = x.shape[0], weight.shape
        y = torch.empty(num_tokens, num_experts)
        self._library.penstock_router_scores(
            x.data_ptr(), x.stride(0), num_tokens, in_features, weight.data_ptr(), address(bias), num_experts,
            ROUTER_CODES[function], y.data_ptr(),
        )  # fmt: skip
        return y

    def route(self, x: Tensor, router: Router, routing: Routing) -> Routed:
        (num_tokens, in_features), num_chosen = x.shape, routing.num_chosen
        experts = torch.empty(num_tokens, num_chosen, dtype=torch.int64)
        chosen = torch.empty(num_tokens, num_chosen)
        room, _held = scratch(8 * num_tokens * routing.num_experts)
        self._library.penstock_route(
            x.data_ptr(), x.stride(0), num_tokens, in_features, *router.native,
            routing.native_address, experts.data_ptr(), chosen.data_ptr(), room,
        )  # fmt: skip
        return Routed(experts, chosen)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool = False) -> None:
        num_tokens, num_heads, head_dim = x.shape
        self._library.penstock_rope(
            x.data_ptr(), x.stride(0), num_tokens, num_heads, head_dim, cos.shape[1],
            cos.data_ptr(), sin.data_ptr(), is_interleaved,
        )  # fmt: skip

    def write_kv(self, k: Tensor, v: Tensor, kv: LayerKV, slot_mapping: Tensor) -> None:
        has_clamped = self._library.penstock_write_kv(
            k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), k.shape[0], slot_mapping.data_ptr(),
            *kv.native,
        )  # fmt: skip
        if has_clamped:
            self._notice.give()

    def paged_attention(self, q: Tensor, kv: LayerKV, batch: BatchLayout, spec: AttentionSpec) -> Tensor:
        _, head_dim, block_size = kv.sizes
        if head_dim > MAX_HEAD_DIM:  # a rare shape, which is not worth a second path in C
            return reference.paged_attention(q, kv, batch, spec)
        num_tokens, num_heads, value_dim = q.shape[0], spec.num_heads, spec.latent_dim or head_dim
        y = torch.empty(num_tokens, num_heads * value_dim)
        tiles = torch.empty(2 * num_tokens)  # of 4 bytes, as C's int32_t
        max_blocks = max(batch.native[1], -(-self._longest // block_size))
        num_partial_bytes = partial_bytes(
            num_tokens * num_heads, max_blocks * block_size, value_dim, is_most=self._longest > 0
        )
        partials = torch.empty(num_partial_bytes // 4) if num_partial_bytes else None
        self._library.penstock_paged_attention(
            q.data_ptr(), q.stride(0), y.data_ptr(), num_heads * value_dim, num_heads,
            *kv.native, *batch.native, *spec.native, tiles.data_ptr(), address(partials),
        )  # fmt: skip
        return y


def _head_linear(library: Any, bits: int, x: Tensor, blocks: HeadBlocks, matrix: QuantizedTensor) -> Tensor:
    num_tokens, num_heads, num_rows = x.shape[0], blocks.num_heads, blocks.end - blocks.first
    y = torch.empty(num_heads, num_tokens, matrix.shape[1] if blocks.is_transposed else num_rows)
    library.penstock_head_linear(
        x.data_ptr(), x.stride(0), x.shape[1] // num_heads, num_tokens, num_heads, matrix.qweight.data_ptr(),
        matrix.scale.data_ptr(), matrix.out_features // num_heads, blocks.first, num_rows,
        matrix.shape[1], blocks.is_transposed, bits, y.data_ptr(),
    )  # fmt: skip
    return y.transpose(0, 1).flatten(1)


def _activate(library: Any, x: Tensor, width: int, function: GatedFunction, gated: bool) -> Tensor:
    y = torch.empty(x.shape[0], width)
    library.penstock_activation(
        x.data_ptr(), x.stride(0), x.shape[0], width, *gated_code(function), gated, y.data_ptr()
    )
    return y


def _int4_linear(library: Any, bits: int, x: Tensor, weight: Int4Tensor, bias: Tensor | None) -> Tensor:
    if weight.order is not None:
        x = x[:, weight.order]
    num_tokens, in_features = x.shape
    codes, scale, minimum, sub_scale, sub_minimum, dtype, *sizes, num_groups, out_features = weight.native
    assert num_groups is not None and out_features is not None
    y = torch.empty(num_tokens, out_features)
    scratch = _scratch(num_tokens, in_features, num_groups)
    library.penstock_int4_linear(
        x.data_ptr(), x.stride(0), num_tokens, in_features, codes, CODEBOOK_BYTES[weight.codebook], scale,
        minimum, sub_scale, sub_minimum, dtype, *sizes, num_groups, address(bias), out_features, bits,
        y.data_ptr(), scratch.data_ptr(),
    )  # fmt: skip
    return y


def _planes_linear(library: Any, bits: int, x: Tensor, weight: PlanesTensor, bias: Tensor | None) -> Tensor:
    num_tokens, in_features = x.shape
    out_features, num_groups, upper, lower, scale, lower_bytes = weight.native
    y = torch.empty(num_tokens, out_features)
    scratch = _scratch(num_tokens, in_features, num_groups)
    library.penstock_planes_linear(
        x.data_ptr(), x.stride(0), num_tokens, in_features, upper, lower, lower_bytes, scale, num_groups,
        address(bias), out_features, bits, y.data_ptr(), scratch.data_ptr(),
    )  # fmt: skip
    return y


def _scratch(num_tokens: int, in_features: int, num_groups: int) -> Tensor:
    """Room for a product's activations. The elements are float32, since torch allocates its default dtype
    faster than others."""
    return torch.empty(padded_rows(num_tokens) * token_bytes(in_features, num_groups) // 4)


class _Idle:
    """A library whose functions do nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None
