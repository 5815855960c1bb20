"""The way of a step's inputs to a card: what comes there is what the host had, whatever it does next."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import is_dataclass

import pytest
import torch
from pretended_card import PretendedCard, missing
from pretended_card.streams import Event
from torch import Tensor

from penstock.config import EngineConfig
from penstock.kernels import BatchLayout, StateSlots, choose_kernels
from penstock.memory.cuda_inlet import CudaInlet, open_inlet
from penstock.memory.host_lane import PlainInlet
from penstock.memory.lane import find_lane

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
TYPES = (torch.float32, torch.int64, torch.int32, torch.bool)


def random_inputs(draw: random.Random) -> list[Tensor]:
    shapes = [[draw.randrange(5) for _ in range(draw.randint(1, 3))] for _ in range(draw.randint(1, 9))]
    return [torch.randint(-(1 << 20), 1 << 20, shape).to(draw.choice(TYPES)) for shape in shapes]


def test_tensors_are_those_of_the_plain_way(card: PretendedCard) -> None:
    """Of each type, empty ones, those with gaps, one that is there already, and one that is too large."""
    draw = random.Random(0)
    with contextlib.closing(find_lane("cuda")) as lane:
        device = lane.torch_device
        inlet = lane.inlet(choose_kernels(EngineConfig(device="cuda"), device, None).fetch)  # type: ignore[attr-defined]
        assert isinstance(inlet, CudaInlet)
        for _ in range(30):
            inputs = random_inputs(draw)
            inputs.insert(draw.randrange(len(inputs) + 1), torch.randn(6, 4).t())
            if draw.random() < 0.3:
                inputs.insert(draw.randrange(len(inputs) + 1), torch.randn(inlet.half_bytes // 4))
                inputs.insert(draw.randrange(len(inputs) + 1), torch.randn(3).to(device))
            expected = [each.cpu().clone() for each in inputs]
            found = inlet.bring(inputs)
            for each in inputs:
                each.zero_()
            for own, there, plain in zip(inputs, found, PlainInlet(device).bring(expected), strict=True):
                assert there.device == device and there.dtype == plain.dtype
                assert there is own or torch.equal(there.cpu(), plain.cpu())
        assert card.driver.num_launches["fetch"] == 30, "one for all of a call"
        assert not card.races.found
        assert inlet.bring([torch.empty(0)])[0].device == device


def test_what_is_not_fetched_yet_is_not_written_over(
    card: PretendedCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card that fetches when somebody waits for it, and no sooner."""
    late = list[Callable[[], None]]()

    def fetch(address: int, y: Tensor) -> None:
        def copy() -> None:
            there = (torch.frombuffer(memory.numpy(), dtype=torch.uint8))[address - memory.data_ptr() :]
            y.copy_(there[: y.nbytes].view(torch.float32))

        late.append(copy)

    def wait(event: Event) -> None:
        late.pop(0)()

    monkeypatch.setattr(Event, "synchronize", wait)
    memory = torch.zeros(256, dtype=torch.uint8)
    inlet = CudaInlet(torch.device("cpu"), memory, memory.data_ptr(), fetch)
    inputs = [torch.randn(7) for _ in range(9)]
    found = [inlet.bring([each])[0] for each in inputs]
    assert len(late) == 2, "as many as there are halves"
    while late:
        late.pop(0)()
    assert all(map(torch.equal, found, inputs))


def test_a_card_that_does_not_see_the_memory(card: PretendedCard) -> None:
    unseen, device = torch.zeros(256, dtype=torch.uint8), torch.device("cuda", 0)
    assert open_inlet(card.driver, unseen, device, lambda address, y: None) is None
    card.driver.refuses_to_pin = True
    with contextlib.closing(find_lane("cuda")) as lane:
        assert isinstance(lane.inlet(lambda address, y: None), PlainInlet)
        assert isinstance(lane.inlet(None), PlainInlet)  # torch's kernels


def test_a_layout_goes_with_all_its_parts() -> None:
    """Through tensors() and with_tensors(), in any order of its fields."""
    number = iter(range(100))

    def tensor() -> Tensor:
        return torch.full((3,), next(number))

    for layout in (
        BatchLayout(*(tensor() for _ in range(5))),
        BatchLayout(
            *(tensor() for _ in range(5)), prefix_lens=tensor(), copied_rows=tensor(), copied_slots=tensor(),
            cross=BatchLayout(*(tensor() for _ in range(5)), rope_lengths=tensor()),
            states=StateSlots(*(tensor() for _ in range(4))),
        ),
    ):  # fmt: skip
        same = layout.with_tensors([each + 100 for each in layout.tensors()])
        pairs = [(layout, same)]
        for before, after in pairs:
            assert vars(before).keys() == vars(after).keys()
            for name, value in vars(before).items():
                other = getattr(after, name)
                if isinstance(value, Tensor):
                    assert torch.equal(other, value + 100), name
                elif not is_dataclass(value):
                    assert other == value
                else:
                    pairs.append((value, other))
