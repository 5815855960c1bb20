"""The CUDA kernels, run on the CPU (on a GPU too, where there is one), where test_kernels.py and
test_families.py, which they also pass, do not go: every variant, long contexts, odd shapes; and how they are
launched."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from emulated_cuda import COMPILER, EmulatedLauncher, library
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    ATTENTION,
    OnGpu,
    close,
    gpu_launcher,
    latent_batch,
    paged_batch,
    random_bias,
    random_matrix,
    with_prefixes,
)
from pretended_card import PretendedCard, missing, pretend
from test_int4_kernels import FORMS
from test_int4_kernels import matrix as int4_matrix
from test_planes_kernels import cases as plane_cases
from torch import Tensor

from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.kernels import (
    Int4Tensor,
    Kernels,
    Matrix,
    PlanesTensor,
    StackedMatrix,
    choose_kernels,
    int_mm,
    on_a_card,
)
from penstock.kernels.cuda import linear as cuda_linear
from penstock.kernels.cuda import nvrtc
from penstock.kernels.cuda.attention import SPLIT_KEYS
from penstock.kernels.cuda.kernels import CudaKernels
from penstock.kernels.cuda.launcher import CudaLauncher
from penstock.kernels.int_mm import TorchKernels
from penstock.kernels.operands import AttentionSpec, BatchLayout, LayerKV, QuantizedTensor
from penstock.kernels.reference import ReferenceKernels

GPU = torch.device("cuda", 0)


@pytest.fixture(params=["emulated", "cuda"])
def launcher(request: pytest.FixtureRequest) -> EmulatedLauncher | CudaLauncher:
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no GPU")
        return gpu_launcher()
    if COMPILER is None:
        pytest.skip("no C++ compiler to run the CUDA sources with")
    return EmulatedLauncher()


def kernels_of(launcher: EmulatedLauncher | CudaLauncher, activations: str = "int16") -> Kernels:
    mine = CudaKernels(launcher, activations)
    return mine if isinstance(launcher, EmulatedLauncher) else cast(Kernels, OnGpu(mine))


@pytest.fixture(autouse=True)
def uninitialized_memory_is_nan() -> Iterator[None]:
    """So that an output which nobody writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


# Choosing.


def test_a_gpu_without_nvrtc_computes_with_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nvrtc, "_libraries", lambda: ())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    with caplog.at_level(logging.WARNING):
        chosen = choose_kernels(EngineConfig(activations="int8"), GPU)
    assert type(chosen) is TorchKernels and chosen.activations == "int8"
    assert "pip install" in caplog.text
    assert type(choose_kernels(EngineConfig(kernels="reference"), GPU)) is ReferenceKernels
    with pytest.raises(ConfigError, match="no NVRTC"):
        choose_kernels(EngineConfig(kernels="native"), GPU)


def test_a_gpu_with_nvrtc_computes_with_our_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[tuple[object, ...]] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    monkeypatch.setattr(on_a_card, "find_nvrtc", lambda architecture: architecture == 61)
    monkeypatch.setattr(on_a_card, "compile_kernels", lambda *arguments: arguments)
    monkeypatch.setattr(on_a_card, "CudaLauncher", lambda *arguments: made.append(arguments))
    monkeypatch.setattr(on_a_card, "check_card", lambda *arguments: [])
    chosen = choose_kernels(EngineConfig(activations="int8"), GPU, tmp_path)
    assert type(chosen) is CudaKernels and chosen.activations == "int8" and chosen.traits.name == "native"
    assert made == [(GPU, (61, tmp_path))]


# Launching.


@pytest.fixture
def card() -> Iterator[PretendedCard]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with pretend() as card:
        yield card


def test_launches_through_the_driver(card: PretendedCard) -> None:
    """The C interface sees the arguments that the kernels expect."""
    launcher = CudaLauncher(GPU, b"\x7fELF...")
    assert not launcher.has_tensor_cores
    mine, reference = cast(Kernels, OnGpu(CudaKernels(launcher))), ReferenceKernels()
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(9, 64, generator=generator), random_matrix(40, 64, generator)
    assert torch.equal(mine.linear(x, weight), reference.linear(x, weight))
    close(mine.rms_norm(x, weight.scale.new_ones(64), 1e-5), reference.rms_norm(x, torch.ones(64), 1e-5))
    q, kv, layout = paged_batch(generator, [(300, 3)], (6, 2), 64, torch.float16)
    spec = ATTENTION["alibi"]
    close(mine.paged_attention(q, kv, layout, spec), reference.paged_attention(q, kv, layout, spec))
    assert mine.linear(x[:0], weight).shape == (0, 40)


