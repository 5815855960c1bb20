"""Fast kernels against kernels/reference.py, and the reference against float64."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path
from typing import NamedTuple, cast

import pytest
import torch
from arm_kernels import BUILDS as ARM_BUILDS
from arm_kernels import arm_kernels
from emulated_amx import COMPILER as AMX_COMPILER
from emulated_amx import emulated_amx_kernels, num_tile_products
from emulated_avxvnni import COMPILER as AVXVNNI_COMPILER
from emulated_avxvnni import emulated_avxvnni_kernels
from emulated_cuda import COMPILER, emulated_kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    ATTENTION,
    ATTENTION_ERROR,
    OnGpu,
    close,
    gpu_launcher,
    guarded,
    paged_batch,
    paged_case,
    random_bias,
    random_matrix,
    with_prefixes,
)
from torch import Tensor

from penstock.errors import ConfigError
from penstock.kernels import Kernels, RouterFunction, cpu, cpu_builds
from penstock.kernels.cpu import NativeKernels
from penstock.kernels.cpu_builds import compiled_builds
from penstock.kernels.cuda.kernels import CudaKernels
from penstock.kernels.int4_tensor import Int4Tensor
from penstock.kernels.int_mm import TorchKernels
from penstock.kernels.operands import (
    MAX_IN_FEATURES,
    AttentionSpec,
    BatchLayout,
    ClampedGate,
    LayerKV,
    LimitedGate,
    QuantizedTensor,
)
from penstock.kernels.reference import ReferenceKernels, quantize_activations, split_rows
from penstock.kernels.sublayers import partial_results
from penstock.kernels.sublayers.partial_results import SPLIT_KEYS
from penstock.spec import FLOAT16, FLOAT32, KVLayout
from penstock.weights.quantize import quantize

BUILDS = compiled_builds()
#: Kernels that are not torch's: compiled C, AMX by emulation; the CUDA sources run on the CPU, and on a
#: GPU where there is one.
FAST = [
    *BUILDS,
    *(["emulated amx"] if AMX_COMPILER and "amx" not in BUILDS else []),
    *(["emulated"] if COMPILER else []),
    *(["cuda"] if torch.cuda.is_available() else []),
]
#: Kernels whose products are compared. Of the AVX-VNNI build, products alone differ from AVX2's.
EMULATED_AVXVNNI = ["emulated avxvnni"] if AVXVNNI_COMPILER else []
PRODUCTS = ["torch", *FAST, *EMULATED_AVXVNNI]


def kernels(kind: str, activations: str = "int16") -> Kernels:
    if kind == "torch":
        return TorchKernels(activations)
    if kind == "emulated":
        return emulated_kernels(activations)
    if kind == "emulated amx":
        return emulated_amx_kernels(activations)
    if kind == "emulated avxvnni":
        return emulated_avxvnni_kernels(activations)
    if kind in ARM_BUILDS and kind not in BUILDS:
        return arm_kernels(kind, activations)
    if kind == "cuda":
        return cast(Kernels, OnGpu(CudaKernels(gpu_launcher(), activations)))
    return NativeKernels(activations, build=kind)


def test_the_compiled_kernels_are_here() -> None:
    """make install compiles them where there is a C compiler; without this the tests below would pass by
    testing nothing."""
    assert "generic" in BUILDS


def test_an_unknown_build_is_refused() -> None:
    with pytest.raises(ConfigError, match="no native CPU kernels"):
        NativeKernels(build="z80")


class Codes(NamedTuple):
    """A format of weights that no kernels know."""

    codes: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], 2 * self.codes.shape[1]


@pytest.mark.parametrize("kind", ["torch", "reference", *FAST])
def test_an_unknown_format_of_weights_is_refused_by_name(kind: str) -> None:
    mine = ReferenceKernels() if kind == "reference" else kernels(kind)
    with pytest.raises(TypeError, match=r"no product with a Codes; they know: QuantizedTensor"):
        mine.linear(torch.ones(1, 8), Codes(torch.zeros(3, 4, dtype=torch.uint8)))


@pytest.mark.parametrize("kind", ["torch", "reference", *FAST])
def test_an_unknown_layout_of_keys_and_values_is_refused_by_name(kind: str) -> None:
    mine = ReferenceKernels() if kind == "reference" else kernels(kind)
    q, kv, layout = paged_case(torch.Generator().manual_seed(0), torch.float32, 16)
    kv = LayerKV(KVLayout("float64", kv.layout.parts), kv.parts)
    with pytest.raises(TypeError, match="as float64; they know: float32, float16"):
        mine.write_kv(torch.ones(1, 2, 16), torch.ones(1, 2, 16), kv, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(TypeError, match="as float64"):
        mine.paged_attention(q, kv, layout, ATTENTION["plain"])
    for traits in (CudaKernels.traits, NativeKernels.traits, TorchKernels.traits, ReferenceKernels.traits):
        with pytest.raises(ConfigError, match="as float64; choose --kv-dtype float32 or float16"):
            traits.require(None, kv.layout)


def test_scales_per_group_are_refused_where_no_kernel_has_them() -> None:
    for traits in (CudaKernels.traits, NativeKernels.traits, TorchKernels.traits, ReferenceKernels.traits):
        traits.require(None, FLOAT32)
        traits.require(128, FLOAT16)
    with pytest.raises(ConfigError, match="group of 48 inputs"):
        NativeKernels.traits.require(48, FLOAT16)


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("activations", ["int16", "int8"])
@settings(deadline=None, max_examples=25)
@given(
    num_tokens=st.integers(1, 40),
    in_features=st.integers(1, 300),
    out_features=st.integers(1, 90),
    seed=st.integers(0, 2**31),
)
def test_linear_equals_the_reference_bit_for_bit(
    kind: str, activations: str, num_tokens: int, in_features: int, out_features: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, in_features, generator=generator)
    x *= 10 ** torch.randn(in_features, generator=generator)
    x[num_tokens // 2] *= float(seed % 2)  # a row of zeros now and then
    weight = random_matrix(out_features, in_features, generator)
    bias = torch.randn(out_features, generator=generator) if seed % 3 else None
    expected = ReferenceKernels(activations).linear(x, weight, bias)
    assert torch.equal(kernels(kind, activations).linear(x, weight, bias), expected)


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("activations", ["int16", "int8"])
@settings(deadline=None, max_examples=25)
@given(
    group_size=st.sampled_from([32, 64, 128]),
    num_tokens=st.integers(1, 17),
    num_groups=st.integers(1, 21),
    out_features=st.integers(1, 90),
    seed=st.integers(0, 2**31),
)
def test_grouped_scales_equal_the_reference_bit_for_bit(
    kind: str,
    activations: str,
    group_size: int,
    num_tokens: int,
    num_groups: int,
    out_features: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, group_size * num_groups, generator=generator)
    x *= 10 ** torch.randn(group_size * num_groups, generator=generator)
    qweight = torch.randint(-128, 128, (out_features, x.shape[1]), dtype=torch.int8, generator=generator)
    scale = torch.rand(out_features, num_groups, generator=generator)
    weight = QuantizedTensor(qweight, scale)
    bias = torch.randn(out_features, generator=generator) if seed % 3 else None
    expected = ReferenceKernels(activations).linear(x, weight, bias)
    assert torch.equal(kernels(kind, activations).linear(x, weight, bias), expected)
    exact = x.double() @ weight.dequantize().double().t() + (0 if bias is None else bias)
    step = x.abs().amax(1, keepdim=True) / (32512 if activations == "int16" else 127)  # of which half is lost
    assert ((expected - exact).abs() <= step * weight.dequantize().abs().sum(1) + 1e-5 * exact.abs()).all()


@pytest.mark.parametrize("kind", [*BUILDS, *EMULATED_AVXVNNI])
@pytest.mark.parametrize("activations", ["int16", "int8"])
@pytest.mark.parametrize(
    ("num_tokens", "in_features", "out_features", "group_size"),
    [
        (5, 9000, 11, 0),  # more inputs than sums of 32 bits take, few rows
        (7, 4170, 21, 0),  # few rows, blocks of 2048 inputs, the last one of 74
        (7, 9008, 11, 0),  # the same two with AVX2, whose few rows have a multiple of 16 inputs
        (5, 48, 65, 0),  # a few inputs
        (13, 80, 3, 0),
        (18, 4112, 21, 0),
        (19, 4128, 131, 0),  # tasks that end with an odd channel
        (24, 4144, 70, 0),
        (25, 4112, 70, 0),
        (4, 2176, 19, 64),  # few rows, groups in two blocks
        (4, 2176, 19, 128),
        (20, 2100, 70, 0),  # two blocks, the last one of 52
        (24, 4131, 67, 0),  # rows in lanes: inputs and channels that fill no strip
        (32, 9000, 53, 0),  # more inputs than four tiles of rows take
        (64, 130, 99, 0),  # two panels of tiles, or one
        (70, 4131, 70, 0),  # panels' blocks of 2048 inputs
        (70, 4160, 66, 32),
        (70, 2304, 66, 128),  # groups in two blocks
        (30, 1440, 66, 96),  # groups that go on in the next block
        (21, 480, 9, 20),  # groups for which there are no tiles
        (800, 70, 130, 0),  # more rows than a panel takes at once
        (800, 64, 130, 32),
        (9, 1040, 35, 16),  # groups of half a vector, blocks of inputs that vectors don't fill
        (10, 1104, 35, 48),
    ],
)
def test_products_of_many_parts_equal_the_reference(
    kind: str, activations: str, num_tokens: int, in_features: int, out_features: int, group_size: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, in_features, generator=generator)
    qweight = torch.randint(-128, 128, (out_features, in_features), dtype=torch.int8, generator=generator)
    scale = torch.rand(out_features, in_features // (group_size or in_features), generator=generator)
    weight = QuantizedTensor(qweight, scale if group_size else scale.flatten())
    bias = torch.randn(out_features, generator=generator)
    expected = ReferenceKernels(activations).linear(x, weight, bias)
    native = kernels(kind, activations)
    assert isinstance(native, NativeKernels)
    for num_threads in (3, 1):
        native.set_num_threads(num_threads)
        assert torch.equal(native.linear(x, weight, bias), expected)
    for some in (slice(3, 5), slice(1, 2), slice(0, 1)):
        assert torch.equal(native.linear(x[some], weight, bias), expected[some])


@pytest.mark.skipif(sys.platform != "linux", reason="pages are protected by a function of the C library")
@pytest.mark.parametrize("kind", [*BUILDS, *EMULATED_AVXVNNI])
@pytest.mark.parametrize("columns", [16, 48, 80, 4112])
def test_nothing_is_read_behind_weights(kind: str, columns: int) -> None:
    mine = kernels(kind, "int16")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(25, columns, generator=generator)
    for rows in (1, 2, 3, 17):
        qweight = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=generator)
        weight = QuantizedTensor(qweight, torch.rand(rows, generator=generator))
        at_the_end = weight.map(guarded)
        for num_tokens in (1, 4, 9, 24, 25):
            some = x[:num_tokens]
            assert torch.equal(mine.linear(some, at_the_end), mine.linear(some, weight)), (rows, num_tokens)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are protected by a function of the C library")
@pytest.mark.parametrize("kind", [*BUILDS, *EMULATED_AVXVNNI])
@pytest.mark.parametrize("columns", [1985, 2016, 2048, 4096])
def test_integers_of_activations_fit_their_memory(
    kind: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where rows that would lie a multiple of 4 KB apart lie further apart: with many tokens."""
    plain = cpu._scratch

    def scratch(*sizes: int) -> Tensor:
        room = plain(*sizes)
        return guarded(torch.empty((len(room) + 15) // 16 * 16))  # begins at a multiple of 64 bytes

    monkeypatch.setattr(cpu, "_scratch", scratch)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(130, columns, generator=generator)
    weights: list[QuantizedTensor | Int4Tensor] = [random_matrix(20, columns, generator)]
    if columns % 32 == 0:
        codes = torch.randint(0, 256, (20, columns // 2), generator=generator, dtype=torch.uint8)
        scales = torch.rand(20, columns // 32, generator=generator).half()
        weights.append(Int4Tensor(codes, scales, 32, "signed"))
    for weight, activations in itertools.product(weights, ("int16", "int8")):
        expected = ReferenceKernels(activations).linear(x, weight)
        for num_tokens in (1, 8, 63, 64, 130):
            y = kernels(kind, activations).linear(x[:num_tokens], weight)
            assert torch.equal(y, expected[:num_tokens]), num_tokens


def test_new_bytes_in_a_matrix_are_multiplied_by() -> None:
    """A staging slot gets other bytes from sweep to sweep, and the matrix that lies there stays."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 128, generator=generator), random_matrix(7, 128, generator)
    native, other = NativeKernels(), random_matrix(7, 128, generator)
    before = native.linear(x, weight)
    weight.qweight.copy_(other.qweight)
    weight.scale.copy_(other.scale)
    assert not torch.equal(before, native.linear(x, other))
    assert torch.equal(native.linear(x, weight), native.linear(x, other))


def test_a_batch_that_was_used_can_be_copied() -> None:
    """What kernels ask a layout for once does not go along: the copy may lie elsewhere."""
    q, kv, layout = paged_case(torch.Generator().manual_seed(0), torch.float32, 32)
    mixed = NativeKernels().paged_attention(q, kv, layout, ATTENTION["plain"])
    copy = layout.to(torch.device("cpu"))
    assert "native" in vars(layout) and "native" not in vars(copy)
    assert torch.equal(NativeKernels().paged_attention(q, kv, copy, ATTENTION["plain"]), mixed)


@pytest.mark.parametrize("kind", ["torch", *FAST])
def test_no_tokens_give_no_rows(kind: str) -> None:
    """The head of a step in which no prompt is done."""
    assert kernels(kind).linear(torch.empty(0, 64), random_matrix(70, 64, torch.Generator())).shape == (
        0,
        70,
    )


@pytest.mark.parametrize("kind", PRODUCTS)
def test_extreme_integers_do_not_overflow(kind: str) -> None:
    """Every product at its largest: 8192 inputs of magnitude 32512 against weights of 127 and -128."""
    weight = QuantizedTensor(torch.full((64, 8192), 127, dtype=torch.int8), torch.linspace(1e-3, 1, 64))
    weight.qweight[1::2] = -128
    x = torch.ones(5, 8192) * torch.tensor([[1.0], [-1.0], [1e30], [-1e-3], [2.0]])
    expected = ReferenceKernels().linear(x, weight)
    for rows in (3, 5):  # few rows and more have kernels of their own
        assert torch.equal(kernels(kind).linear(x[:rows], weight), expected[:rows])


@pytest.mark.parametrize("kind", ["torch", *BUILDS])
@pytest.mark.parametrize("activations", ["int16", "int8"])
def test_sums_of_very_many_inputs_do_not_overflow(kind: str, activations: str) -> None:
    """More products of two extremes than int32 holds, and as many as it holds."""
    mine, reference = kernels(kind, activations), ReferenceKernels(activations)
    for num_inputs in (MAX_IN_FEATURES, 140032):
        weight = QuantizedTensor(torch.full((8, num_inputs), -128, dtype=torch.int8), torch.ones(8))
        x = torch.full((3, num_inputs), 128.0)
        x[:, 0] = 32512.0  # so that lo is -128 everywhere else
        x[1] = -1.0
        for rows in (x, x[:1]):
            assert torch.equal(mine.linear(rows, weight), reference.linear(rows, weight)), num_inputs


@pytest.mark.parametrize("kind", ["torch", *FAST])
def test_tiny_rows_count_as_zero(kind: str) -> None:
    x = torch.tensor([[1e-42], [1e-36]]).expand(2, 64).contiguous()  # the latter's scale is subnormal
    weight = random_matrix(8, 64, torch.Generator().manual_seed(0))
    assert torch.equal(kernels(kind).linear(x, weight), torch.zeros(2, 8))


@pytest.mark.parametrize("kind", ["torch", "reference", *FAST])
@pytest.mark.parametrize("activations", ["int16", "int8"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", [0, 37, 99])
def test_what_is_no_number_is_not_hidden(kind: str, activations: str, value: float, column: int) -> None:
    """Integers know no NaN: the scale has to carry it, through its own row and no other."""
    native = ReferenceKernels(activations) if kind == "reference" else kernels(kind, activations)
    weight = random_matrix(24, 100, torch.Generator().manual_seed(0))
    x = torch.randn(3, 100)
    expected = native.linear(x, weight)
    x[1, column] = value
    y = native.linear(x, weight)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("kind", ["torch", *FAST])
@pytest.mark.parametrize("function", ["none", "softmax", "sigmoid"])
def test_router_scores_equal_the_reference_in_any_company(kind: str, function: RouterFunction) -> None:
    """Numbers of experts and inputs that fill no tile, and rows that lie apart."""
    generator, mine = torch.Generator().manual_seed(0), kernels(kind)
    for num_experts, num_inputs in ((1, 33), (5, 64), (60, 71), (130, 256)):
        x = torch.randn(9, num_inputs + 3, generator=generator)[:, :num_inputs]
        weight = torch.randn(num_experts, num_inputs, generator=generator) / 4
        bias = torch.randn(num_experts, generator=generator) if num_experts != 5 else None
        y = mine.router_scores(x, weight, bias, function)
        close(y, ReferenceKernels().router_scores(x, weight, bias, function), 1e-5)
        for row in range(9):
            assert torch.equal(mine.router_scores(x[row : row + 1], weight, bias, function)[0], y[row])
    x[4, 7] = math.nan
    assert mine.router_scores(x, weight, None, "softmax")[4].isnan().all()


@pytest.mark.parametrize(("activations", "limit"), [("int16", 5e-4), ("int8", 0.2)])
def test_outlier_channels_keep_their_neighbours_exact(activations: str, limit: float) -> None:
    """Six channels 60 times the rest, against the same INT8 weights in float64. INT8 activations lose
    the small channels (that is why they are not the default): they must be worse than the bound of the
    default, or this test measures nothing."""
    generator = torch.Generator().manual_seed(0)
    for seed in range(3):
        generator.manual_seed(seed)
        x = torch.randn(16, 4096, generator=generator)
        x[:, torch.randperm(4096, generator=generator)[:6]] *= 60
        weight = quantize(torch.randn(2048, 4096, generator=generator))
        exact = x.double() @ weight.dequantize().double().t()
        y = NativeKernels(activations).linear(x, weight).double()
        error = float((y - exact).norm() / exact.norm())
        assert error <= limit
        if activations == "int8":
            assert error > 5e-4


def test_split_rows_are_int8_and_recombine() -> None:
    q = torch.arange(-32512, 32513, dtype=torch.int32)[None]
    hi, lo = split_rows(q)
    assert hi.dtype == lo.dtype == torch.int8
    assert torch.equal(256 * hi.int() + lo.int(), q)


def test_quantized_activations_are_within_half_a_step() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 333, generator=generator) * torch.tensor([[1e-20], [1e-3], [1.0], [1e4], [1e30]])
    q, scale = quantize_activations(x, "int16")
    assert float(q.abs().max()) <= 32512
    error = (x.double() - q.double() * scale.double()[:, None]).abs()
    # x / scale is rounded to float32 before it is rounded to an integer: 32512 * 2^-24 = 0.002.
    assert bool((error <= 0.502 * scale.double()[:, None]).all())


@pytest.mark.parametrize("kind", FAST)
@pytest.mark.parametrize("width", [16, 64, 100, 2049])
def test_norms_equal_the_reference_to_rounding(kind: str, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(7, width + 3, generator=generator)[:, :width] * 5 + 1  # strided rows
    weight, bias = torch.randn(2, width, generator=generator)
    reference, native = ReferenceKernels(), kernels(kind)
    close(native.rms_norm(x, weight, 1e-5, 1.0), reference.rms_norm(x, weight, 1e-5, 1.0))
    close(native.layer_norm(x, weight, bias, 1e-5), reference.layer_norm(x, weight, bias, 1e-5))
    close(native.layer_norm(x, None, None, 1e-5), reference.layer_norm(x, None, None, 1e-5))


@pytest.mark.parametrize("kind", FAST)
@pytest.mark.parametrize("function", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_activations_equal_the_reference_to_rounding(kind: str, function: str) -> None:
    x = torch.cat([torch.linspace(-100, 100, 3001), torch.linspace(-1, 1, 999)]).view(8, 500)
    native, reference = kernels(kind), ReferenceKernels()
    close(native.activation(x, function), reference.activation(x, function))
    close(native.gated_activation(x, function), reference.gated_activation(x, function))
    for limited in (ClampedGate(1.7, 7.0), LimitedGate(7.0), LimitedGate(7.0, is_behind=True)):
        close(native.gated_activation(x, limited), reference.gated_activation(x, limited))
    assert native.activation(torch.full((1, 37), torch.nan), function).isnan().all()


@pytest.mark.parametrize("kind", FAST)
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_rope_equals_the_reference(kind: str, is_interleaved: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(5, 6, 32, generator=generator)
    angle = torch.rand(5, 12, generator=generator)  # 24 of 32 dimensions are rotated
    mine, expected = fused.clone(), fused.clone()
    kernels(kind).rope(mine[:, 1:4], angle.cos(), angle.sin(), is_interleaved)
    ReferenceKernels().rope(expected[:, 1:4], angle.cos(), angle.sin(), is_interleaved)
    close(mine, expected)
    assert torch.equal(mine[:, 0], fused[:, 0]) and not torch.equal(mine[:, 1], fused[:, 1])


@pytest.mark.parametrize("kind", FAST)
@pytest.mark.parametrize("case", ATTENTION)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8])
@pytest.mark.parametrize("head_dim", [16, 40, 128])
def test_paged_attention_equals_the_reference_to_rounding(
    kind: str, case: str, dtype: torch.dtype, head_dim: int
) -> None:
    q, kv, layout = paged_case(torch.Generator().manual_seed(1), dtype, head_dim)
    expected = ReferenceKernels().paged_attention(q, kv, layout, ATTENTION[case])
    close(kernels(kind).paged_attention(q, kv, layout, ATTENTION[case]), expected, ATTENTION_ERROR)


@pytest.mark.parametrize("kind", FAST)
@pytest.mark.parametrize("boundary", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_biases_by_distance_and_prefixes_equal_the_reference(
    kind: str, boundary: int, dtype: torch.dtype
) -> None:
    q, kv, layout = paged_case(torch.Generator().manual_seed(2), dtype, 40)
    layout, spec = with_prefixes(layout), AttentionSpec(6, 0.2, distance_bias=random_bias(6, boundary))
    expected = ReferenceKernels().paged_attention(q, kv, layout, spec)
    close(kernels(kind).paged_attention(q, kv, layout, spec), expected, ATTENTION_ERROR)


#: (context, new tokens) of sequences that are cut into one, two and three parts.
CUT = [(2 * SPLIT_KEYS + 5, 3), (SPLIT_KEYS, 1), (7, 7), (SPLIT_KEYS + 1, 2)]


#: What a token sees begins in one part and ends in another.
WIDE = {
    "wide window": AttentionSpec(6, 0.2, window=SPLIT_KEYS + 35),
    "wide chunks, sinks": AttentionSpec(6, 0.2, chunk=SPLIT_KEYS - 35, sinks=torch.linspace(-3, 5, 6)),
}


@pytest.mark.skipif(not AMX_COMPILER, reason="no AVX512-VNNI, or no compiler")
@pytest.mark.parametrize("activations", ["int16", "int8"])
@pytest.mark.parametrize("num_groups", [1, 5, 10, 20])
def test_many_rows_go_through_tiles(activations: str, num_groups: int) -> None:
    """More than one token, and groups of 128, 64 or 32 inputs; bit for bit."""
    generator = torch.Generator().manual_seed(num_groups)
    x, weight = torch.randn(41, 640, generator=generator), random_matrix(150, 640, generator)
    if num_groups > 1:
        weight = QuantizedTensor(weight.qweight, torch.rand(150, num_groups, generator=generator))
    before = num_tile_products()
    mine = emulated_amx_kernels(activations).linear(x, weight)
    assert torch.equal(mine, ReferenceKernels(activations).linear(x, weight))
    row_tiles = 6 if activations == "int16" else 3  # of 82 or 41 rows
    channel_tiles, steps = 2 * 5, 640 // (32 if num_groups == 20 else 64)  # 150 channels, by 32
    assert num_tile_products() - before == row_tiles * channel_tiles * steps


@pytest.mark.parametrize("kind", BUILDS)
@pytest.mark.parametrize("case", [*ATTENTION, *WIDE])
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size"),
    [((6, 2), 64, 16), ((6, 1), 40, 16), ((6, 6), 32, 16), ((6, 3), 128, 48)],
)
def test_parts_of_a_long_context_are_merged(
    kind: str,
    case: str,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether threads share a sequence's parts or one walks through them: the same bits, and the reference's
    numbers; and the bits that each token gets when it comes alone."""
    # The first sequence's first token sees whole chunks of keys, the tokens beside it not all of the first.
    spec = ATTENTION.get(case) or WIDE[case]
    q, kv, layout = paged_batch(torch.Generator().manual_seed(3), CUT, heads, head_dim, dtype, block_size)
    native = kernels(kind)
    shared = native.paged_attention(q, kv, layout, spec)
    close(shared, ReferenceKernels().paged_attention(q, kv, layout, spec), ATTENTION_ERROR)
    for token in range(2):  # of the first sequence, before its last
        alone = BatchLayout(
            layout.positions[token : token + 1],
            torch.zeros(0),
            layout.block_tables[:1],
            torch.tensor([0, 1], dtype=torch.int32),
            layout.positions[token : token + 1].int() + 1,
        )
        assert torch.equal(native.paged_attention(q[token : token + 1], kv, alone, spec)[0], shared[token])
    monkeypatch.setattr(partial_results, "MAX_PARTIAL_BYTES", 0)
    assert torch.equal(native.paged_attention(q, kv, layout, spec), shared)


@pytest.mark.parametrize("kind", ["torch", *FAST])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_written_kv_is_found_again(kind: str, dtype: torch.dtype) -> None:
    k, v = torch.randn(2, 20, 2, 24)
    k[3, 0, 0], v[5, 1, 1] = 1e6, -1e6  # beyond float16
    k[4, 0, 1], v[4, 0, 2] = 1e-7, 3e-6  # subnormal in float16
    slots = torch.randperm(48)[:20]
    keys, values = torch.zeros(3, 2, 24, 16, dtype=dtype), torch.zeros(3, 2, 16, 24, dtype=dtype)
    layout = FLOAT16 if dtype == torch.float16 else FLOAT32
    kernels(kind).write_kv(k, v, LayerKV(layout, (keys, values)), slots)
    limit = torch.finfo(torch.float16).max
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, 16)
        for mine, source in ((keys[block, :, :, offset], k[token]), (values[block, :, offset], v[token])):
            stored = source.clamp(-limit, limit).half() if dtype == torch.float16 else source
            assert torch.equal(mine, stored)


@pytest.mark.parametrize("kind", ["torch", "reference"])
@pytest.mark.parametrize("out_features", [1, 40, 1500])
def test_plain_kernels_stay_on_the_device_of_their_inputs(kind: str, out_features: int) -> None:
    """A tensor made without a device lands on the default one, which here is another."""
    plain = TorchKernels() if kind == "torch" else ReferenceKernels()
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 64, generator=generator), random_matrix(out_features, 64, generator)
    q, kv, layout = paged_case(generator, torch.float16, 16)
    bias = torch.randn(out_features, generator=generator)
    with torch.device("meta"):
        y = plain.linear(x, weight, bias)
        mixed = plain.paged_attention(q, kv, layout, ATTENTION["plain"])
    assert torch.equal(y, ReferenceKernels().linear(x, weight, bias))
    assert torch.equal(mixed, ReferenceKernels().paged_attention(q, kv, layout, ATTENTION["plain"]))


@pytest.mark.parametrize("kind", ["torch", "reference", *FAST])
@pytest.mark.parametrize(
    ("num_threads", "dtype"), [(1, torch.float16), (2, torch.float16), (3, torch.float16), (2, torch.int8)]
)
def test_rows_do_not_depend_on_their_neighbours(kind: str, num_threads: int, dtype: torch.dtype) -> None:
    """Norms, activations and attention of a row, bit for bit, alone and in company."""
    native = ReferenceKernels() if kind == "reference" else kernels(kind)
    if isinstance(native, NativeKernels):
        native.set_num_threads(num_threads)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        x = torch.randn(33, 330)
        weight = torch.randn(330)
        for function in (
            lambda rows: native.rms_norm(rows, weight, 1e-6),
            lambda rows: native.layer_norm(rows, weight, weight, 1e-6),
            lambda rows: native.gated_activation(rows, "silu"),
            lambda rows: native.activation(rows, "gelu_tanh"),
            lambda rows: native.activation(rows, "gelu"),
        ):
            together = function(x)
            for row in (0, 13, 32):
                assert torch.equal(function(x[row : row + 1])[0], together[row])
        q, kv, layout = paged_case(torch.Generator().manual_seed(2), dtype, 64)
        together = native.paged_attention(q, kv, layout, ATTENTION["plain"])
        for seq in range(layout.num_seqs):
            first, last = layout.query_start[seq : seq + 2].tolist()
            for token in (first, last - 1):
                context = int(layout.positions[token]) + 1
                alone = BatchLayout(
                    layout.positions[token : token + 1],
                    torch.zeros(0),
                    layout.block_tables[seq : seq + 1].contiguous(),
                    torch.tensor([0, 1], dtype=torch.int32),
                    torch.tensor([context], dtype=torch.int32),
                )
                y = native.paged_attention(q[token : token + 1], kv, alone, ATTENTION["plain"])
                assert torch.equal(y[0], together[token])
    finally:
        torch.set_num_threads(before)


def test_threads_come_and_go() -> None:
    """Whoever is not wanted sleeps; products by any number of them, one after the other, are the same."""
    native, weight = NativeKernels(), random_matrix(4096, 256, torch.Generator().manual_seed(0))
    x = torch.randn(4, 256)
    expected = ReferenceKernels().linear(x, weight)
    for number in (3, 1, 2, 4, 1, 3):
        assert native.set_num_threads(number) == number
        for _ in range(20):
            assert torch.equal(native.linear(x, weight), expected)


def test_a_library_of_older_sources_is_told() -> None:
    with pytest.raises(ConfigError, match="compiled from older sources: it has no penstock_set_num_threads"):
        cpu_builds.open_library(Path("libc.so.6"))
