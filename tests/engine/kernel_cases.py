"""Inputs for tests of kernels, and how near their results must be."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import mmap
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from penstock.kernels.cpu import NativeKernels
from penstock.kernels.cuda.launcher import CudaLauncher
from penstock.kernels.cuda.nvrtc import compile_kernels
from penstock.kernels.int4_tensor import Int4Tensor, StackedMatrix
from penstock.kernels.int8_kv import quantize_kv
from penstock.kernels.operands import AttentionSpec, BatchLayout, DistanceBias, LayerKV, QuantizedTensor
from penstock.kernels.planes_tensor import PlanesTensor
from penstock.spec import FLOAT16, FLOAT32, INT8, LATENT_FLOAT16, LATENT_FLOAT32, SCALE_BYTES


def random_matrix(rows: int, columns: int, generator: torch.Generator) -> QuantizedTensor:
    qweight = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, generator=generator)
    return QuantizedTensor(qweight, torch.rand(rows, generator=generator) * 0.01)


def close(mine: Tensor, expected: Tensor, most: float = 4e-6) -> None:
    """Each element to some roundings of its own size, or of 1 where it is smaller."""
    assert mine.shape == expected.shape
    assert float(((mine - expected).abs() / expected.abs().clamp_min(1)).max()) <= most


def paged_batch(
    generator: torch.Generator,
    sequences: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    block_size: int = 16,
) -> tuple[Tensor, LayerKV, BatchLayout]:
    """Sequences of (context, new tokens) in shuffled blocks, (query heads, KV heads): q, cache and layout.
    What no sequence has written is NaN."""
    lengths, new = [length for length, _ in sequences], [count for _, count in sequences]
    num_blocks = [math.ceil(length / block_size) for length in lengths]
    order = torch.randperm(sum(num_blocks) + 3, generator=generator).tolist()
    tables = torch.zeros(len(lengths), max(num_blocks), dtype=torch.int32)
    for row, count in enumerate(num_blocks):
        tables[row, :count] = torch.tensor([order.pop() for _ in range(count)])
    total = sum(num_blocks) + 3
    number = torch.float32 if dtype == torch.int8 else dtype
    k = torch.randn(total, heads[1], head_dim, block_size, generator=generator).to(number)
    v = torch.randn(total, heads[1], block_size, head_dim, generator=generator).to(number)
    k[order], v[order] = math.nan, math.nan
    for row, length in enumerate(lengths):
        last, num_written = tables[row, num_blocks[row] - 1], (length - 1) % block_size + 1
        k[last, :, :, num_written:], v[last, :, num_written:] = math.nan, math.nan
    floats = FLOAT16 if dtype == torch.float16 else FLOAT32
    kv = int8_kv(k, v) if dtype == torch.int8 else LayerKV(floats, (k, v))
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    positions = torch.cat([torch.arange(n - m, n) for n, m in zip(lengths, new, strict=True)])
    layout = BatchLayout(positions, torch.zeros(0), tables, starts, torch.tensor(lengths, dtype=torch.int32))
    return torch.randn(sum(new), heads[0], head_dim, generator=generator), kv, layout


def int8_kv(k: Tensor, v: Tensor) -> LayerKV:
    """K [num_blocks, num_kv_heads, head_dim, block_size] and V [num_blocks, num_kv_heads, block_size,
    head_dim], both float32, as INT8."""
    num_blocks, num_heads, block_size, head_dim = v.shape
    shape = num_blocks, num_heads, head_dim + SCALE_BYTES, block_size
    kv = LayerKV(INT8, (torch.empty(shape, dtype=torch.int8), torch.empty(shape, dtype=torch.int8)))
    codes, values, scale, value_scale = kv.int8_parts()
    turned, scale[:] = quantize_kv(k.transpose(2, 3).contiguous())
    codes[:] = turned.transpose(2, 3)
    values[:], value_scale[:] = quantize_kv(v)
    return kv


class RoundedKV(NativeKernels):
    """The plain twin of INT8: float32 keys and values that were rounded as INT8."""

    def write_kv(self, k: Tensor, v: Tensor, kv: LayerKV, slot_mapping: Tensor) -> None:
        (k, k_scale), (v, v_scale) = quantize_kv(k), quantize_kv(v)
        super().write_kv(k * k_scale[..., None].float(), v * v_scale[..., None].float(), kv, slot_mapping)


def latent_batch(
    generator: torch.Generator,
    sequences: list[tuple[int, int]],
    num_heads: int,
    row_dim: int,
    dtype: torch.dtype,
    block_size: int = 16,
) -> tuple[Tensor, LayerKV, BatchLayout]:
    """paged_batch() with one row per token, which is the key and the value of all heads."""
    q, kv, layout = paged_batch(generator, sequences, (num_heads, 1), row_dim, dtype, block_size)
    form = LATENT_FLOAT16 if dtype == torch.float16 else LATENT_FLOAT32
    return q, LayerKV(form, kv.parts[:1]), layout


def with_prefixes(layout: BatchLayout) -> BatchLayout:
    """Every token sees the first two thirds of its sequence, also what is behind the token."""
    return dataclasses.replace(layout, prefix_lens=(2 * layout.context_lens + 2) // 3)


def random_bias(num_heads: int, boundary: int = 0) -> DistanceBias:
    """Ten distances to either side are told apart."""
    generator = torch.Generator().manual_seed(num_heads)
    across = torch.randn(2, num_heads, generator=generator) if boundary else None
    return DistanceBias(torch.randn(num_heads, 21, generator=generator), boundary, across)


def paged_case(
    generator: torch.Generator, dtype: torch.dtype, head_dim: int
) -> tuple[Tensor, LayerKV, BatchLayout]:
    """Four sequences with contexts of all sizes, part of each new."""
    return paged_batch(generator, [(1, 1), (37, 37), (90, 5), (16, 1)], (6, 2), head_dim, dtype)


#: Of attention: in such cases the reference itself is up to a third of it away from what float64 gives.
ATTENTION_ERROR = 8e-6
ATTENTION = {
    "plain": AttentionSpec(6, 0.2),
    "window": AttentionSpec(6, 0.2, window=19),
    "softcap": AttentionSpec(6, 0.5, softcap=3.0),
    "alibi": AttentionSpec(6, 0.2, alibi_slopes=torch.linspace(0.01, 0.7, 6)),
    "chunks": AttentionSpec(6, 0.2, chunk=19),
    "window, sinks": AttentionSpec(6, 0.2, window=19, sinks=torch.linspace(-3, 5, 6)),
}


@functools.cache
def gpu_launcher() -> CudaLauncher:
    major, minor = torch.cuda.get_device_capability()
    return CudaLauncher(torch.device("cuda", 0), compile_kernels(10 * major + minor))


class OnGpu:
    """A GPU's kernels for tensors of the host: arguments travel there, and back if they were written to."""

    def __init__(self, kernels: object) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*values: Any) -> Any:
            moved: list[tuple[Tensor, Tensor]] = []
            y = getattr(self._kernels, name)(*(_move(value, moved) for value in values))
            for original, copy in moved:
                original.copy_(copy)
            return y if y is None else y.cpu()

        return call


def _move(value: Any, moved: list[tuple[Tensor, Tensor]]) -> Any:
    if isinstance(value, Tensor):
        moved.append((value, value.cuda()))
        return moved[-1][1]
    if isinstance(value, QuantizedTensor | PlanesTensor | Int4Tensor | StackedMatrix):
        return value.map(lambda part: cast(Tensor, _move(part, moved)))
    if isinstance(value, LayerKV):
        return LayerKV(value.layout, tuple(_move(part, moved) for part in value.parts))
    if isinstance(value, BatchLayout | AttentionSpec | DistanceBias):
        parts = {field.name: _move(getattr(value, field.name), moved) for field in dataclasses.fields(value)}
        return type(value)(**parts)
    return value


def guarded(tensor: Tensor) -> Tensor:
    """The same numbers at the end of memory: whoever reads behind them ends the process."""
    data = tensor.contiguous().view(torch.uint8).flatten()
    size = -(-len(data) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    there = torch.frombuffer(memory, dtype=torch.uint8)
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(there.data_ptr() + size), mmap.PAGESIZE, 0)
    copied = there[size - len(data) : size].copy_(data)
    return copied.view(tensor.dtype).view(tensor.shape)
