"""Products that cross by flags: the bits are the kernels' own, whatever is given up, and what does not fit
goes another way."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_card import PretendedCard, missing
from test_shared_products import FORMATS, random_matrix
from torch import Tensor

from penstock.config import EngineConfig
from penstock.kernels import Matrix, choose_kernels
from penstock.kernels.cpu import NativeKernels
from penstock.kernels.cpu_builds import compiled_builds
from penstock.kernels.int4_tensor import StackedMatrix
from penstock.kernels.shared import crossing, handed_product
from penstock.kernels.shared.crossing import HEAD_BYTES, MAX_HANDED, open_crossing
from penstock.memory.cuda_handover import CROSSING_BYTES
from penstock.memory.lane import find_lane
from penstock.weights.formats.weight_format import Int8

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
IN, OUT = 256, 80


def test_c_and_python_have_the_same_numbers() -> None:
    """Memory that one of the two laid out otherwise would be read as something else."""
    header = (Path(crossing.__file__).parents[1] / "cpu" / "crossing.h").read_text()
    in_c = {name: int(value) for name, value in re.findall(r"\b([A-Z_]+) = (-?\d+)\b", header)}
    assert in_c["MAX_HANDED"] == crossing.MAX_HANDED and in_c["CROSSING_FULL"] == crossing.FULL
    assert in_c["CROSSING_HEAD"] == crossing.HEAD_BYTES and in_c["ROUND_FLOATS"] == crossing.ROUND_FLOATS
    members = {name: body.count(";") for body, name in re.findall(r"typedef struct {([^}]*)} (\w+);", header)}
    assert members["handed_part"] == crossing.PART_NUMBERS
    assert len(crossing.DRIVER_FUNCTIONS) == members["crossing_driver"]


def fetch_of(device: torch.device) -> Callable[[int, Tensor], None]:
    return choose_kernels(EngineConfig(device="cuda"), device, None).fetch  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("name", ["INT8", "planes", "INT4, groups of 32"])
@pytest.mark.parametrize("activations", ["int16", "int8"])
def test_results_are_those_of_the_kernels(name: str, activations: str, card: PretendedCard) -> None:
    """One after the other, with other numbers of tokens each time. Every third one is given up."""
    kernels = NativeKernels(activations)
    weight = random_matrix(FORMATS[name], (OUT, IN))
    product = kernels.handed(weight)
    with contextlib.closing(find_lane("cuda")) as lane:
        handover, fetch = lane.handover(), fetch_of(lane.torch_device)
        for number in range(150):
            x = torch.randn(1 + number % 11, IN)
            y = handover.begin(x.to(lane.torch_device), OUT, lambda rows: rows, product, fetch)
            if number % 3 < 2:
                handover.join()
                assert torch.equal(y.cpu(), kernels.linear(x, weight)), number
        assert handover._crossing is not None


def test_a_matrix_keeps_few_numbers_of_rows(card: PretendedCard, monkeypatch: pytest.MonkeyPatch) -> None:
    """While products with other numbers of rows are on their way."""
    monkeypatch.setattr(handed_product, "MAX_NUMBERS", 3)
    kernels, weight = NativeKernels(), random_matrix(Int8(), (OUT, IN))
    product = kernels.handed(weight)
    with contextlib.closing(find_lane("cuda")) as lane:
        handover, fetch = lane.handover(), fetch_of(lane.torch_device)
        for first in range(1, 40, 5):
            for num_rows in range(first, first + 5):
                x = torch.randn(num_rows, IN)
                y = handover.begin(x.to(lane.torch_device), OUT, lambda rows: rows, product, fetch)
                assert 0 < len(product._matrix.__dict__["numbers_of_rows"]) <= 3
            handover.join()
            assert torch.equal(y.cpu(), kernels.linear(x, weight))


Products = list[tuple[Matrix, Tensor | None, int]]


def random_products(name: str, generator: random.Random, most_rows: int) -> Products:
    """Of up to a dozen matrices, some with a bias; one row each, or more."""
    return [
        (
            random_matrix(FORMATS[name], (OUT, IN), generator.randrange(1 << 30)),
            torch.randn(OUT) if generator.random() < 0.5 else None,
            generator.randint(1, most_rows),
        )
        for _ in range(generator.randint(1, 12))
    ]


def separately(kernels: NativeKernels, x: Tensor, products: Products) -> Tensor:
    rows = torch.split(x, [num_rows for _, _, num_rows in products])
    return torch.cat([kernels.linear(own, *each[:2]) for own, each in zip(rows, products, strict=True)])


@pytest.mark.parametrize("build", compiled_builds())
@pytest.mark.parametrize("activations", ["int16", "int8"])
def test_parts_have_the_bits_of_their_products(activations: str, build: str, card: PretendedCard) -> None:
    """In any company, on one thread and on several."""
    kernels, generator = NativeKernels(activations, build), random.Random(0)
    with contextlib.closing(find_lane("cuda")) as lane:
        handover, fetch = lane.handover(), fetch_of(lane.torch_device)
        for name, num_threads in itertools.product(FORMATS, (1, 3)):
            kernels.set_num_threads(num_threads)
            for most_rows in (1, 3, 40):
                products = random_products(name, generator, most_rows)
                x = torch.randn(sum(num_rows for _, _, num_rows in products), IN)
                parts = kernels.handed_parts(products)
                y = handover.begin(x.to(lane.torch_device), OUT, lambda rows: rows, parts, fetch)
                assert handover._crossed is not None
                handover.join()
                assert torch.equal(y.cpu(), separately(kernels, x, products)), (name, num_threads)
        kernels.set_num_threads(1)
        assert not card.races.found


def test_nothing_is_lost_that_is_begun_before_a_join(card: PretendedCard) -> None:
    """Parts and a product by flags, and products the other way, in any order."""
    kernels, generator = NativeKernels(), random.Random(1)
    weight, x = random_matrix(Int8(), (OUT, IN)), torch.randn(3, IN)
    product, whole = kernels.handed(weight), kernels.linear(x, weight)
    with contextlib.closing(find_lane("cuda")) as lane:
        handover, fetch = lane.handover(), fetch_of(lane.torch_device)
        for _ in range(40):
            found = list[tuple[Tensor, Tensor]]()
            for _ in range(generator.randint(1, 4)):
                if generator.random() < 0.5:
                    products = random_products("INT8", generator, 3)
                    rows = torch.randn(sum(num_rows for _, _, num_rows in products), IN)
                    given, expected = kernels.handed_parts(products), separately(kernels, rows, products)
                else:
                    rows, given, expected = x, product, whole
                compute = functools.partial(lambda result, _: result, expected)
                way = generator.choice([fetch, fetch, None])
                y = handover.begin(rows.to(lane.torch_device), OUT, compute, given, way)
                found.append((y, expected))
            handover.join()
            for y, expected in found:
                assert torch.equal(y.cpu(), expected)
        assert not card.races.found


def test_parts_that_do_not_cross_go_through_python(card: PretendedCard) -> None:
    """Parts with too many rows, and those of a matrix that compiled code does not know."""
    kernels, weight = NativeKernels(), random_matrix(Int8(), (OUT, IN))
    most = (CROSSING_BYTES - HEAD_BYTES) // 4 // (IN + OUT)
    assert kernels.handed_parts([(weight, None, 1), (StackedMatrix((weight,)), None, 1)]) is None
    with contextlib.closing(find_lane("cuda")) as lane:
        handover, fetch, computed = lane.handover(), fetch_of(lane.torch_device), list[int]()

        def compute(rows: Tensor) -> Tensor:
            computed.append(len(rows))
            return kernels.linear(rows, weight)

        for num_rows, is_computed in ((most, False), (most + 1, True)):
            x = torch.randn(num_rows, IN)
            parts = kernels.handed_parts([(weight, None, 1), (weight, None, num_rows - 1)])
            y = handover.begin(x.to(lane.torch_device), OUT, compute, parts, fetch)
            handover.join()
            assert torch.equal(y.cpu(), kernels.linear(x, weight))
            assert sum(computed) == is_computed * num_rows


def test_what_follows_comes_behind_the_products(card: PretendedCard) -> None:
    """Whoever lends weights to the processor has them back when the processor has computed, and not before:
    here the card brings the inputs when the handover's stream waits already."""
    kernels, weight, rows = NativeKernels(), random_matrix(Int8(), (OUT, IN)), torch.randn(2, IN)
    with contextlib.closing(find_lane("cuda")) as lane:
        handover, fetch = lane.handover(), fetch_of(lane.torch_device)
        parts, x = kernels.handed_parts([(weight, None, 2)]), rows.to(lane.torch_device)
        for number in (1, 2, 3):
            y = handover.begin(x, OUT, lambda rows: rows, parts, fetch)
            done = ctypes.c_uint32.from_address(handover._flagged.data_ptr() + HEAD_BYTES // 2)
            computed = list[int]()
            handover.then(lambda computed=computed, done=done: computed.append(done.value))
            torch.cuda.synchronize()
            assert computed == [number]
            handover.join()
            assert torch.equal(y.cpu(), kernels.linear(rows, weight))


def test_what_does_not_fit_goes_the_other_way(card: PretendedCard) -> None:
    kernels = NativeKernels()
    weight = random_matrix(Int8(), (OUT, IN))
    most = (CROSSING_BYTES - HEAD_BYTES) // 4 // (IN + OUT)
    with contextlib.closing(find_lane("cuda")) as lane:
        handover, fetch = lane.handover(), fetch_of(lane.torch_device)
        product = kernels.handed(weight)
        for num_tokens, crosses in ((most, True), (most + 1, False)):
            x = torch.randn(num_tokens, IN)
            y = handover.begin(x.to(lane.torch_device), OUT, lambda rows: rows, product, fetch)
            assert (handover._crossed is not None) == crosses
            handover.join()
            assert torch.equal(y.cpu(), kernels.linear(x, weight))


class SlowDriver:
    """A driver whose streams never come to what was queued."""

    def __init__(self, error: int = 0) -> None:
        kinds: Any = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p
        )
        self.error = error
        self.cuMemcpyDtoHAsync_v2 = kinds(lambda *_: self.error)
        self.cuStreamWriteValue32_v2 = self.cuStreamWaitValue32_v2 = kinds(lambda *_: 0)
        self.cuCtxSetCurrent = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: 0)

    def cuCtxGetCurrent(self, context: Any) -> int:
        return 0

    def cuMemHostGetDevicePointer_v2(self, on_card: Any, address: ctypes.c_void_p, flags: int) -> int:
        on_card._obj.value = address.value
        return 0


