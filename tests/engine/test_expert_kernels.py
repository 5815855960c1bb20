"""Experts of a layer in one call: every set of kernels gives the bits of its own products expert by expert,
and the reference's numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence

import pytest
import torch
from test_int4_kernels import FAST, matrix
from test_int4_kernels import kernels as fast

from penstock.kernels import (
    ClampedGate,
    ExpertRows,
    GatedExpert,
    Matrix,
    PlainExperts,
    PlanesTensor,
    QuantizedTensor,
    Router,
    RouterFunction,
    Routing,
)
from penstock.kernels.cpu import NativeKernels
from penstock.kernels.cpu_builds import compiled_builds
from penstock.kernels.int4_tensor import StackedMatrix
from penstock.kernels.mixture.routing import plain_route
from penstock.kernels.reference import ReferenceKernels

HIDDEN, WIDTH = 192, 128
#: Rows of each expert: of one token, of several, and of more experts and rows than one call has.
ROWS = ((1,) * 6, (1, 2, 1, 5, 9, 3), (130, 1, 200, 2, 7, 1))


def int8(rows: int, columns: int, seed: int, num_groups: int = 1) -> QuantizedTensor:
    generator = torch.Generator().manual_seed(seed)
    qweight = torch.randint(-127, 128, (rows, columns), generator=generator, dtype=torch.int8)
    scale = torch.rand(rows, num_groups, generator=generator) / columns
    return QuantizedTensor(qweight, scale.flatten() if num_groups == 1 else scale)


def form(kind: str, rows: int, columns: int, seed: int) -> Matrix:
    if kind == "planes":
        return PlanesTensor.of(int8(rows, columns, seed))
    if kind == "stacked":  # no call in C knows it
        return StackedMatrix((int8(rows // 2, columns, seed), int8(rows // 2, columns, seed + 1)))
    if kind.startswith("int8"):
        return int8(rows, columns, seed, columns // 64 if "groups" in kind else 1)
    return matrix(kind, rows, columns, 64, torch.bfloat16, seed)


def experts(kinds: Sequence[str], rows: Sequence[int]) -> list[ExpertRows]:
    found, first = [], 0
    for seed, (kind, count) in enumerate(zip(kinds, rows, strict=True)):
        bias = torch.linspace(-1, 1, 2 * WIDTH) if seed == 3 else None
        gate_up, down = form(kind, 2 * WIDTH, HIDDEN, seed), form(kind, HIDDEN, WIDTH, seed)
        found.append((GatedExpert(gate_up, down, bias), first, first + count))
        first += count
    return found


@pytest.mark.parametrize("kind", FAST)
@pytest.mark.parametrize("activations", ["int16", "int8"])
def test_experts_together_are_experts_one_by_one(kind: str, activations: str) -> None:
    kernels, reference = fast(kind, activations), ReferenceKernels(activations)
    forms = ["int8", "int8 groups", "steps", "steps in some rows", "minima", "mxfp4", "shifts", "planes"]
    mixed = [forms[:6], ["planes", *forms[:5]], ["stacked", *forms[1:6]]]
    for kinds in [[each] * 6 for each in forms] + mixed:
        for rows in ROWS:
            given, total = experts(kinds, rows), sum(rows)
            generator = torch.Generator().manual_seed(1)
            x = torch.randn(50, HIDDEN, generator=generator)
            tokens = torch.randint(0, 50, (total,), generator=generator) if total > 6 else torch.full((6,), 7)
            y, plain, expected = (torch.full((total, HIDDEN), torch.nan) for _ in range(3))
            function = ClampedGate(1.5, 0.5) if kinds[0] == "shifts" else "silu"
            kernels.experts.compute(x, tokens, given, function, y)
            PlainExperts(kernels).compute(x, tokens, given, function, plain)
            assert torch.equal(y, plain), (kinds, rows)
            if rows == ROWS[0]:
                PlainExperts(reference).compute(x, tokens, given, function, expected)
                assert (y - expected).abs().max() <= 1e-3 * expected.abs().max()


@pytest.mark.parametrize("build", compiled_builds())
@pytest.mark.parametrize("function", ["none", "softmax", "sigmoid"])
def test_experts_are_chosen_as_torch_sorts(build: str, function: RouterFunction) -> None:
    """Of routers with one input, so that logits are products of two numbers."""
    native, generator = NativeKernels(build=build), torch.Generator().manual_seed(2)
    sizes = (
        (1, 128, 8, 1, 1),
        (40, 61, 61, 1, 1),
        (3, 512, 1, 8, 1),
        (300, 32, 4, 4, 2),
        (5, 96, 30, 48, 16),
    )
    for num_tokens, number, num_chosen, num_groups, num_chosen_groups in sizes:
        weight = torch.randint(-9, 9, (number, 1), generator=generator) / 4  # many are equal
        weight[3], weight[5], weight[4] = -0.0, 0.0, -torch.inf
        x, bias = torch.randn(num_tokens, 1, generator=generator), weight.flatten().flip(0)
        correction = torch.randint(-2, 2, (number,), generator=generator) / 2
        flawed = weight.clone()
        flawed[::7] = torch.nan
        for router in (
            Router(weight),
            Router(flawed),
            Router(weight.clamp_min(-9), bias.clamp_min(-9), correction),
            Router(flawed, None, correction),
        ):
            for is_renormalized, least_sum, num_counted in (
                (False, 0.0, 1),
                (True, 1e-20, 2),
                (True, 0.5, 3),
            ):
                routing = Routing(
                    number, num_chosen, function, is_renormalized, least_sum, 2.5, True, num_groups,
                    num_chosen_groups, num_counted,
                )  # fmt: skip
                found, expected = native.route(x, router, routing), plain_route(native, x, router, routing)
                assert torch.equal(found.experts, expected.experts), (routing, router)
                assert torch.equal(found.scores.nan_to_num(7.0), expected.scores.nan_to_num(7.0))


@pytest.mark.parametrize("kind", FAST)
def test_a_tokens_experts_are_those_of_many_calls(kind: str) -> None:
    """Also where the scratch memory is more than a thread keeps, and where an expert has no record."""
    kernels, random = fast(kind, "int16"), torch.Generator().manual_seed(4)
    forms = ["int8", "int8 groups", "steps", "minima", "mxfp4", "shifts", "planes", "stacked"]
    for kinds in [[each] * 6 for each in forms] + [forms[:6], ["int8"] * 300]:
        given = experts(kinds, (1,) * len(kinds))
        x, onto = torch.randn(1, HIDDEN, generator=random), torch.randn(1, HIDDEN, generator=random)
        scores = torch.rand(1, len(kinds), generator=random)
        function = ClampedGate(1.5, 0.5) if kinds[0] == "shifts" else "silu"
        weights = [expert for expert, _, _ in given]
        for hidden in (None, onto):
            expected = PlainExperts(kernels).blend_token(x, weights, function, scores, hidden)
            found = kernels.experts.blend_token(x, weights, function, scores, hidden)
            assert torch.equal(found, expected), kinds


@pytest.mark.skipif(not compiled_builds(), reason="no C kernels were compiled")
@pytest.mark.parametrize("has_scores", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_sums_of_experts_are_added_to_what_was_there(num_tokens: int, has_scores: bool) -> None:
    random = torch.Generator().manual_seed(3)
    parts = torch.randn(3 * num_tokens, 40, generator=random)
    rows = torch.randperm(3 * num_tokens, generator=random).view(num_tokens, 3)
    scores = torch.rand(num_tokens, 3, generator=random) if has_scores else None
    onto = torch.randn(num_tokens, 40, generator=random)
    native, plain = NativeKernels().experts, PlainExperts(ReferenceKernels())
    for hidden in (None, onto):
        expected = plain.add(parts, rows, scores, hidden)
        assert torch.equal(native.add(parts, rows, scores, hidden), expected)


class Reads:
    """Arriving experts whose reads end when they are waited for; those of `failing` fail, and are good once
    they are settled. Before that, an expert's scales are NaN."""

    def __init__(self, given: Sequence[ExpertRows], number: int, failing: Collection[int]) -> None:
        self._scales = [expert.down.scale for expert, _, _ in given[-number:]]
        self._there = [scale.clone() for scale in self._scales]
        for scale in self._scales:
            scale.fill_(torch.nan)
        self._failing = set(failing)
        self.settled: list[int] = []
        self._function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)(
            self._wait
        )
        self.wait, self.reads = ctypes.cast(self._function, ctypes.c_void_p).value or 0, 0

    def __len__(self) -> int:
        return len(self._scales)

    def tickets(self) -> list[int]:
        return [-1 if index in self.settled else index for index in range(len(self))]

    def settle(self, index: int) -> None:
        self.settled.append(index)
        self._scales[index].copy_(self._there[index])

    def _wait(self, _: object, ticket: int, is_patient: int) -> int:
        if ticket in self._failing:
            return -1
        if is_patient or ticket % 2:
            self._scales[ticket].copy_(self._there[ticket])
            return 1
        return 0


@pytest.mark.parametrize("build", compiled_builds())
@pytest.mark.parametrize("num_arriving", [1, 4, 6])
@pytest.mark.parametrize("failing", [(), (0,), (2, 3), (5,)])
def test_experts_that_arrive_are_experts_that_are_there(
    build: str, num_arriving: int, failing: tuple[int, ...]
) -> None:
    kernels = NativeKernels(build=build)
    for rows in ((1,) * 6, (2, 1, 9, 1, 3, 1), (40,) * 6):
        total = sum(rows)
        x, tokens = torch.randn(50, HIDDEN), torch.randint(0, 50, (total,))
        given = experts(["int8"] * 6, rows)
        expected = torch.full((total, HIDDEN), torch.nan)
        kernels.experts.compute(x, tokens, given, "silu", expected)
        for own in (kernels.experts, PlainExperts(kernels)):
            y, reads = torch.full((total, HIDDEN), torch.nan), Reads(given, num_arriving, failing)
            own.compute(x, tokens, given, "silu", y, reads)
            assert torch.equal(y, expected)
            if own is kernels.experts and total < 40:
                assert reads.settled == [index for index in failing if index < num_arriving]
