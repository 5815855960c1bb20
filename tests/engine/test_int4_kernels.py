"""Products with 4-bit codes: every set of kernels gives the bits of reference.py, which is checked against
the definition in exact arithmetic."""

from __future__ import annotations

import functools
import sys
from fractions import Fraction
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from emulated_amx import COMPILER as AMX_COMPILER
from emulated_amx import emulated_amx_kernels
from emulated_avxvnni import COMPILER as AVXVNNI_COMPILER
from emulated_avxvnni import emulated_avxvnni_kernels
from kernel_cases import guarded
from torch import Tensor

from penstock.kernels import Kernels, QuantizedTensor, StackedMatrix
from penstock.kernels.cpu import NativeKernels
from penstock.kernels.cpu_builds import compiled_builds
from penstock.kernels.int4_tensor import CODEBOOKS, Int4Tensor
from penstock.kernels.int_mm import TorchKernels
from penstock.kernels.reference import ReferenceKernels, quantize_activations

BUILDS = compiled_builds()
FAST = [
    "torch",
    *BUILDS,
    *(["emulated amx"] if AMX_COMPILER and "amx" not in BUILDS else []),
    *(["emulated avxvnni"] if AVXVNNI_COMPILER else []),
]
#: Forms of scales and minima, with the codebook that belongs to each.
FORMS = {
    "symmetric": "signed",
    "steps": "signed",
    "steps in some rows": "signed",
    "kept steps": "signed",
    "kept steps in some rows": "signed",
    "zero points": "unsigned",
    "minima": "unsigned",
    "blocks with minima": "unsigned",
    "whole blocks with minima": "unsigned",
    "mxfp4": "mxfp4",
    "shifts": "mxfp4",
    "shifts in some rows": "mxfp4",
    "blocks of a table": "iq4_nl",
}