def test_a_card_that_does_not_come_holds_nothing_up(card: PretendedCard) -> None:
    """So many products wait, and no more; a driver's error is raised; closing waits for none of them."""
    device, memory = torch.device("cuda", 0), torch.zeros(1 << 16, dtype=torch.uint8)
    product = NativeKernels().handed(random_matrix(Int8(), (OUT, IN)))
    driver, x = SlowDriver(), torch.randn(1, IN)
    crossing = open_crossing(product._library, driver, memory, device)
    assert crossing is not None
    assert [product.cross(crossing, x) for _ in range(MAX_HANDED)] == [True] * (MAX_HANDED - 1) + [False]
    assert [product.cross(crossing, x) for _ in range(MAX_HANDED)] == [False] * MAX_HANDED
    assert len(crossing._held) == MAX_HANDED - 1, "what waits keeps its memory, however many others come"
    crossing.close()
    driver.error = 700
    crossing = open_crossing(product._library, driver, memory, device)
    assert crossing is not None
    with pytest.raises(RuntimeError, match="error 700"):
        product.cross(crossing, x)
    crossing.close()


def test_drivers_without_values_of_streams(card: PretendedCard) -> None:
    library, memory = NativeKernels()._library, torch.zeros(4096, dtype=torch.uint8)
    assert open_crossing(library, object(), memory, torch.device("cuda", 0)) is None
    card.driver.fake_stream_values(False)
    assert open_crossing(library, card.driver, memory, torch.device("cuda", 0)) is None
