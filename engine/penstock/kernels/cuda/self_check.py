"""The kernels of a card, compared with the reference on small inputs. A compiler or a driver may be wrong
about code that was right on every other card: the first start on a card shows it."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.kernels.int4_tensor import Int4Tensor
from penstock.kernels.operands import (
    ACTIVATION_CODES,
    ROUTER_CODES,
    AttentionSpec,
    BatchLayout,
    LayerKV,
    Matrix,
    QuantizedTensor,
    StateSlots,
)
from penstock.kernels.planes_tensor import PlanesTensor
from penstock.kernels.protocol import Kernels
from penstock.kernels.reference import ReferenceKernels
from penstock.spec import FLOAT16, FLOAT32, INT8, LATENT_FLOAT16, KVLayout

#: What sums of float32 may differ by, where the order of additions differs, for elements of about 1.
TOLERANCE = 2e-5
#: Tokens of products: one and few are streams of weights, many are tiles. An odd number of inputs has kernels
#: of its own.
FEW, MANY = (1, 2, 4, 7), (20,)
OUT_FEATURES, IN_FEATURES, ODD_FEATURES = 72, 128, 100
#: cuMemHostRegister's flag for memory that the card's kernels see.
REGISTER_DEVICEMAP = 2


class Case(NamedTuple):
    """A call that is made with both kernels."""

    name: str
    #: Makes the call on a device; returns everything that it computed.
    call: Callable[[Kernels, torch.device], Tensor]
    #: 0: all bits have to be equal.
    tolerance: float = TOLERANCE


def mismatches(
    kernels: Kernels, device: torch.device, activations: str, num_multiprocessors: int = 1
) -> list[str]:
    """The cases in which kernels on a device differ from the reference, and how. [] is as it should be. An
    error of a kernel is a mismatch, too."""
    reference, found = ReferenceKernels(activations), list[str]()
    for case in cases(num_multiprocessors):
        expected = case.call(reference, torch.device("cpu"))
        try:
            mine = case.call(kernels, device).cpu()
        except (RuntimeError, TypeError) as error:
            found.append(f"{case.name}: {str(error).splitlines()[0]}")
            continue
        if trouble := _difference(mine, expected, case.tolerance):
            found.append(f"{case.name}: {trouble}")
    return found


def _difference(mine: Tensor, expected: Tensor, tolerance: float) -> str:
    """Where two results differ, for people; "" if they don't."""
    if mine.shape != expected.shape:
        return f"shape {tuple(mine.shape)} instead of {tuple(expected.shape)}"
    error = (mine - expected).abs() / expected.abs().clamp_min(1)
    wrong = ~(error <= tolerance)  # NaN is wrong
    if not wrong.any():
        return ""
    first = int(wrong.flatten().int().argmax())
    values = mine.flatten()[first].item(), expected.flatten()[first].item()
    numbers = f"{int(wrong.sum())} of {wrong.numel()} numbers differ"
    return f"{numbers}, for example {values[0]} instead of {values[1]}"


def cases(num_multiprocessors: int) -> Iterator[Case]:
    """All calls; each kernel of a card with so many multiprocessors is in one of them. Tiles of the full
    height need two of them for each multiprocessor, of 128 rows each."""
    draw = torch.Generator().manual_seed(17)
    yield from _products(draw, (*FEW, *MANY, 256 * num_multiprocessors + 1))
    yield from _rows(draw)
    yield from _attention(draw)
    yield from _recurrences(draw)


def _products(draw: torch.Generator, sizes: tuple[int, ...]) -> Iterator[Case]:
    for name, matrix, in_features in _matrices(draw):
        for num_tokens in sizes if name.endswith(f", {IN_FEATURES} inputs") else sizes[:-1]:
            x = torch.randn(num_tokens, in_features, generator=draw)

            def call(
                kernels: Kernels, device: torch.device, x: Tensor = x, matrix: Matrix = matrix
            ) -> Tensor:
                return kernels.linear(x.to(device), matrix.map(lambda part: part.to(device)))

            yield Case(f"product of {num_tokens} tokens with {name}", call, 0.0)


