"""Kernels for NVIDIA cards: the .cu files of this folder, launched through the driver by ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.kernels import reference
from penstock.kernels.operands import (
    ACTIVATION_CODES,
    KV_CODES,
    ActivationFunction,
    AttentionSpec,
    BatchLayout,
    LayerKV,
    Matrix,
    QuantizedTensor,
)
from penstock.kernels.protocol import KernelTraits

#: Rows of a block of attention, for few rows and for many, by the dimensions per head that it has room for.
HEIGHTS = {64: (8, 32), 128: (8, 32), 256: (4, 8)}
#: Threads of those blocks.
ATTENTION_THREADS = {64: 256, 128: 256, 256: 128}
#: Keys that add up to one partial result, as in attention.cu.
SPLIT_KEYS = 256
#: Partial results are kept in memory up to this size; beyond it there are rows enough to keep a GPU busy.
MAX_PARTIAL_BYTES = 16 << 20

#: Types of the kernels' parameters, in order: Pointer, Number (64 bits), Int (32 bits), Float.
_LINEAR = "PPIIPPPIIP"
_ATTENTION = "PNPPIIIIIPIPPIFFIPPPI"
SIGNATURES: dict[str, str] = {
    "rms_norm": "PNIPFFP",
    "layer_norm": "PNIPPFP",
    "activation": "PNIIIP",
    "rope": "PNIIIPPI",
    "write_kv": "PNPNPPPIIII",
    "quantize_1": "PNIIPP",
    "quantize_2": "PNIIPP",
    "combine_1": "PIIPIPPIP",
    "combine_2": "PIIPIPPIP",
    "merge_splits": "PIIIPPIIP",
    **{f"attention_{width}_{height}": _ATTENTION for width, heights in HEIGHTS.items() for height in heights},
    **{f"gemv_{tokens}_{parts}": _LINEAR for tokens in (1, 2, 4, 8, "any") for parts in (1, 2)},
    **{f"tiled_{height}_{parts}": _LINEAR for height in (4, 8, "any") for parts in (1, 2)},
}
_C_TYPES: dict[str, type[ctypes._SimpleCData[Any]]] = {
    "P": ctypes.c_void_p,
    "N": ctypes.c_int64,
    "I": ctypes.c_int,
    "F": ctypes.c_float,
}

#: int8.cu says why.
MAX_IN_FEATURES = 131071
#: Rows of bytes (hi and lo are two) up to which the weights are read as a stream, once per 8 tokens.
MAX_GEMV_ROWS = 32
#: Sums of torch's INT8 product that are held at a time.
MAX_SUMS_BYTES = 32 << 20
#: As in int8.cu: warps of a block that reads weights as a stream, channels of a tile.
GEMV_WARPS, TILE_COLUMNS = 8, 128
#: Rows of activations are padded to this many bytes.
ROW_UNIT = 64
THREADS = 256
#: Rows of up to this width are summed by one warp.
NARROW_ROW = 256


class Launcher(Protocol):
    """The compiled kernels on a device."""

    num_multiprocessors: int
    #: For INT8, and reachable through torch.
    has_tensor_cores: bool

    def launch(self, name: str, grid: Sequence[int], num_threads: int, *values: object) -> None:
        """Queue a kernel. `values` are tensors, None, and numbers, as SIGNATURES has them."""


class CudaKernels:
    """All tensors are on one device and float32, elements of a row contiguous. It launches, and waits for
    nothing."""

    #: Without group sizes: the reference computes them here, exactly and too slowly to serve.
    traits = KernelTraits(
        name="native",
        has_own_threads=True,
        gathers_keys=False,
        workspace_factor=1.0,
        matrices=(QuantizedTensor,),
        group_sizes=(),
        kv_layouts=tuple(KV_CODES),
    )

    def __init__(self, launcher: Launcher, activations: str = "int16") -> None:
        self.activations = activations
        self._launcher = launcher
        self._parts = 2 if activations == "int16" else 1

    def without_arithmetic(self, longest: int) -> CudaKernels:
        """These: a GPU computes a step sooner than it is worth leaving out."""
        return self

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        if not isinstance(weight, QuantizedTensor):
            raise self.traits.unknown_matrix(weight)
        (num_tokens, in_features), qweight = x.shape, weight.qweight
        out_features, parts = qweight.shape[0], self._parts
        if in_features > MAX_IN_FEATURES or weight.num_groups > 1:
            return reference.linear(x, weight, bias, self.activations)
        padded = _ceil(in_features, ROW_UNIT) * ROW_UNIT
        rows = x.new_empty(num_tokens * parts, padded, dtype=torch.int8)
        token_scales, y = x.new_empty(num_tokens), x.new_empty(num_tokens, out_features)
        self._launcher.launch(
            f"quantize_{parts}", (num_tokens,), THREADS,
            x, x.stride(0), in_features, padded, rows, token_scales,
        )  # fmt: skip
        if self._has_tensor_product(num_tokens, weight.qweight):
            self._tensor_product(rows, token_scales, weight, bias, y)
            return y
        is_aligned = in_features % 16 == 0 and qweight.data_ptr() % 16 == 0
        kernel, grid = self._product(num_tokens, out_features, is_aligned)
        self._launcher.launch(
            f"{kernel}_{parts}", grid, THREADS,
            rows, token_scales, num_tokens, padded, qweight, weight.scale, bias, in_features, out_features, y,
        )  # fmt: skip
        return y

    def _has_tensor_product(self, num_tokens: int, qweight: Tensor) -> bool:
        """torch._int_mm on tensor cores: more than 16 rows, sizes in multiples of 8, rows without padding."""
        is_even = qweight.shape[0] % 8 == qweight.shape[1] % ROW_UNIT == qweight.data_ptr() % 16 == 0
        return self._launcher.has_tensor_cores and is_even and num_tokens * self._parts > MAX_GEMV_ROWS

    def _tensor_product(
        self, rows: Tensor, token_scales: Tensor, weight: QuantizedTensor, bias: Tensor | None, y: Tensor
    ) -> None:
        """Some channels at a time: sums are int32 and take twice the room of y."""
        num_tokens, out_features = y.shape
        num_columns = max(8, MAX_SUMS_BYTES // (4 * rows.shape[0]) // 8 * 8)
        for first in range(0, out_features, num_columns):
            sums = torch._int_mm(rows, weight.qweight[first : first + num_columns].t())
            self._launcher.launch(
                f"combine_{self._parts}", (num_tokens, _ceil(sums.shape[1], THREADS)), THREADS,
                sums, first, sums.shape[1], token_scales, num_tokens, weight.scale, bias, out_features, y,
            )  # fmt: skip

    def _product(self, num_tokens: int, out_features: int, is_aligned: bool) -> tuple[str, tuple[int, int]]:
        """The kernel for this many tokens, and its grid; all of them compute the same."""
        num_rows = num_tokens * self._parts
        if num_rows <= MAX_GEMV_ROWS:
            tokens = next((size for size in (1, 2, 4) if num_tokens <= size and is_aligned), 8)
            columns = GEMV_WARPS * (4 if tokens * self._parts > 4 else 2)
            grid = _ceil(out_features, columns), _ceil(num_tokens, tokens)
            return f"gemv_{tokens if is_aligned else 'any'}", grid
        column_tiles = _ceil(out_features, TILE_COLUMNS)
        # Tiles of half the height where whole ones would leave multiprocessors without two blocks.
        is_low = _ceil(num_rows, 128) * column_tiles < 2 * self._launcher.num_multiprocessors
        height = 4 if is_low and is_aligned else 8
        return f"tiled_{height if is_aligned else 'any'}", (_ceil(num_rows, 16 * height), column_tiles)

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
            "activation", (x.shape[0], _ceil(width, THREADS)), THREADS,
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
        code, keys, values = kv.plain()
        _, num_kv_heads, head_dim, block_size = keys.shape
        assert k.stride()[1:] == v.stride()[1:] == (head_dim, 1)
        self._launcher.launch(
            "write_kv", (k.shape[0],), THREADS,
            k, k.stride(0), v, v.stride(0), slot_mapping, keys, values, code,
            num_kv_heads, head_dim, block_size,
        )  # fmt: skip

    def paged_attention(self, q: Tensor, kv: LayerKV, batch: BatchLayout, spec: AttentionSpec) -> Tensor:
        (num_tokens, num_heads, head_dim), num_seqs = q.shape, batch.num_seqs
        code, keys, values = kv.plain()
        _, num_kv_heads, _, block_size = keys.shape
        width = next((width for width in HEIGHTS if head_dim <= width), None)
        if width is None:  # a rare shape, not worth a kernel
            return reference.paged_attention(q, kv, batch, spec)
        assert q.stride()[1:] == (head_dim, 1)
        few, many = HEIGHTS[width]
        group_tokens, max_blocks = num_tokens * num_heads // num_kv_heads, batch.block_tables.shape[1]
        height = few if group_tokens <= few * num_seqs else many
        # Where a sequence begins and how long it is only the device knows: these are upper limits, and blocks
        # that find nothing to do end at once.
        num_tiles, num_splits = group_tokens // height + num_seqs, _ceil(max_blocks * block_size, SPLIT_KEYS)
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
            batch.query_start, batch.context_lens, num_seqs,
            spec.scale, spec.softcap, spec.window, spec.alibi_slopes, y, partials, num_splits,
        )  # fmt: skip
        if partials is not None:
            self._launcher.launch(
                "merge_splits", (num_tokens, num_heads), min(width, 128),
                partials, num_splits, num_heads, head_dim, batch.query_start, batch.context_lens, num_seqs,
                spec.window, y,
            )  # fmt: skip
        return y


def _ceil(number: int, unit: int) -> int:
    return -(-number // unit)


def _row_threads(width: int) -> int:
    """A function of the width alone: it decides the order of a sum."""
    return 32 if width <= NARROW_ROW else THREADS


def pack(
    name: str, values: Sequence[object]
) -> tuple[list[ctypes._SimpleCData[Any]], ctypes.Array[ctypes.c_void_p]]:
    """A kernel's arguments, and pointers to them, as cuLaunchKernel takes them."""
    kinds = SIGNATURES[name]
    assert len(values) == len(kinds), name
    plain = (value.data_ptr() if isinstance(value, Tensor) else value for value in values)
    cells = [_C_TYPES[kind](value) for kind, value in zip(kinds, plain, strict=True)]
    return cells, (ctypes.c_void_p * len(cells))(*(ctypes.addressof(cell) for cell in cells))