def test_what_the_driver_refuses_is_said(card: PretendedCard, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = torch.cuda.get_device_properties(0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    with pytest.raises(ConfigError, match=r"cuDeviceGet failed: no such device \(error 101\)"):
        CudaLauncher(torch.device("cuda", 1), b"\x7fELF...")
    with pytest.raises(ConfigError, match="cuModuleLoadData failed: no such image"):
        CudaLauncher(GPU, b"garbage")


def test_the_emulation_sees_a_missing_barrier() -> None:
    """Without the barrier before a second sum, a warp overwrites what another still reads."""
    if COMPILER is None:
        pytest.skip("no C++ compiler to run the CUDA sources with")
    barrier = "__syncthreads(); /* a thread may still read an earlier sum */"
    source = (Path(nvrtc.__file__).parent / "elementwise.cu").read_text()
    assert barrier in source
    x = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    with pytest.raises(AssertionError, match="layer_norm: a race"):
        broken = EmulatedLauncher(kernels=library(source.replace(barrier, ""), ("layer_norm",)))
        CudaKernels(broken).layer_norm(x, None, None, 1e-5)


# Products.


@pytest.mark.parametrize("activations", ["int16", "int8"])
@pytest.mark.parametrize(
    ("num_tokens", "in_features", "out_features", "kernel"),
    [
        (1, 2064, 35, "gemv_1"),
        (2, 64, 200, "gemv_2"),
        (3, 48, 33, "gemv_4"),
        (7, 4112, 65, "gemv_8"),
        (16, 16, 1, "gemv_8"),
        (5, 100, 40, "gemv_any"),
        (1, 1, 1, "gemv_any"),
        (33, 272, 131, "tiled_4"),
        (70, 80, 300, "tiled_4"),
        (33, 65, 70, "tiled_any"),
        (140, 64, 1300, "tiled_8"),
    ],
)
def test_every_product_equals_the_reference(
    launcher: EmulatedLauncher | CudaLauncher,
    activations: str, num_tokens: int, in_features: int, out_features: int, kernel: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(launcher, "num_multiprocessors", 10)
    monkeypatch.setattr(launcher, "has_tensor_cores", False)
    generator = torch.Generator().manual_seed(in_features)
    x = torch.randn(num_tokens, in_features + 5, generator=generator)[:, :in_features]
    weight = random_matrix(out_features, in_features, generator)
    bias = torch.randn(out_features, generator=generator)
    y = kernels_of(launcher, activations).linear(x, weight, bias)
    assert torch.equal(y, ReferenceKernels(activations).linear(x, weight, bias))
    if isinstance(launcher, EmulatedLauncher):
        assert launcher.launched[-1] == f"{kernel}_{2 if activations == 'int16' else 1}"


@pytest.mark.parametrize("name", ["INT8", "planes", "INT8 in groups", "INT4"])
def test_products_lie_side_by_side_however_often_they_come(
    launcher: EmulatedLauncher | CudaLauncher, name: str
) -> None:
    """Launches of few tokens are prepared at the second use of a matrix. What lies beside stays as it was."""
    if isinstance(launcher, CudaLauncher):
        pytest.skip("tensors of the host")
    generator = torch.Generator().manual_seed(5)
    mine, reference = CudaKernels(launcher), ReferenceKernels()
    parts: list[Matrix] = [random_matrix(rows, 64, generator) for rows in (16, 33)]
    if name == "planes":
        parts = [PlanesTensor.of(each) for each in parts]  # type: ignore[arg-type]
    elif name == "INT8 in groups":
        parts = [QuantizedTensor(each.qweight, torch.rand(len(each.qweight), 2)) for each in parts]  # type: ignore[attr-defined]
    elif name == "INT4":
        codes = [
            torch.randint(0, 256, (rows, 32), dtype=torch.uint8, generator=generator) for rows in (16, 33)
        ]
        parts = [Int4Tensor(each, torch.rand(len(each), 2).half(), 32, "signed") for each in codes]
    bias = torch.randn(33, generator=generator)
    for num_tokens in (1, 2, 1, 8, 9, 1, 2, 40, 8):
        x = torch.randn(num_tokens, 70, generator=generator)[:, :64]
        expected = [reference.linear(x, each) for each in parts]
        whole = torch.full((num_tokens, 60), 7.0)
        mine.write_products(x, parts, whole)
        assert torch.equal(whole[:, :49], torch.cat(expected, dim=1)), num_tokens
        assert (whole[:, 49:] == 7).all()
        assert torch.equal(mine.linear(x, parts[1]), expected[1])
        assert torch.equal(mine.linear(x, parts[1], bias), reference.linear(x, parts[1], bias))
    kept = getattr(parts[0], "prepared", {})
    assert len(kept) == (3 if name in ("INT8", "planes") else 0), "for 1, 2 and 8 tokens"


def test_rows_are_fetched_with_gaps_between_them(launcher: EmulatedLauncher | CudaLauncher) -> None:
    if isinstance(launcher, CudaLauncher):
        pytest.skip("memory of the host")
    kernels, source = CudaKernels(launcher), torch.randn(5, 300)
    for _ in range(2):
        y = torch.full((5, 400), 7.0)
        kernels.fetch(source.data_ptr(), y[:, 50:350])
        assert torch.equal(y[:, 50:350], source) and (y[:, :50] == 7).all() and (y[:, 350:] == 7).all()
        line = torch.zeros(1500)
        kernels.fetch(source.data_ptr(), line)
        assert torch.equal(line.view(5, 300), source)


@pytest.mark.parametrize("activations", ["int16", "int8"])
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 8), (128, 200), (64, 33), (80, 40)])
def test_sums_of_tensor_cores_become_the_same(
    launcher: EmulatedLauncher | CudaLauncher,
    activations: str, in_features: int, out_features: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """torch._int_mm computes them, here on the CPU; sizes that it does not take are ours."""
    monkeypatch.setattr(launcher, "has_tensor_cores", True)
    monkeypatch.setattr(cuda_linear, "MAX_SUMS_BYTES", 60_000)  # several blocks of columns
    generator = torch.Generator().manual_seed(in_features)
    x = torch.randn(50, in_features, generator=generator)
    weight = random_matrix(out_features, in_features, generator)
    y = kernels_of(launcher, activations).linear(x, weight, weight.scale)
    assert torch.equal(y, ReferenceKernels(activations).linear(x, weight, weight.scale))
    if isinstance(launcher, EmulatedLauncher):
        is_taken = in_features % 64 == 0 and out_features % 8 == 0
        assert launcher.launched[-1].startswith("combine" if is_taken else "tiled")


@pytest.mark.parametrize(
    ("capability", "shape", "is_taken"),
    [
        ((7, 5), (64, 32), True),
        ((6, 1), (64, 32), False),
        ((9, 0), (63, 32), False),
        ((9, 0), (64, 28), False),
    ],
)
def test_torchs_product_is_asked_only_for_what_it_has(
    capability: tuple[int, int], shape: tuple[int, int], is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    matrix = SimpleNamespace(is_cuda=True, device=GPU, shape=shape)
    assert int_mm._int_mm_takes(cast(Tensor, matrix)) == is_taken


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", [TorchKernels, ReferenceKernels])
@pytest.mark.parametrize("activations", ["int16", "int8"])
@pytest.mark.parametrize("num_tokens", [1, 40])
@pytest.mark.parametrize("out_features", [1200, 1201])
def test_plain_kernels_on_a_gpu_compute_what_they_compute_on_the_cpu(
    kind: type[TorchKernels | ReferenceKernels], activations: str, num_tokens: int, out_features: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(num_tokens, 160, generator=generator), random_matrix(out_features, 160, generator)
    y = cast(Kernels, OnGpu(kind(activations))).linear(x, weight)
    assert torch.equal(y, ReferenceKernels(activations).linear(x, weight))


@pytest.mark.parametrize("activations", ["int16", "int8"])
def test_planes_have_the_bits_of_int8(
    launcher: EmulatedLauncher | CudaLauncher, activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, and of their upper planes alone; per channel and in groups; rows of any length."""
    monkeypatch.setattr(launcher, "has_tensor_cores", False)
    mine = kernels_of(launcher, activations)
    for x, weight, bias, expected in plane_cases(activations):
        found = mine.linear(x, weight, bias)
        assert torch.equal(found, expected), (weight.shape, weight.lower is None, len(x))


@pytest.mark.parametrize("activations", ["int16", "int8"])
@pytest.mark.parametrize(
    ("num_tokens", "in_features", "out_features", "kernel"),
    [
        (1, 2064, 35, "planes_gemv_1"),
        (2, 64, 200, "planes_gemv_2"),
        (3, 48, 33, "planes_gemv_4"),
        (16, 4112, 65, "planes_gemv_8"),
        (5, 102, 40, "gemv_any"),
        (33, 272, 131, "planes_tiled_4"),
        (33, 66, 70, "tiled_any"),
        (140, 64, 1300, "planes_tiled_8"),
    ],
)
def test_every_product_with_planes_equals_the_reference(
    launcher: EmulatedLauncher | CudaLauncher,
    activations: str, num_tokens: int, in_features: int, out_features: int, kernel: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(launcher, "num_multiprocessors", 10)
    monkeypatch.setattr(launcher, "has_tensor_cores", False)
    generator = torch.Generator().manual_seed(in_features)
    x, whole = torch.randn(num_tokens, in_features), random_matrix(out_features, in_features, generator)
    middles = QuantizedTensor((whole.qweight >> 4 << 4) + 8, whole.scale)
    for planes, same in ((PlanesTensor.of(whole), whole), (PlanesTensor.of(whole).upper_alone(), middles)):
        y = kernels_of(launcher, activations).linear(x, planes, whole.scale)
        assert torch.equal(y, ReferenceKernels(activations).linear(x, same, whole.scale))
        if isinstance(launcher, EmulatedLauncher):
            assert launcher.launched[-1] == f"{kernel}_{2 if activations == 'int16' else 1}"


@pytest.mark.parametrize("num_tokens", [1, 3, 50])
@pytest.mark.parametrize("group_size", [None, 16, 32])
@pytest.mark.parametrize("has_tensor_cores", [False, True])
def test_planes_may_lie_anywhere(
    launcher: EmulatedLauncher | CudaLauncher,
    num_tokens: int, group_size: int | None, has_tensor_cores: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """And tensor cores get them joined, some channels at a time. 16 inputs that share a scale are a rare
    shape, which the reference computes."""
    monkeypatch.setattr(launcher, "has_tensor_cores", has_tensor_cores)
    monkeypatch.setattr(cuda_linear, "MAX_SUMS_BYTES", 6_000)
    generator = torch.Generator().manual_seed(0)
    scale = torch.rand(40, *(() if group_size is None else (128 // group_size,)), generator=generator)
    qweight = torch.randint(-128, 128, (40, 128), dtype=torch.int8, generator=generator)
    whole = QuantizedTensor(qweight, scale)
    x, planes = torch.randn(num_tokens, 128, generator=generator), PlanesTensor.of(whole)
    expected = ReferenceKernels().linear(x, whole)
    assert planes.lower is not None
    for move in (0, 1, 4):
        upper, lower = (moved(plane, by) for plane, by in ((planes.upper, move), (planes.lower, 2 * move)))
        y = kernels_of(launcher).linear(x, PlanesTensor(upper, lower, scale))
        assert torch.equal(y, expected), move
    if isinstance(launcher, EmulatedLauncher) and group_size is None and num_tokens == 50:
        assert ("join_planes" in launcher.launched, launcher.launched.count("combine_2") >= 6) == (
            True,
            has_tensor_cores,
        )


def moved(plane: Tensor, num_bytes: int) -> Tensor:
    """A copy that begins so many bytes behind a usual address."""
    room = torch.empty(num_bytes + plane.numel(), dtype=torch.uint8)
    return room[num_bytes:].view(plane.shape).copy_(plane)


def test_a_matrix_may_lie_anywhere(launcher: EmulatedLauncher | CudaLauncher) -> None:
    generator = torch.Generator().manual_seed(0)
    x, bytes_ = torch.randn(3, 64, generator=generator), torch.randint(-127, 128, (64 * 20 + 1,))
    weight = QuantizedTensor(bytes_.to(torch.int8)[1:].view(20, 64), torch.rand(20, generator=generator))
    y = kernels_of(launcher).linear(x, weight)
    assert torch.equal(y, ReferenceKernels().linear(x, weight))


@pytest.mark.parametrize("num_tokens", [3, 50])
def test_rows_that_are_not_numbers_stay_among_themselves(
    launcher: EmulatedLauncher | CudaLauncher, num_tokens: int
) -> None:
    """A row with NaN or an infinity is NaN."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(num_tokens, 64, generator=generator), random_matrix(20, 64, generator)
    expected = ReferenceKernels().linear(x, weight)
    x[0, 3], x[2, 60] = torch.nan, torch.inf
    y = kernels_of(launcher).linear(x, weight)
    assert bool(y[[0, 2]].isnan().all())
    assert torch.equal(y[1], expected[1]) and torch.equal(y[3:], expected[3:])


def test_no_tokens_at_all(launcher: EmulatedLauncher | CudaLauncher) -> None:
    """No sequence of a step may be at its last pending token: the head then has no rows."""
    mine, weight = kernels_of(launcher), random_matrix(20, 64, torch.Generator().manual_seed(0))
    assert mine.linear(torch.empty(0, 64), weight).shape == (0, 20)
    assert mine.rms_norm(torch.empty(0, 64), torch.ones(64), 1e-5).shape == (0, 64)
    assert mine.gated_activation(torch.empty(0, 64), "silu").shape == (0, 32)


# Weights with a scale per group.

#: Tokens, rows, columns, group size, and the kernel for them. 2,304 columns are more than two warps' spans.
GROUPED = [
    (1, 70, 2304, 32, "gemv_1"),
    (2, 7, 96, 32, "gemv_2"),
    (7, 35, 1152, 128, "gemv_4"),
    (1, 1, 64, 64, "gemv_1"),
    (19, 33, 320, 64, "tiled"),
    (66, 70, 96, 32, "tiled"),
]


@pytest.mark.parametrize("activations", ["int16", "int8"])
@pytest.mark.parametrize("form", [*FORMS, "int8"])
def test_products_with_groups_equal_the_reference(
    launcher: EmulatedLauncher | CudaLauncher, form: str, activations: str
) -> None:
    mine, reference = kernels_of(launcher, activations), ReferenceKernels(activations)
    dtypes = [torch.float16, torch.bfloat16] + ([] if "blocks" in form else [torch.float32])
    for number, (num_tokens, rows, columns, size, kernel) in enumerate(GROUPED):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(num_tokens, columns + 3, generator=generator)[:, :columns] * 10 ** (number - 3)
        bias = torch.randn(rows, generator=generator) if number % 2 else None
        weight = random_matrix(rows, columns, generator)
        weight = weight._replace(scale=torch.rand(rows, columns // size, generator=generator))
        if form != "int8":
            weight = int4_matrix(form, rows, columns, size, dtypes[number % len(dtypes)], number)
        assert torch.equal(mine.linear(x, weight, bias), reference.linear(x, weight, bias)), number
        if isinstance(launcher, EmulatedLauncher):
            assert launcher.launched[-1].removeprefix("codes_").removeprefix("groups_").startswith(kernel)


def test_extreme_sums_of_groups_do_not_overflow(launcher: EmulatedLauncher | CudaLauncher) -> None:
    x = torch.full((20, 256), 3.0)
    x[1::2] *= -1
    for codebook, code in (("signed", 0), ("unsigned", 255), ("iq4_nl", 0), ("iq4_nl", 255)):
        minimum = torch.full((5, 2), 7.0) if codebook == "unsigned" else None
        codes = torch.full((5, 128), code, dtype=torch.uint8)
        weight = Int4Tensor(codes, torch.ones(5, 2), 128, codebook, minimum)
        for rows in (x, x[:1]):
            y = kernels_of(launcher).linear(rows, weight)
            assert torch.equal(y, ReferenceKernels().linear(rows, weight))


def test_codes_in_another_order_stacked_and_anywhere(launcher: EmulatedLauncher | CudaLauncher) -> None:
    generator, reference = torch.Generator().manual_seed(5), ReferenceKernels()
    plain = int4_matrix("zero points", 12, 128, 32, torch.bfloat16)
    order = torch.randperm(128, generator=generator).to(torch.int32)
    moved = torch.zeros(12 * 64 + 1, dtype=torch.uint8)[1:].view(12, 64).copy_(plain.codes)
    x, bias = torch.randn(4, 128, generator=generator), torch.randn(32, generator=generator)
    x[2, 77] = torch.nan
    parts = (plain._replace(order=order), random_matrix(8, 128, generator), plain._replace(codes=moved))
    stacked = StackedMatrix(parts)
    y, expected = kernels_of(launcher).linear(x, stacked, bias), reference.linear(x, stacked, bias)
    assert torch.equal(y.nan_to_num(7), expected.nan_to_num(7)) and bool(y[2].isnan().all())
    assert kernels_of(launcher).linear(x[:0], stacked).shape == (0, 32)


# Attention.


def attend_in_steps(
    mine: Kernels, q: Tensor, kv: LayerKV, layout: BatchLayout, spec: AttentionSpec, cuts: list[int]
) -> Tensor:
    """The one sequence of `layout`, its tokens computed in chunks that begin at `cuts`."""
    parts = []
    for first, end in pairwise([*cuts, q.shape[0]]):
        chunk = dataclasses.replace(
            layout,
            query_start=torch.tensor([0, end - first], dtype=torch.int32),
            context_lens=layout.context_lens - (q.shape[0] - end),
        )
        parts.append(mine.paged_attention(q[first:end], kv, chunk, spec))
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("case", "heads", "head_dim"),
    [("plain", (6, 2), 64), ("window", (6, 2), 64), ("softcap", (6, 1), 256), ("alibi", (6, 6), 96)]
    + [("chunks", (6, 3), 64), ("window, sinks", (6, 2), 128)],
)
def test_a_long_context_is_the_same_in_any_chunks_and_any_number_of_blocks(
    launcher: EmulatedLauncher | CudaLauncher,
    case: str, heads: tuple[int, int], head_dim: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Three splits of keys, the first of them beyond the window. With many multiprocessors each split has its
    block, with none one block has them all."""
    generator, spec = torch.Generator().manual_seed(0), ATTENTION[case]
    window, chunk = 150 if "window" in case else 0, 290 if case == "chunks" else 0
    spec = dataclasses.replace(spec, scale=0.1, window=window, chunk=chunk)
    context = 2 * SPLIT_KEYS + 38
    q, kv, layout = paged_batch(generator, [(context, 20)], heads, head_dim, torch.float16)
    mine = kernels_of(launcher)
    results = []
    for num_multiprocessors in (0, 1000):
        monkeypatch.setattr(launcher, "num_multiprocessors", num_multiprocessors)
        for cuts in ([0], [0, 1, 2, 13], [0, 9, 18]):
            results.append(attend_in_steps(mine, q, kv, layout, spec, cuts))
    if isinstance(launcher, EmulatedLauncher):
        assert {"merge_splits"} < set(launcher.launched)
    close(results[0], ReferenceKernels().paged_attention(q, kv, layout, spec))
    for result in results[1:]:
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("num_multiprocessors", [0, 10])
@settings(deadline=None, max_examples=20)
@given(
    sequences=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 9)), min_size=1, max_size=3),
    group=st.sampled_from([1, 2, 3, 9, 40]),
    head_dim=st.sampled_from([1, 6, 32, 64, 72, 128, 160]),
    block_size=st.sampled_from([16, 48]),
    window=st.sampled_from([0, 1, 31, 290]),
    boundary=st.sampled_from([None, 0, 5]),
    seed=st.integers(0, 2**31),
)
def test_attention_equals_the_reference(
    num_multiprocessors: int, sequences: list[tuple[int, int]], group: int, head_dim: int, block_size: int,
    window: int, boundary: int | None, seed: int,
) -> None:  # fmt: skip
    if COMPILER is None:
        pytest.skip("no C++ compiler to run the CUDA sources with")
    generator = torch.Generator().manual_seed(seed)
    sequences = [(max(context, new), new) for context, new in sequences]
    dtype = (torch.float16, torch.float32, torch.int8)[seed % 3]
    q, kv, layout = paged_batch(generator, sequences, (2 * group, 2), head_dim, dtype, block_size)
    spec = AttentionSpec(2 * group, head_dim**-0.5, window)
    if boundary is not None:
        bias = random_bias(2 * group, boundary)
        spec = dataclasses.replace(spec, window=0, distance_bias=bias)
        layout = with_prefixes(layout)
    mine = CudaKernels(EmulatedLauncher(num_multiprocessors))
    close(mine.paged_attention(q, kv, layout, spec), ReferenceKernels().paged_attention(q, kv, layout, spec))


def test_attention_reads_no_slot_that_was_not_written(launcher: EmulatedLauncher | CudaLauncher) -> None:
    """What lies beyond a sequence's end, in its own last block or in another, may be anything."""
    q, kv, layout = paged_batch(torch.Generator().manual_seed(0), [(37, 5)], (4, 2), 64, torch.float16)
    expected = ReferenceKernels().paged_attention(q, kv, layout, AttentionSpec(4, 0.1))
    used = set(layout.block_tables[0].tolist())
    keys, values = kv.parts
    for block in range(keys.shape[0]):
        end = 16 if block not in used else 37 % 16 if block == int(layout.block_tables[0, -1]) else None
        if end is not None:
            keys[block, :, :, end % 16 :], values[block, :, end % 16 :] = torch.nan, torch.nan
    assert bool(keys.isnan().any())
    close(kernels_of(launcher).paged_attention(q, kv, layout, AttentionSpec(4, 0.1)), expected)


@pytest.mark.parametrize("num_multiprocessors", [0, 1000])
def test_a_bias_may_hide_all_keys_that_come_first(num_multiprocessors: int) -> None:
    """By minus infinity. Keys that come later have all of the weight."""
    if COMPILER is None:
        pytest.skip("no C++ compiler to run the CUDA sources with")
    generator = torch.Generator().manual_seed(1)
    sequences = [(2 * SPLIT_KEYS + 38, 3), (40, 1), (300, 20)]
    q, kv, layout = paged_batch(generator, sequences, (4, 2), 64, torch.float32)
    bias = random_bias(4)
    bias.table[:, 0] = -torch.inf  # of keys that are 10 or more positions behind
    spec = dataclasses.replace(AttentionSpec(4, 64**-0.5), distance_bias=bias)
    expected = ReferenceKernels().paged_attention(q, kv, layout, spec)
    assert not bool(expected.isnan().any())
    close(CudaKernels(EmulatedLauncher(num_multiprocessors)).paged_attention(q, kv, layout, spec), expected)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("num_multiprocessors", [0, 1000])
def test_scores_that_are_no_numbers_are_told(num_multiprocessors: int, softcap: float) -> None:
    """A row with a score of NaN or infinity is NaN, as by a softmax, with and without splits. Other rows and
    heads are what they are without."""
    if COMPILER is None:
        pytest.skip("no C++ compiler to run the CUDA sources with")
    mine = CudaKernels(EmulatedLauncher(num_multiprocessors))
    for width, latent_dim in ((64, 0), (72, 0), (72, 64)):
        spec = AttentionSpec(4, width**-0.5, softcap=softcap, latent_dim=latent_dim)
        for case in ("q", "infinite q", "key", "infinite key", "overflow", "split"):
            generator = torch.Generator().manual_seed(width)
            sequences = [(2 * SPLIT_KEYS + 38, 2), (40, 1)]
            if latent_dim:
                q, kv, layout = latent_batch(generator, sequences, 4, width, torch.float32)
            else:
                q, kv, layout = paged_batch(generator, sequences, (4, 2), width, torch.float32)
            expected = mine.paged_attention(q, kv, layout, spec)
            keys, blocks = kv.parts[0], layout.block_tables[0].tolist()
            # Of a latent, this number is no part of the value.
            if case in ("q", "infinite q"):
                q[0, 1, width - 1] = torch.nan if case == "q" else torch.inf
            elif case == "split":
                keys[blocks[: SPLIT_KEYS // 16], 0, width - 1] = torch.nan
            else:
                q[:, :, width - 1] = q[:, :, width - 1].abs() + 2
                expected = mine.paged_attention(q, kv, layout, spec)
                number = {"key": torch.nan, "infinite key": torch.inf, "overflow": 3e38}[case]
                keys[blocks[3], 0, width - 1, 7] = number
            found = mine.paged_attention(q, kv, layout, spec).view(3, 4, -1)
            theirs = ReferenceKernels().paged_attention(q, kv, layout, spec).view(3, 4, -1)
            is_told = found.isnan().all(2)
            assert torch.equal(is_told, theirs.isnan().all(2)), (width, case)
            assert bool(is_told.any()) == (not softcap or case in ("q", "key", "split")), (width, case)
            if not softcap:
                assert torch.equal(found[~is_told], expected.view(3, 4, -1)[~is_told])


def test_heads_too_wide_for_a_kernel_take_the_reference(launcher: EmulatedLauncher | CudaLauncher) -> None:
    q, kv, layout = paged_batch(torch.Generator().manual_seed(0), [(20, 3)], (2, 1), 288, torch.float32)
    expected = ReferenceKernels().paged_attention(q, kv, layout, AttentionSpec(2, 0.1))
    close(kernels_of(launcher).paged_attention(q, kv, layout, AttentionSpec(2, 0.1)), expected)
