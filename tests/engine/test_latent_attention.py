"""Attention over latents, and products of each head with its own part of a matrix: every set of kernels
against float64, the reference, and itself in other company."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from kernel_cases import ATTENTION_ERROR, close, latent_batch, random_matrix
from test_int4_kernels import matrix as int4_matrix
from test_kernels import BUILDS, FAST, kernels
from torch import Tensor

from penstock.kernels.head_blocks import HeadBlocks
from penstock.kernels.operands import AttentionSpec, BatchLayout, LayerKV, Matrix, QuantizedTensor
from penstock.kernels.planes_tensor import PlanesTensor
from penstock.kernels.reference import ReferenceKernels
from penstock.kernels.sublayers import partial_results
from penstock.kernels.sublayers.partial_results import SPLIT_KEYS
from penstock.spec import LATENT_FLOAT16, LATENT_FLOAT32

SEQUENCES = [(1, 1), (37, 37), (90, 5), (16, 1)]
SINKS = torch.linspace(-3, 5, 40)


def spec_of(num_heads: int, latent_dim: int, **kinds: object) -> AttentionSpec:
    return dataclasses.replace(AttentionSpec(num_heads, 0.04, latent_dim=latent_dim), **kinds)  # type: ignore[arg-type]


def exact_attention(q: Tensor, kv: LayerKV, layout: BatchLayout, spec: AttentionSpec) -> Tensor:
    """In float64, of keys and values that are gathered into plain matrices."""
    results = []
    for seq, length in enumerate(layout.context_lens.tolist()):
        rows = torch.cat([kv.parts[0][block, 0].t() for block in layout.block_tables[seq]])[:length].double()
        first, last = layout.query_start[seq : seq + 2].tolist()
        for token in range(first, last):
            seen = rows[: int(layout.positions[token]) + 1]
            weights = torch.softmax(q[token].double() @ seen.t() * spec.scale, dim=-1)
            results.append((weights @ seen[:, : spec.latent_dim]).flatten())
    return torch.stack(results).float()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_reference_equals_float64(dtype: torch.dtype) -> None:
    q, kv, layout = latent_batch(torch.Generator().manual_seed(0), SEQUENCES, 5, 24, dtype)
    spec = spec_of(5, 16)
    close(
        ReferenceKernels().paged_attention(q, kv, layout, spec),
        exact_attention(q, kv, layout, spec),
        ATTENTION_ERROR,
    )


@pytest.mark.parametrize("kind", FAST)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("num_heads", "row_dim", "latent_dim", "kinds"),
    [
        (1, 9, 7, {}),
        (40, 96, 64, {"sinks": SINKS}),
        (3, 72, 50, {"window": 19}),
        (17, 576, 512, {"chunk": 23}),
        (6, 700, 610, {}),
    ],
)
def test_latents_equal_the_reference(
    kind: str, dtype: torch.dtype, num_heads: int, row_dim: int, latent_dim: int, kinds: dict[str, object]
) -> None:
    """Heads that fill no tile, that share several, and in a number that only 1 divides."""
    q, kv, layout = latent_batch(torch.Generator().manual_seed(1), SEQUENCES, num_heads, row_dim, dtype, 48)
    spec = spec_of(num_heads, latent_dim, **kinds)
    expected = ReferenceKernels().paged_attention(q, kv, layout, spec)
    close(kernels(kind).paged_attention(q, kv, layout, spec), expected, ATTENTION_ERROR)


@pytest.mark.parametrize("kind", BUILDS)
@pytest.mark.parametrize("num_heads", [10, 32])
def test_parts_of_a_long_context_are_merged(
    kind: str, num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether threads share a sequence or not, and whether a token comes alone: the same bits."""
    sequences = [(2 * SPLIT_KEYS + 5, 3), (7, 7), (SPLIT_KEYS + 1, 2)]
    q, kv, layout = latent_batch(torch.Generator().manual_seed(3), sequences, num_heads, 40, torch.float16)
    native, spec = kernels(kind), spec_of(num_heads, 32, sinks=SINKS[:num_heads])
    shared = native.paged_attention(q, kv, layout, spec)
    close(shared, ReferenceKernels().paged_attention(q, kv, layout, spec), ATTENTION_ERROR)
    first = layout.positions[:1]
    alone = BatchLayout(
        first,
        torch.zeros(0),
        layout.block_tables[:1],
        torch.tensor([0, 1], dtype=torch.int32),
        first.int() + 1,
    )
    assert torch.equal(native.paged_attention(q[:1], kv, alone, spec)[0], shared[0])
    monkeypatch.setattr(partial_results, "MAX_PARTIAL_BYTES", 0)
    assert torch.equal(native.paged_attention(q, kv, layout, spec), shared)