class CudaLauncher:
    """The kernels in a GPU's primary context, the one that torch uses, launched on torch's current stream."""

    def __init__(self, device: torch.device, image: bytes) -> None:
        """`image` is what nvrtc.py compiled for this device; it stays loaded as long as the process lives.
        Raises ConfigError if the driver refuses it."""
        self._device = torch.device("cuda", device.index or 0)
        properties = torch.cuda.get_device_properties(self._device)
        self.num_multiprocessors = properties.multi_processor_count
        self.has_tensor_cores = (properties.major, properties.minor) >= (7, 5)
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._context = ctypes.c_void_p()
        self._functions = {name: ctypes.c_void_p() for name in SIGNATURES}
        try:
            self._load(image)
        except RuntimeError as error:
            raise ConfigError(
                f"{error}: the driver can't run our kernels. A newer driver may help; --kernels torch does "
                "without them"
            ) from error

    def _load(self, image: bytes) -> None:
        handle, module = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(handle), self._device.index)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuModuleLoadData", ctypes.byref(module), image)
        for name, function in self._functions.items():
            self._call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())

    def launch(self, name: str, grid: Sequence[int], num_threads: int, *values: object) -> None:
        """Raises RuntimeError, as torch does, for whatever went wrong on the device until now."""
        if 0 in grid:
            return
        x, y, z = (*grid, 1, 1)[:3]
        cells, pointers = pack(name, values)
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        self._call("cuCtxSetCurrent", self._context)  # whatever thread this is
        self._call(
            "cuLaunchKernel", self._functions[name], x, y, z, num_threads, 1, 1, 0, stream, pointers, None
        )
        del cells  # the driver has copied them

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"CUDA: {name} failed: {(text.value or b'?').decode()} (error {code})")
