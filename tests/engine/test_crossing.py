"""Products that cross by flags: the bits are the kernels' own, whatever is given up, and what does not fit
goes another way."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pretended_card import PretendedCard, engines, missing
from test_shared_products import random_matrix
from torch import Tensor

from penstock.config import EngineConfig
from penstock.kernels import choose_kernels
from penstock.kernels.cpu import NativeKernels
from penstock.kernels.shared.crossing import HEAD_BYTES, MAX_HANDED, open_crossing
from penstock.memory.handover.cuda_handover import CROSSING_BYTES
from penstock.memory.lane import find_lane
from penstock.weights.checkpoints.int4_form import Int4Form
from penstock.weights.formats.int4_format import Int4
from penstock.weights.formats.weight_format import Int8

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
IN, OUT = 256, 80


@pytest.fixture
def card() -> Iterator[PretendedCard]:
    with engines.card_with_kernels() as card:
        yield card


def fetch_of(device: torch.device) -> Callable[[int, Tensor], None]:
    return choose_kernels(EngineConfig(device="cuda"), 1, device, None).fetch  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("name", ["INT8", "INT4"])
@pytest.mark.parametrize("activations", ["int16", "int8"])
def test_results_are_those_of_the_kernels(name: str, activations: str, card: PretendedCard) -> None:
    """One after the other, with other numbers of tokens each time. Every third one is given up."""
    kernels = NativeKernels(activations)
    weight = random_matrix(Int8() if name == "INT8" else Int4(Int4Form(32)), (OUT, IN))
    product = kernels.handed(weight)
    with contextlib.closing(find_lane("cuda")) as lane:
        handover, fetch = lane.handover(), fetch_of(lane.torch_device)
        for number in range(150):
            x = torch.randn(1 + number % 11, IN)
            y = handover.begin(x.to(lane.torch_device), OUT, lambda rows: rows, product, fetch)
            if number % 3 < 2:
                handover.join()
                assert torch.equal(y.cpu(), kernels.linear(x, weight)), number
        assert handover._crossing is not None and not card.races.found


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
