"""Keys and values as INT8: the codes and scales of every set of kernels, bit for bit, what attention makes of
them, and what the engine says of their bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernel_cases import ATTENTION, ATTENTION_ERROR, close, int8_kv, paged_case
from test_kernels import BUILDS, FAST, kernels
from torch import Tensor

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.kernels.int8_kv import quantize_kv
from penstock.kernels.operands import AttentionSpec, LayerKV
from penstock.kernels.reference import ReferenceKernels
from penstock.spec import FLOAT16, FLOAT32, INT8

NUM_BLOCKS, HEADS, BLOCK_SIZE = 3, 2, 16


def vectors(head_dim: int) -> Tensor:
    """Heads of 20 tokens, of all sizes; among them zeros, infinity, NaN, and what no scale can hold."""
    x = torch.randn(20, HEADS, head_dim, generator=torch.Generator().manual_seed(head_dim))
    x *= 10.0 ** torch.linspace(-30, 30, 20)[:, None, None]
    x[3, 0], x[4, 0], x[5, 1] = 0.0, 1e-37, torch.linspace(-127, 127, head_dim) / 2  # halves round to even
    x[6, 0, 1], x[7, 1, 0], x[8, 0, 2] = torch.inf, -torch.inf, torch.nan
    x[9, 0] = torch.finfo(torch.float32).max
    return x


def empty_kv(head_dim: int) -> LayerKV:
    k = torch.zeros(NUM_BLOCKS, HEADS, head_dim, BLOCK_SIZE)
    return int8_kv(k, k.transpose(2, 3).contiguous())


def assert_same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["torch", *FAST])
@pytest.mark.parametrize("head_dim", [7, 24, 128])
def test_all_kernels_write_the_same_codes_and_scales(kind: str, head_dim: int) -> None:
    x, slots = vectors(head_dim), torch.randperm(48, generator=torch.Generator().manual_seed(1))[:20]
    mine, expected = empty_kv(head_dim), empty_kv(head_dim)
    kernels(kind).write_kv(x, x.flip(0).contiguous(), mine, slots)
    ReferenceKernels().write_kv(x, x.flip(0), expected, slots)
    for found, wanted in zip(mine.int8_parts(), expected.int8_parts(), strict=True):
        assert_same(found, wanted)


def test_a_code_is_the_nearest_multiple_of_a_scale_that_bfloat16_holds() -> None:
    """Against the exact quotients; the scale is at most 2^-7 larger than the smallest that fits."""
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64).float()
    codes, scale = quantize_kv(x)
    least = x.double().abs().amax(1) / 127
    assert bool(((least * (1 - 1e-6) <= scale.double()) & (scale.double() <= least * (1 + 2**-7))).all())
    quotients = x.double() / scale.double()[:, None]
    assert float((quotients - codes).abs().max()) <= 0.5 + 1e-5
    assert int(codes.abs().max()) == 127


def test_no_scale_depends_on_another_vector() -> None:
    x = vectors(24)
    together = quantize_kv(x)
    for row in range(len(x)):
        for whole, alone in zip(together, quantize_kv(x[row : row + 1]), strict=True):
            assert_same(whole[row], alone[0])


@pytest.mark.parametrize("kind", ["reference", *FAST])
@pytest.mark.parametrize("case", ["plain", "window, sinks"])
def test_attention_is_that_over_the_products_of_codes_and_scales(kind: str, case: str) -> None:
    """code * scale is exact in float32, so that attention over float32 has the same operands."""
    spec: AttentionSpec = ATTENTION[case]
    q, kv, layout = paged_case(torch.Generator().manual_seed(4), torch.int8, 40)
    assert kv.layout is INT8
    k, v, k_scale, v_scale = (part.double() for part in kv.int8_parts())
    products = k * k_scale[:, :, None], v * v_scale[..., None]
    floats = tuple(part.float() for part in products)
    assert all(
        torch.equal(part.double().nan_to_num(), exact.nan_to_num())
        for part, exact in zip(floats, products, strict=True)
    )
    expected = ReferenceKernels().paged_attention(q, LayerKV(FLOAT32, floats), layout, spec)
    mine = ReferenceKernels() if kind == "reference" else kernels(kind)
    close(mine.paged_attention(q, kv, layout, spec), expected, ATTENTION_ERROR)


@pytest.mark.parametrize("kind", ["torch", *BUILDS])
def test_float16_that_clamps_says_so_once_and_names_the_flag(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    mine, slots = kernels(kind), torch.tensor([5])
    parts = torch.zeros(1, HEADS, 24, BLOCK_SIZE), torch.zeros(1, HEADS, BLOCK_SIZE, 24)
    x = torch.full((1, HEADS, 24), 65504.0)
    x[0, 0, 0] = -65504.0
    mine.write_kv(x, x, LayerKV(FLOAT16, tuple(part.half() for part in parts)), slots)
    for layout, form in ((FLOAT32, LayerKV(FLOAT32, parts)), (INT8, empty_kv(24))):
        mine.write_kv(4 * x, x, form, slots)
        assert not caplog.records, layout
    for k, v in ((x, 2 * x), (2 * x, x)):
        mine.write_kv(k, v, LayerKV(FLOAT16, tuple(part.half() for part in parts)), slots)
    (record,) = caplog.records
    assert "beyond 65504" in record.getMessage() and "--kv-dtype int8" in record.getMessage()


def test_the_plan_has_half_the_bytes(tiny_llama: Path) -> None:
    """Two bytes of a head's scale beside the bytes of its integers."""
    assert INT8.bytes_per_token(8, 128) == 2 * 8 * (128 + 2)
    assert INT8.bytes_per_token(8, 128) / FLOAT16.bytes_per_token(8, 128) < 0.51
    settings = {"num_kv_tokens": 160, "max_model_len": 96, "num_threads": 1}
    with Engine.load(tiny_llama, EngineConfig(**settings)) as half:
        expected = half.plan.kv_bytes * 18 // 32  # of heads with 16 dimensions
    with Engine.load(tiny_llama, EngineConfig(kv_dtype="int8", **settings)) as engine:
        assert engine.plan.kv_bytes == expected
        assert (
            sum(part.nbytes for parts in engine.model.executor.kv_cache.layers for part in parts) == expected
        )