@pytest.mark.parametrize("kind", ["torch", *FAST])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_written_latents_are_found_again(kind: str, dtype: torch.dtype) -> None:
    rows = torch.randn(20, 1, 21)
    rows[3, 0, 0], rows[4, 0, 1] = 1e6, 1e-7  # beyond float16, and subnormal there
    slots = torch.randperm(48)[:20]
    stored = torch.zeros(3, 1, 21, 16, dtype=dtype)
    layout = LATENT_FLOAT16 if dtype == torch.float16 else LATENT_FLOAT32
    kernels(kind).write_kv(rows, rows[..., :16], LayerKV(layout, (stored,)), slots)
    limit = torch.finfo(torch.float16).max
    for row, slot in zip(rows[:, 0], slots.tolist(), strict=True):
        expected = row.clamp(-limit, limit).half() if dtype == torch.float16 else row
        assert torch.equal(stored[slot // 16, 0, :, slot % 16], expected)


def grouped(rows: int, columns: int) -> QuantizedTensor:
    plain = random_matrix(rows, columns, torch.Generator().manual_seed(4))
    return QuantizedTensor(plain.qweight, torch.rand(rows, columns // 32) * 0.01)


def reordered(rows: int, columns: int) -> Matrix:
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(5)).to(torch.int32)
    return int4_matrix("zero points", rows, columns, 32, torch.bfloat16)._replace(order=order)


#: By form: a matrix of (rows, columns).
MATRICES: dict[str, Callable[[int, int], Matrix]] = {
    "int8": lambda *shape: random_matrix(*shape, torch.Generator().manual_seed(3)),
    "int8, groups": grouped,
    "planes": lambda *shape: PlanesTensor.of(random_matrix(*shape, torch.Generator().manual_seed(3))),
    "int4, zero points, order": reordered,
}


@pytest.mark.parametrize("kind", ["torch", *FAST])
@pytest.mark.parametrize("form", MATRICES)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 19])
def test_products_of_heads_with_their_own_rows(
    kind: str, form: str, is_transposed: bool, num_tokens: int
) -> None:
    """Three heads of 31 rows, of which 12 are used: the reference's bits, also for a token alone; and each
    head's numbers."""
    mine, weight = kernels(kind), MATRICES[form](3 * 31, 64)
    if isinstance(weight, PlanesTensor) and "PlanesTensor" not in str(mine.traits.matrices):
        pytest.skip("these kernels know no planes")
    inputs, outputs = (12, 64) if is_transposed else (64, 12)
    x = torch.randn(num_tokens, 4 * inputs, generator=torch.Generator().manual_seed(1))[:, : 3 * inputs]
    blocks = HeadBlocks(weight, 3, 7, 19, is_transposed)
    y = mine.linear(x, blocks)
    assert y.shape == (num_tokens, blocks.out_features) == (num_tokens, 3 * outputs)
    assert torch.equal(y, ReferenceKernels().linear(x, blocks))
    expected = x.double() @ blocks.dequantize().double().t()
    assert float((y - expected).abs().max()) <= 1e-4 * float(expected.abs().max())
    for head in range(3):
        own = weight.dequantize()[31 * head + 7 : 31 * head + 19]
        own = own if is_transposed else own.t()
        expected = x[:, head * inputs : (head + 1) * inputs] @ own
        mine_of = y[:, head * outputs : (head + 1) * outputs]
        assert float((mine_of - expected).abs().max()) <= 1e-4 * float(expected.abs().max())
    assert torch.equal(mine.linear(x[-1:], blocks)[0], y[-1])