def matrix(form: str, rows: int, columns: int, size: int, dtype: torch.dtype, seed: int = 0) -> Int4Tensor:
    """A random matrix; blocks have as many groups as divide a row's, or all of them."""
    generator = torch.Generator().manual_seed(seed)
    groups = columns // size
    per_block = next(n for n in (256 // size, 3, 2, 1) if groups % n == 0) if "blocks" in form else 1
    if "whole blocks" in form:
        per_block = groups

    def numbers(width: int) -> Tensor:
        signs = (
            torch.randint(0, 2, (rows, width), generator=generator) * 2 - 1
        )  # our own scales may be negative
        return ((torch.rand(rows, width, generator=generator) * 0.1 + 0.01) * signs).to(dtype)

    def integers(low: int, high: int, kind: torch.dtype) -> Tensor:
        return torch.randint(low, high, (rows, groups), generator=generator, dtype=kind)

    fields: dict[str, Any] = {}
    if per_block > 1:
        fields["sub_scale"] = integers(-32, 64, torch.int8)
    if form == "zero points" or ("with minima" in form and per_block > 1):
        fields["sub_minimum"] = integers(0, 17 if form == "zero points" else 64, torch.uint8)
    if "minima" in form:
        fields["minimum"] = numbers(groups // per_block)
    codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    if "steps" in form:
        # Each row's scales are small integers times one number; the largest integer is 15 or -15.
        units = (
            2.0 ** torch.randint(-12, 0, (rows, 1), generator=generator)
            * (8 + torch.arange(rows) % 8)[:, None]
        )
        of = integers(-15, 16, torch.int8)
        of[:, 0] = 15 - 30 * (torch.arange(rows) % 2)
        of[rows // 2] = 0
        if "kept" in form:
            if "some" in form:
                of[1 : rows - 1 : 5, -1] = 16
                of[2 : rows - 1 : 5, 0] = -128
            return Int4Tensor(codes, units.to(dtype), size, FORMS[form], sub_scale=of)
        scale = units * of
        if "some" in form:  # the others are not among those that are looked at before
            scale[1 : rows - 1 : 5] *= 1.125
            scale[1 : rows - 1 : 5, -1] *= 0.875
        return Int4Tensor(codes, scale.to(dtype), size, FORMS[form])
    if "shifts" in form:
        # MXFP4's own scales are powers of two. Some rows have scales that are far apart, negative, or others.
        scale = 2.0 ** (integers(-5, 1, torch.int8) + 5 * (torch.arange(rows) % 3)[:, None] - 8.0)
        if "some" in form:
            scale[1 : rows - 1 : 5, -1] *= 2.0**-18
            scale[2 : rows - 1 : 5, 0] *= 1.125
            scale[3 : rows - 1 : 5] *= -1
        return Int4Tensor(codes, scale.bfloat16(), size, FORMS[form])
    return Int4Tensor(codes, numbers(groups // per_block), size, FORMS[form], **fields)


def kernels(kind: str, activations: str) -> Kernels:
    if kind == "torch":
        return TorchKernels(activations)
    if kind == "emulated amx":
        return emulated_amx_kernels(activations)
    if kind == "emulated avxvnni":
        return emulated_avxvnni_kernels(activations)
    native = NativeKernels(activations, kind)
    native.set_num_threads(2)
    return native


def exact_product(x: Tensor, weight: Int4Tensor) -> list[list[Fraction]]:
    """x W^T with the activations' integers, as fractions: the definition, element by element."""
    q, scale = quantize_activations(x, "int16")
    table = CODEBOOKS[weight.codebook]
    result = []
    for token in range(x.shape[0]):
        row = []
        for channel in range(weight.out_features):
            total = Fraction(0)
            for column in range(x.shape[1]):
                code = int(weight.codes[channel, column // 2]) >> (4 * (column % 2)) & 15
                group = column // weight.group_size
                block = group * weight.scale.shape[1] // weight.num_groups
                of_group = Fraction(float(weight.scale[channel, block]))
                least = (
                    of_group if weight.minimum is None else Fraction(float(weight.minimum[channel, block]))
                )
                if weight.sub_scale is not None:
                    of_group *= int(weight.sub_scale[channel, group])
                if weight.sub_minimum is not None:
                    least *= int(weight.sub_minimum[channel, group])
                value = of_group * table[code] - (least if weight.has_minimum else 0)
                total += value * int(q[token, column])
            row.append(total * Fraction(float(scale[token])))
        result.append(row)
    return result


@pytest.mark.parametrize("form", FORMS)
def test_the_reference_is_the_definition(form: str) -> None:
    weight = matrix(form, 3, 192, 32, torch.float16)
    x = torch.randn(2, 192, generator=torch.Generator().manual_seed(1))
    mine = ReferenceKernels().linear(x, weight)
    expected = torch.tensor([[float(value) for value in row] for row in exact_product(x, weight)])
    assert float(((mine - expected).abs() / expected.abs().clamp_min(1)).max()) <= 1e-6
    # The same values by another way: float64 times the dequantized matrix, to 16 bits of the activations.
    plain = (x.double() @ weight.dequantize().double().t()).float()
    assert float((mine - plain).abs().max()) <= 1e-3 * float(plain.abs().max())


#: Rows, columns, group size: one group, half vectors at the end, several rounds of scales, panels of several
#: blocks, half a vector behind whole ones; groups of 16, also an odd number of them.
SHAPES = [
    (1, 32, 32), (7, 96, 32), (70, 256, 64), (9, 2304, 32), (65, 2688, 128), (3, 4480, 64), (6, 416, 32),
    (1, 32, 16), (6, 48, 16), (70, 256, 16), (9, 2304, 16), (13, 1184, 16),
]  # fmt: skip


class Case(NamedTuple):
    x: Tensor
    weight: Int4Tensor
    bias: Tensor | None
    expected: Tensor


@functools.cache
def cases(form: str, activations: str) -> list[Case]:
    """Products of each shape, of one token, few, and many."""
    dtypes = [torch.float16, torch.bfloat16] + ([] if "blocks" in form else [torch.float32])
    made = []
    for number, (rows, columns, size) in enumerate(SHAPES):
        weight = matrix(form, rows, columns, size, dtypes[number % len(dtypes)], number)
        generator = torch.Generator().manual_seed(number)
        for num_tokens in (1, 2, 3, 5, 8, 19, 24, 25):
            x = torch.randn(num_tokens, columns, generator=generator) * 10 ** (number - 3)
            bias = torch.randn(rows, generator=generator) if num_tokens % 2 else None
            expected = ReferenceKernels(activations).linear(x, weight, bias)
            made.append(Case(x, weight, bias, expected))
    return made


@pytest.mark.parametrize("activations", ["int16", "int8"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", FAST)
def test_every_build_gives_the_bits_of_the_reference(kind: str, form: str, activations: str) -> None:
    mine = kernels(kind, activations)
    for x, weight, bias, expected in cases(form, activations):
        assert torch.equal(mine.linear(x, weight, bias), expected), weight.shape


@pytest.mark.parametrize("kind", FAST)
@pytest.mark.parametrize(("columns", "size"), [(16416, 32), (27648, 64), (32768, 64), (33280, 64)])
@pytest.mark.parametrize("form", ["steps", "kept steps"])
def test_wide_matrices_in_steps(kind: str, columns: int, size: int, form: str) -> None:
    """Channels that are expanded some at a time, and as many inputs as are never expanded."""
    weight = matrix(form, 35, columns, size, torch.bfloat16)
    x = torch.randn(25, columns, generator=torch.Generator().manual_seed(0))
    expected, mine = ReferenceKernels().linear(x, weight), kernels(kind, "int16")
    for num_tokens in (1, 4, 5, 7, 8, 9, 24, 25):
        assert torch.equal(mine.linear(x[:num_tokens], weight), expected[:num_tokens]), num_tokens


class ManyChannels(NamedTuple):
    """A product of many channels. `spoiled`: rows whose scales are no steps, not looked at before."""

    rows: int
    columns: int
    dtype: torch.dtype = torch.bfloat16
    spoiled: tuple[int, ...] = ()
    num_tokens: int = 1
    threads: int = 1


#: A thread's tasks have 128 channels or more. Some fill four streams, and others leave a rest; rows without
#: steps are among a stream's first channels or later ones, in the first stream or the last, and in a rest.
MANY_CHANNELS = [
    ManyChannels(1024, 384),
    ManyChannels(1686, 1280),
    ManyChannels(1686, 1280, torch.float16),
    ManyChannels(1686, 384, spoiled=(100, 212, 500, 1666)),
    ManyChannels(1024, 1280, torch.float16, spoiled=(148, 355)),
    ManyChannels(3005, 384, threads=2, spoiled=(2000,)),
    ManyChannels(3072, 384, num_tokens=2),
]


@pytest.mark.parametrize("kind", FAST)
@pytest.mark.parametrize("form", ["steps", "kept steps"])
@pytest.mark.parametrize("activations", ["int16", "int8"])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_many_channels_by_one_token(kind: str, form: str, activations: str, size: int) -> None:
    """A task of many channels reads several of them at a time, each in a part of its own."""
    mine = kernels(kind, activations)
    for number, case in enumerate(MANY_CHANNELS):
        if isinstance(mine, NativeKernels):
            mine.set_num_threads(case.threads)
        weight = matrix(form, case.rows, case.columns, size, case.dtype)
        for row in case.spoiled:
            if weight.sub_scale is None:
                weight.scale[row, -1] = 0.77 * weight.scale[row].abs().max()
            else:
                weight.sub_scale[row, -1] = 16
        x = torch.randn(case.num_tokens, case.columns, generator=torch.Generator().manual_seed(number))
        bias = torch.randn(case.rows) if number % 2 else None
        expected = ReferenceKernels(activations).linear(x, weight, bias)
        assert torch.equal(mine.linear(x, weight, bias), expected), case


@pytest.mark.parametrize("kind", FAST)
@pytest.mark.parametrize("form", ["steps", "kept steps"])
def test_steps_of_the_product_before_are_not_met(kind: str, form: str) -> None:
    """A thread keeps the steps of its last channels: eight of one token, then a panel of three."""
    mine = kernels(kind, "int16")
    if isinstance(mine, NativeKernels):
        mine.set_num_threads(1)
    x = torch.randn(65, 8320, generator=torch.Generator().manual_seed(0))
    for rows, num_tokens in ((8, 1), (3, 65)):
        weight = matrix(form, rows, 8320, 128, torch.bfloat16)
        expected = ReferenceKernels().linear(x[:num_tokens], weight)
        assert torch.equal(mine.linear(x[:num_tokens], weight), expected)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are protected by a function of the C library")
@pytest.mark.parametrize("kind", FAST)
@pytest.mark.parametrize("num_groups", [2, 15, 16, 17, 31])
@pytest.mark.parametrize("form", ["steps", "kept steps"])
def test_nothing_is_read_behind_codes_and_scales(kind: str, num_groups: int, form: str) -> None:
    mine, columns = kernels(kind, "int16"), 64 * num_groups
    x = torch.randn(25, columns, generator=torch.Generator().manual_seed(0))
    for rows in (*range(1, 10), 17, *([2048] if num_groups == 17 else [])):
        weight = matrix(form, rows, columns, 64, torch.bfloat16, rows)
        at_the_end = weight.map(guarded)
        for num_tokens in (1, 2, 7, 9, 24, 25) if rows < 2048 else (1,):
            some = x[:num_tokens]
            assert torch.equal(mine.linear(some, at_the_end), mine.linear(some, weight)), (rows, num_tokens)


@pytest.mark.parametrize("activations", ["int16", "int8"])
@pytest.mark.parametrize("kind", FAST)
def test_the_widest_steps_do_not_overflow(kind: str, activations: str) -> None:
    columns, size = 65536, 64
    x = torch.full((7, columns), 32384.0)  # in 16 bits 127 and -128
    x[1::3] = 32383.0  # 126 and 127
    x[2::3, 1::64] = 32383.0  # the lower byte of a group's sum is 255
    x[3] *= -1
    x[:, 0] = 32512.0
    mine, reference = kernels(kind, activations), ReferenceKernels(activations)
    for code in (0, 255):
        codes = torch.full((3, columns // 2), code, dtype=torch.uint8)
        steps = torch.tensor([15, -15, 15], dtype=torch.int8)[:, None].expand(3, columns // size).contiguous()
        weight = Int4Tensor(codes, torch.ones(3, 1).bfloat16(), size, "signed", sub_scale=steps)
        expected = reference.linear(x, weight)
        for num_tokens in (1, 2, 3, 7):
            assert torch.equal(mine.linear(x[:num_tokens], weight), expected[:num_tokens]), num_tokens


@pytest.mark.parametrize("activations", ["int16", "int8"])
@pytest.mark.parametrize("kind", FAST)
def test_extreme_codes_and_activations_do_not_overflow(kind: str, activations: str) -> None:
    x = torch.full((20, 256), 32512.0)
    x[1:, 1:] = 32384.0  # the upper byte is 127, and the lower one -128
    x[2::2] *= -1
    books = {"signed": [0, 255], "unsigned": [255], "iq4_nl": [0, 255], "mxfp4": [0x77, 255]}
    for codebook, codes in books.items():
        minimum = torch.full((5, 2), 7.0) if codebook == "unsigned" else None
        scales = [torch.ones(5, 2), torch.tensor([15.0, -15.0]).expand(5, 2).bfloat16().contiguous()]
        for code, scale in product(codes, scales[: 2 if codebook == "signed" else 1]):
            bytes_of = torch.full((5, 128), code, dtype=torch.uint8)
            weight = Int4Tensor(bytes_of, scale, 128, codebook, minimum)
            mine, reference = kernels(kind, activations), ReferenceKernels(activations)
            for rows in (x, x[:1], x[1:3]):
                y = mine.linear(rows, weight)
                assert torch.equal(y, reference.linear(rows, weight))
                expected = rows.double() @ weight.dequantize().double().t()
                most = float((rows.double().abs() @ weight.dequantize().double().abs().t()).max())
                assert float((y - expected).abs().max()) <= (1e-4 if activations == "int16" else 1e-2) * most


@pytest.mark.parametrize("kind", FAST)
def test_what_is_no_number_is_not_hidden(kind: str) -> None:
    weight = matrix("symmetric", 9, 128, 64, torch.bfloat16)
    x = torch.ones(3, 128)
    x[1, 77] = torch.nan
    for rows in (x, x[1:2]):
        y = kernels(kind, "int16").linear(rows, weight)
        assert torch.equal(y.isnan().all(1), rows.isnan().any(1))
        assert torch.equal(y.isnan().any(1), rows.isnan().any(1))


@pytest.mark.parametrize("kind", FAST)
def test_an_order_of_columns_and_stacked_parts(kind: str) -> None:
    """A matrix whose columns have another order is the matrix; parts of several formats lie one below the
    other."""
    generator = torch.Generator().manual_seed(5)
    plain = matrix("symmetric", 12, 128, 32, torch.bfloat16)
    order = torch.randperm(128, generator=generator).to(torch.int32)
    permuted = plain._replace(order=order)
    x, bias = torch.randn(4, 128, generator=generator), torch.randn(20, generator=generator)
    mine = kernels(kind, "int16")
    assert torch.equal(mine.linear(x, permuted), mine.linear(x[:, order.long()].contiguous(), plain))
    assert torch.equal(permuted.dequantize()[:, order.long()], plain.dequantize())
    int8 = QuantizedTensor(torch.ones(8, 128, dtype=torch.int8), torch.rand(8, generator=generator))
    stacked = StackedMatrix((permuted, int8))
    whole = torch.cat([mine.linear(x, permuted, bias[:12]), mine.linear(x, int8, bias[12:])], dim=1)
    assert torch.equal(mine.linear(x, stacked, bias), whole)
    assert torch.equal(mine.linear(x, stacked.rows(10, 15)), mine.linear(x, stacked)[:, 10:15])
