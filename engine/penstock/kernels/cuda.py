"""CudaKernels: the interface of all kernels, computed by the .cu files of this folder on an NVIDIA card."""

from __future__ import annotations

from torch import Tensor

from penstock.config import GROUP_SIZES
from penstock.kernels import reference
from penstock.kernels.cuda_grouped import CudaGroupedLinear
from penstock.kernels.cuda_launcher import HEIGHTS, THREADS, Launcher, ceil_div
from penstock.kernels.cuda_linear import CudaLinear
from penstock.kernels.int4_tensor import Int4Tensor, StackedMatrix
from penstock.kernels.operands import (
    ACTIVATION_CODES,
    KV_CODES,
    ActivationFunction,
    AttentionSpec,
    BatchLayout,
    DistanceBias,
    LayerKV,
    Matrix,
    QuantizedTensor,
)
from penstock.kernels.protocol import KernelTraits

#: Threads of a block of attention, by the same numbers of dimensions as HEIGHTS.
ATTENTION_THREADS = {64: 256, 128: 256, 256: 128}
#: Keys of one partial result, as in attention.cu.
SPLIT_KEYS = 256
#: The most memory for partial results: with more of them there are rows enough to keep a GPU busy.
MAX_PARTIAL_BYTES = 16 << 20
#: Rows of up to this width are summed by one warp.
NARROW_ROW = 256


class CudaKernels:
    """All tensors are on one device and float32, and a row's elements are contiguous. Every call launches
    kernels and waits for nothing."""

    traits = KernelTraits(
        name="native",
        has_own_threads=True,
        gathers_keys=False,
        workspace_factor=1.0,
        matrices=(QuantizedTensor, Int4Tensor, StackedMatrix),
        group_sizes=GROUP_SIZES,
        kv_layouts=tuple(KV_CODES),
    )

    def __init__(self, launcher: Launcher, activations: str = "int16") -> None:
        self.activations = activations
        self._launcher = launcher
        self._linear = CudaLinear(launcher, activations)
        self._grouped_linear = CudaGroupedLinear(launcher, activations)

    def without_arithmetic(self, longest: int) -> CudaKernels:
        """The same kernels: a GPU computes so fast that leaving the arithmetic out saves nothing."""
        return self

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, StackedMatrix):
            return weight.product(self.linear, x, bias)
        if isinstance(weight, Int4Tensor):
            return self._grouped_linear.int4_product(x, weight, bias)
        if not isinstance(weight, QuantizedTensor):
            raise self.traits.unknown_matrix(weight)
        if weight.num_groups > 1:
            return self._grouped_linear.int8_product(x, weight, bias)
        return self._linear.product(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        y, rows = x.new_empty(x.shape), x.flatten(0, -2)
        num_rows, width = rows.shape
        self._launcher.launch(
            "rms_norm", (num_rows,), _row_threads(width), rows, rows.stride(0), width, weight, eps, offset, y
        )
        return y

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        y, rows = x.new_empty(x.shape), x.flatten(0, -2)
        num_rows, width = rows.shape
        self._launcher.launch(
            "layer_norm", (num_rows,), _row_threads(width), rows, rows.stride(0), width, weight, bias, eps, y
        )
        return y

    def activation(self, x: Tensor, function: ActivationFunction) -> Tensor:
        return self._activate(x, x.shape[1], function, False)

    def gated_activation(self, gate_up: Tensor, function: ActivationFunction) -> Tensor:
        return self._activate(gate_up, gate_up.shape[1] // 2, function, True)

    def _activate(self, x: Tensor, width: int, function: ActivationFunction, is_gated: bool) -> Tensor:
        y = x.new_empty(x.shape[0], width)
        self._launcher.launch(
            "activation", (x.shape[0], ceil_div(width, THREADS)), THREADS,
            x, x.stride(0), width, ACTIVATION_CODES[function], is_gated, y,
        )  # fmt: skip
        return y

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool = False) -> None:
        num_tokens, num_heads, head_dim = x.shape
        assert x.stride()[1:] == (head_dim, 1)
        self._launcher.launch(
            "rope", (num_tokens,), THREADS,
            x, x.stride(0), num_heads, head_dim, cos.shape[1], cos, sin, is_interleaved,
        )  # fmt: skip

    def write_kv(self, k: Tensor, v: Tensor, kv: LayerKV, slot_mapping: Tensor) -> None:
        code, keys, values = kv.plain
        _, num_kv_heads, head_dim, block_size = keys.shape
        assert k.stride()[1:] == v.stride()[1:] == (head_dim, 1)
        self._launcher.launch(
            "write_kv", (k.shape[0],), THREADS,
            k, k.stride(0), v, v.stride(0), slot_mapping, keys, values, code,
            num_kv_heads, head_dim, block_size,
        )  # fmt: skip

    def paged_attention(self, q: Tensor, kv: LayerKV, batch: BatchLayout, spec: AttentionSpec) -> Tensor:
        (num_tokens, num_heads, head_dim), num_seqs = q.shape, batch.num_seqs
        code, keys, values = kv.plain
        _, num_kv_heads, _, block_size = keys.shape
        width = next((width for width in HEIGHTS if head_dim <= width), None)
        if width is None:  # a rare shape, not worth a kernel
            return reference.paged_attention(q, kv, batch, spec)
        assert q.stride()[1:] == (head_dim, 1)
        few, many = HEIGHTS[width]
        group_tokens, max_blocks = num_tokens * num_heads // num_kv_heads, batch.block_tables.shape[1]
        height = few if group_tokens <= few * num_seqs else many
        # Only the device knows where a sequence begins and how long it is. So the numbers of tiles and splits
        # are upper limits, and blocks that find nothing to do end at once.
        num_tiles = group_tokens // height + num_seqs
        num_splits = ceil_div(max_blocks * block_size, SPLIT_KEYS)
        y, partials = q.new_empty(num_tokens, num_heads * head_dim), None
        num_partials = num_tokens * num_heads * num_splits * (head_dim + 2)
        is_idle = num_tiles * num_kv_heads < 2 * self._launcher.num_multiprocessors
        if is_idle and num_splits > 1 and num_partials * 4 <= MAX_PARTIAL_BYTES:
            partials = q.new_empty(num_partials)
        self._launcher.launch(
            f"attention_{width}_{height}",
            (num_tiles, num_kv_heads, 1 if partials is None else num_splits), ATTENTION_THREADS[width],
            q, q.stride(0), keys, values, code,
            num_heads, num_kv_heads, head_dim, block_size, batch.block_tables, max_blocks,
            batch.query_start, batch.context_lens, batch.prefix_lens, num_seqs,
            spec.scale, spec.softcap, spec.window, spec.alibi_slopes,
            *_bias_arguments(spec.distance_bias), y, partials, num_splits,
        )  # fmt: skip
        if partials is not None:
            self._launcher.launch(
                "merge_splits", (num_tokens, num_heads), min(width, 128),
                partials, num_splits, num_heads, head_dim, batch.query_start, batch.context_lens,
                batch.prefix_lens, num_seqs, spec.window, y,
            )  # fmt: skip
        return y


def _bias_arguments(bias: DistanceBias | None) -> tuple[Tensor | None, int, int, Tensor | None]:
    """What the attention kernels take of a bias."""
    return (None, 0, 0, None) if bias is None else (bias.table, bias.max_distance, bias.boundary, bias.across)


def _row_threads(width: int) -> int:
    """Threads of a block that sums a row. The width alone decides, as threads decide the order of a sum."""
    return 32 if width <= NARROW_ROW else THREADS
