"""Builds for ARM against kernels/reference.py, by qemu: the other builds' cases, and tails of vectors."""

from __future__ import annotations

import pytest
import test_int4_kernels
import test_int8_kv
import test_kernels
import test_low_bits
import test_planes_kernels
import torch
from arm_kernels import BUILDS, arm_kernels
from kernel_cases import ATTENTION
from tiny_models import in_circles

from penstock.kernels.cpu_builds import cpuinfo_flags
from penstock.kernels.operands import QuantizedTensor
from penstock.kernels.reference import ReferenceKernels

pytestmark = pytest.mark.skipif(
    not BUILDS, reason="no compiler for ARM (gcc-aarch64-linux-gnu) or no qemu-user"
)
#: Both builds have the same code for one row of bytes to a token.
TRIED = [("neon", "int16"), ("neon", "int8"), ("i8mm", "int16")]


#: The others run in the outer circle, and in test_int4_kernels.py by the builds for this machine.
FEW_FORMS = ("symmetric", "steps in some rows", "zero points", "whole blocks with minima", "shifts")


@pytest.mark.parametrize(("build", "activations"), TRIED)
@pytest.mark.parametrize(
    ("in_features", "out_features", "group_size"),
    [
        (1, 1, 0),
        (69, 9, 0),
        (1063, 6, 0),
        (256, 13, 32),
        (240, 7, 48),
        (256, 5, 128),
        (2112, 3, 32),
        (100, 5, 20),
    ],
)
def test_int8_products_equal_the_reference_bit_for_bit(
    build: str, activations: str, in_features: int, out_features: int, group_size: int
) -> None:
    generator = torch.Generator().manual_seed(in_features)
    qweight = torch.randint(-128, 128, (out_features, in_features), dtype=torch.int8, generator=generator)
    scale = torch.rand(out_features, in_features // (group_size or in_features), generator=generator)
    weight = QuantizedTensor(qweight, scale if group_size else scale.flatten())
    mine = arm_kernels(build, activations)
    for num_tokens in (1, 2, 3, 11):
        x = torch.randn(num_tokens, in_features, generator=generator)
        x *= 10 ** torch.randn(in_features, generator=generator)
        bias = torch.randn(out_features, generator=generator) if num_tokens > 2 else None
        expected = ReferenceKernels(activations).linear(x, weight, bias)
        assert torch.equal(mine.linear(x, weight, bias), expected), num_tokens


@pytest.mark.parametrize(("build", "activations"), TRIED)
@pytest.mark.parametrize("form", in_circles(list(test_int4_kernels.FORMS), FEW_FORMS))
def test_4_bit_products_equal_the_reference_bit_for_bit(build: str, activations: str, form: str) -> None:
    mine = arm_kernels(build, activations)
    for x, weight, bias, expected in test_int4_kernels.cases(form, activations):
        assert torch.equal(mine.linear(x, weight, bias), expected), weight.shape


@pytest.mark.parametrize(("build", "activations"), TRIED)
def test_3_and_2_bit_products_equal_the_reference_bit_for_bit(build: str, activations: str) -> None:
    mine = arm_kernels(build, activations)
    for bits, (rows, columns, size) in ((3, (9, 576, 64)), (2, (7, 352, 32)), (3, (70, 96, 32))):
        weight, x = test_low_bits.matrix(bits, rows, columns, size), torch.randn(9, columns)
        expected = ReferenceKernels(activations).linear(x, weight, None)
        for tokens in (1, 9):
            assert torch.equal(mine.linear(x[:tokens], weight, None), expected[:tokens])


@pytest.mark.parametrize(("build", "activations"), TRIED)
def test_products_in_planes_equal_the_reference_bit_for_bit(build: str, activations: str) -> None:
    mine = arm_kernels(build, activations)
    for x, weight, bias, expected in test_planes_kernels.cases(activations):
        assert torch.equal(mine.linear(x, weight, bias), expected), weight.shape


@pytest.mark.parametrize("build", ["neon", "i8mm"])
def test_extremes(build: str) -> None:
    test_kernels.test_extreme_integers_do_not_overflow(build)
    test_kernels.test_tiny_rows_count_as_zero(build)
    test_kernels.test_what_is_no_number_is_not_hidden(build, "int16", float("nan"), 37)


def test_what_is_no_product_equals_the_reference(build: str = "neon") -> None:
    test_kernels.test_norms_equal_the_reference_to_rounding(build, 100)
    for function in ("silu", "gelu", "gelu_tanh", "relu", "relu2"):
        test_kernels.test_activations_equal_the_reference_to_rounding(build, function)
    for choice in (False, True):
        test_kernels.test_rope_equals_the_reference(build, choice)
    for dtype in (torch.float16, torch.float32):
        test_kernels.test_written_kv_is_found_again(build, dtype)
    for case in ATTENTION:
        test_kernels.test_paged_attention_equals_the_reference_to_rounding(build, case, torch.float16, 40)
    test_kernels.test_paged_attention_equals_the_reference_to_rounding(build, "plain", torch.float32, 16)
    test_kernels.test_paged_attention_equals_the_reference_to_rounding(build, "plain", torch.int8, 40)
    test_int8_kv.test_all_kernels_write_the_same_codes_and_scales(build, 24)


def test_rows_do_not_depend_on_their_neighbours(build: str = "neon") -> None:
    test_kernels.test_rows_do_not_depend_on_their_neighbours(build, 2, torch.float16)


def test_features_of_arm_processors_are_found() -> None:
    text = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd asimddp i8mm\nCPU part\t: 0xd40\n"
    assert cpuinfo_flags(text) == {"fp", "asimd", "asimddp", "i8mm"}
    assert cpuinfo_flags("") == frozenset()
