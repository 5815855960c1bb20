"""Products with weights in planes: every set of kernels gives the bits of INT8, whichever way the matrix
lies."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch
from test_int4_kernels import FAST, kernels
from torch import Tensor

from penstock.kernels import PlanesTensor, QuantizedTensor
from penstock.kernels.planes_tensor import join, split
from penstock.kernels.reference import ReferenceKernels, quantize_activations

#: Rows, columns, group size (0: a scale per channel): edges of vectors, several rounds of joined channels.
SHAPES = [
    (1, 2, 0), (7, 66, 0), (70, 254, 0), (9, 4198, 0), (6, 2112, 0), (67, 4096, 0),
    (1, 32, 32), (33, 192, 64), (65, 1152, 128), (5, 2208, 32),
]  # fmt: skip


def matrix(rows: int, columns: int, size: int, seed: int) -> QuantizedTensor:
    generator = torch.Generator().manual_seed(seed)
    qweight = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=generator)
    groups = (columns // size,) if size else ()
    return QuantizedTensor(qweight, torch.rand(rows, *groups, generator=generator) * 0.01)


class Case(NamedTuple):
    x: Tensor
    weight: PlanesTensor
    bias: Tensor | None
    expected: Tensor


@functools.cache
def cases(activations: str) -> list[Case]:
    """Whole matrices against INT8, and upper planes alone against INT8 of the middles of their steps."""
    made, reference = [], ReferenceKernels(activations)
    for number, (rows, columns, size) in enumerate(SHAPES):
        whole = matrix(rows, columns, size, number)
        middles = QuantizedTensor((whole.qweight >> 4 << 4) + 8, whole.scale)
        generator = torch.Generator().manual_seed(number)
        for num_tokens in (1, 2, 3, 8, 19, 24):
            x = torch.randn(num_tokens, columns, generator=generator) * 10 ** (number - 3)
            bias = torch.randn(rows, generator=generator) if num_tokens % 2 else None
            planes = PlanesTensor.of(whole)
            made.append(Case(x, planes, bias, reference.linear(x, whole, bias)))
            made.append(Case(x, planes.upper_alone(), bias, reference.linear(x, middles, bias)))
    return made


def test_both_planes_together_are_the_integers() -> None:
    integers = torch.arange(-128, 128, dtype=torch.int8).repeat(2, 1)
    integers[1] = integers[0].flip(0)
    upper, lower = split(integers)
    assert torch.equal(join(upper, lower), integers)
    codes = [torch.stack((plane & 15, plane >> 4), -1).flatten(1).int() for plane in (upper, lower)]
    assert torch.equal(16 * (codes[0] - 8) + codes[1], integers.int())
    assert int(((codes[0] - 8) * 16 + 8 - integers.int()).abs().max()) == 8


def test_the_product_is_the_sum_of_the_planes_products() -> None:
    """x q = 16 (x h) + (x l), in exact integers."""
    whole = matrix(7, 66, 0, 3)
    x = torch.randn(5, 66, generator=torch.Generator().manual_seed(1))
    q, scale = quantize_activations(x, "int16")
    upper, lower = whole.qweight.long() >> 4, whole.qweight.long() & 15
    sums = 16 * (q.long() @ upper.t()) + q.long() @ lower.t()
    expected = (sums.double() * (scale.double()[:, None] * whole.scale.double())).float()
    assert torch.equal(ReferenceKernels().linear(x, PlanesTensor.of(whole)), expected)


@pytest.mark.parametrize("kind", FAST)
@pytest.mark.parametrize("activations", ["int16", "int8"])
def test_products_have_the_bits_of_int8(kind: str, activations: str) -> None:
    mine = kernels(kind, activations)
    for x, weight, bias, expected in cases(activations):
        assert torch.equal(mine.linear(x, weight, bias), expected), (
            weight.shape,
            weight.lower is None,
            len(x),
        )


def test_views_and_look_ups() -> None:
    for size in (0, 32):
        whole = matrix(9, 96, size, 1)
        planes = PlanesTensor.of(whole)
        ids = torch.tensor([8, 0, 3])
        assert torch.equal(planes.look_up(ids), whole.look_up(ids))
        assert torch.equal(planes.rows(2, 5).dequantize(), whole.rows(2, 5).dequantize())
        assert planes.shape == whole.shape and planes.num_groups == whole.num_groups
        upper = planes.upper_alone()
        assert torch.equal(upper.rows(2, 5).dequantize(), upper.dequantize()[2:5])