def _matrices(draw: torch.Generator) -> Iterator[tuple[str, Matrix, int]]:
    for in_features in (IN_FEATURES, ODD_FEATURES):
        shape = (OUT_FEATURES, in_features)
        qweight = torch.randint(-127, 128, shape, dtype=torch.int8, generator=draw)
        whole = QuantizedTensor(qweight, torch.rand(shape[0], generator=draw))
        yield f"INT8, {in_features} inputs", whole, in_features
        yield f"planes, {in_features} inputs", PlanesTensor.of(whole), in_features
        yield f"upper planes, {in_features} inputs", PlanesTensor.of(whole).upper_alone(), in_features
    shape, groups = (OUT_FEATURES, IN_FEATURES), IN_FEATURES // 32
    qweight = torch.randint(-127, 128, shape, dtype=torch.int8, generator=draw)
    scale = torch.rand(OUT_FEATURES, groups, generator=draw)
    yield "INT8 in groups", QuantizedTensor(qweight, scale), IN_FEATURES
    yield "planes in groups", PlanesTensor.of(QuantizedTensor(qweight, scale)), IN_FEATURES
    codes = torch.randint(0, 256, (OUT_FEATURES, IN_FEATURES // 2), dtype=torch.uint8, generator=draw)
    for codebook in ("signed", "mxfp4"):
        yield f"INT4 ({codebook})", Int4Tensor(codes, scale.bfloat16(), 32, codebook), IN_FEATURES
    zeros = torch.randint(0, 16, (OUT_FEATURES, groups), dtype=torch.uint8, generator=draw)
    with_zeros = Int4Tensor(codes, scale.half(), 32, "unsigned", sub_minimum=zeros)
    yield "INT4 with zero points", with_zeros, IN_FEATURES


def _rows(draw: torch.Generator) -> Iterator[Case]:
    """Kernels of single rows."""
    for width in (96, 1000):  # summed by a warp, and by a block
        x, weight, bias = (torch.randn(*size, generator=draw) for size in ((5, width), (width,), (width,)))
        yield Case(f"rms_norm of {width}", partial(_call, "rms_norm", x, weight, 1e-5))
        yield Case(f"layer_norm of {width}", partial(_call, "layer_norm", x, weight, bias, 1e-5))
    x = torch.randn(3, 500, generator=draw)
    for function in ACTIVATION_CODES:
        yield Case(f"activation {function}", partial(_call, "activation", x, function))
    yield Case("fetch", partial(_fetch, x), 0.0)
    yield Case("gated activation", partial(_call, "gated_activation", x, "silu"))
    router = torch.randn(24, 500, generator=draw)
    for scores in ROUTER_CODES:
        yield Case(f"router, {scores}", partial(_call, "router_scores", x, router, None, scores))
    heads, angles = torch.randn(5, 4, 32, generator=draw), torch.rand(5, 16, generator=draw)
    for is_interleaved in (False, True):

        def rotate(kernels: Kernels, device: torch.device, is_interleaved: bool = is_interleaved) -> Tensor:
            turned = heads.clone().to(device)
            kernels.rope(turned, angles.cos().to(device), angles.sin().to(device), is_interleaved)
            return turned

        yield Case(f"rope{', interleaved' if is_interleaved else ''}", rotate)


def _fetch(x: Tensor, kernels: Kernels, device: torch.device) -> Tensor:
    """x, and then what the host has written to the same place, brought by the card's kernel into rows with
    gaps between them; the reference has no such kernel."""
    found, fetch = [x, -x], getattr(kernels, "fetch", None)
    if fetch is not None:
        rows = torch.frombuffer(mmap.mmap(-1, x.nbytes), dtype=torch.float32).view(x.shape)
        with seen_by_card(rows, device) as (source, address):
            for index, each in enumerate((x, -x)):
                source.copy_(each)
                y = torch.zeros(len(x), x.shape[1] + 12, device=device)
                fetch(address, y[:, : x.shape[1]])
                found[index] = y.cpu()[:, : x.shape[1]]  # which waits for the card
    return torch.cat(found).to(device)


@contextlib.contextmanager
def seen_by_card(rows: Tensor, device: torch.device) -> Iterator[tuple[Tensor, int]]:
    """Rows in pages of their own that are pinned meanwhile, and their address for the card. Where no memory
    can be pinned, nothing is fetched in service either: then rows on the card."""
    if device.type != "cuda":
        yield rows, rows.data_ptr()
        return
    driver, on_card = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
    address, num_bytes = ctypes.c_void_p(rows.data_ptr()), ctypes.c_size_t(rows.nbytes)
    with torch.cuda.device(device):
        torch.empty(1, device=device)  # torch makes the card's context this thread's
        if driver.cuMemHostRegister_v2(address, num_bytes, REGISTER_DEVICEMAP):
            there = rows.to(device)
            yield there, there.data_ptr()
            return
        try:
            is_unseen = driver.cuMemHostGetDevicePointer_v2(ctypes.byref(on_card), address, 0)
            there = rows.to(device) if is_unseen else rows
            yield there, there.data_ptr() if is_unseen else on_card.value
        finally:
            driver.cuMemHostUnregister(address)


def _call(name: str, *rest: Any) -> Tensor:
    """A method of the kernels with its arguments. `rest` ends with the kernels and the device, to which
    tensors are moved."""
    *arguments, kernels, device = rest
    moved = (each.to(device) if isinstance(each, Tensor) else each for each in arguments)
    result: Tensor = getattr(kernels, name)(*moved)
    return result


@dataclass(frozen=True)
class _Keys:
    """Two sequences: one in the middle of its answer, one whose prompt is computed."""

    num_past: int
    num_new: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layout: KVLayout
    spec: AttentionSpec
    block_size: int = 16

    def call(self, kernels: Kernels, device: torch.device) -> Tensor:
        """Writes keys and values, and attends to them."""
        draw, lengths = torch.Generator().manual_seed(self.head_dim), (self.num_past + 1, self.num_new)
        blocks = [-(-length // self.block_size) for length in lengths]
        tables = torch.zeros(2, max(blocks), dtype=torch.int32)
        tables[0, : blocks[0]] = torch.arange(blocks[0]) + blocks[1]
        tables[1, : blocks[1]] = torch.arange(blocks[1])
        sizes = sum(blocks), self.block_size, self.num_kv_heads, self.head_dim
        parts = (
            torch.zeros(part.shape(*sizes), dtype=getattr(torch, part.dtype)) for part in self.layout.parts
        )
        kv = LayerKV(self.layout, tuple(part.to(device) for part in parts))
        positions = torch.cat([torch.arange(length) for length in lengths])
        of = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))
        slots = (
            tables[of, positions // self.block_size].long() * self.block_size + positions % self.block_size
        )
        k, v = (
            torch.randn(sum(lengths), self.num_kv_heads, self.head_dim, generator=draw).to(device)
            for _ in "kv"
        )
        kernels.write_kv(k, v, kv, slots.to(device))
        starts = torch.tensor([0, 1, 1 + self.num_new], dtype=torch.int32)
        rows = torch.cat([positions[self.num_past : lengths[0]], positions[lengths[0] :]])
        batch = BatchLayout(
            rows, slots[-len(rows) :], tables, starts, torch.tensor(lengths, dtype=torch.int32)
        )
        q = torch.randn(len(rows), self.num_heads, self.head_dim, generator=draw)
        return kernels.paged_attention(q.to(device), kv, batch.to(device), _on(self.spec, device))


def _attention(draw: torch.Generator) -> Iterator[Case]:
    """Few rows and many of each width, a context that is shared by several blocks, and latents."""
    for layout, head_dim, num_new in itertools.product((FLOAT16, INT8), (64, 128, 256), (1, 12)):
        keys = _Keys(30, num_new, 4, 2, head_dim, layout, AttentionSpec(4, head_dim**-0.5))
        yield Case(f"attention, {layout.name}, {head_dim} dimensions, {num_new} new tokens", keys.call)
    for name, spec in _SPECS.items():
        keys = _Keys(30, 9, 4, 2, 64, FLOAT32, spec)
        yield Case(f"attention with {name}", keys.call)
    yield Case("attention to a long context", _Keys(700, 1, 4, 2, 64, FLOAT16, AttentionSpec(4, 0.1)).call)
    latent = AttentionSpec(4, 0.1, latent_dim=64)
    yield Case("attention to latents", _Keys(30, 9, 4, 1, 80, LATENT_FLOAT16, latent).call)


def _recurrences(draw: torch.Generator) -> Iterator[Case]:
    """A sequence that goes on and one that begins, with a copy kept of a state; keys whose states registers
    hold, and others."""

    def integers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    slots = StateSlots(integers(2, 0), integers(0, 1, 1), integers(1), integers(1))
    starts, lengths = integers(0, 3, 5), integers(9, 2)
    places = torch.zeros(5, dtype=torch.int64)
    batch = BatchLayout(places, places, torch.zeros(2, 1, dtype=torch.int32), starts, lengths, states=slots)

    def of(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    x = of(5, 40), of(4, 40), of(40)
    yield Case("short convolution", partial(_recur, "short_conv", of(3, 3, 40), batch, *x))
    for key_dim in (40, 64, 128, 256):
        k, v = of(5, 2, key_dim) / key_dim**0.5, of(5, 4, 24)
        for beta in (None, torch.rand(5, 4, generator=draw)):
            fed = of(5, 2, key_dim), k, v, torch.rand(5, 4, generator=draw), beta
            name = f"recurrence of keys of {key_dim}" + (", by the delta rule" if beta is not None else "")
            yield Case(name, partial(_recur, "recurrence", of(3, 4, key_dim, 24), batch, *fed))
        by_channel = *fed[:3], torch.rand(5, 4, key_dim, generator=draw), fed[4]
        name = f"recurrence of keys of {key_dim}, a decay for each channel"
        yield Case(name, partial(_recur, "recurrence", of(3, 4, key_dim, 24), batch, *by_channel))


def _recur(name: str, states: Tensor, batch: BatchLayout, *rest: Any) -> Tensor:
    """A recurrence's results and states. `rest` is as _call() has it."""
    *fed, kernels, device = rest
    moved = states.to(device, copy=True)
    y = _call(name, *fed, moved, batch.to(device), kernels, device)
    return torch.cat((y.flatten(), moved.flatten()))


_SPECS: Mapping[str, AttentionSpec] = {
    "a window": AttentionSpec(4, 0.2, window=19),
    "a soft cap": AttentionSpec(4, 0.5, softcap=3.0),
    "chunks": AttentionSpec(4, 0.2, chunk=19),
    "slopes": AttentionSpec(4, 0.2, alibi_slopes=torch.linspace(0.01, 0.7, 4)),
    "sinks": AttentionSpec(4, 0.2, sinks=torch.linspace(-3, 5, 4)),
}


def _on(spec: AttentionSpec, device: torch.device) -> AttentionSpec:
    slopes, sinks = (None if each is None else each.to(device) for each in (spec.alibi_slopes, spec.sinks))
    return replace(spec, alibi_slopes=slopes, sinks=sinks)
