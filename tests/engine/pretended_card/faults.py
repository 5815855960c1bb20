"""Faults of an engine that only a card would show, made without the engine's help: a call that it would have
forgotten does nothing."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.cuda.launcher import CudaLauncher
from penstock.memory.cuda_inlet import CudaInlet
from penstock.memory.cuda_lane import CudaLane
from penstock.memory.direct_io import DirectReader
from pretended_card.card import PretendedCard
from pretended_card.driver import Driver
from pretended_card.streams import CurrentDevice, Event, Stream

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]


def _computing_does_not_wait_for_copies(patch: Patch) -> None:
    wait = Stream.wait_event
    patch.setattr(Stream, "wait_event", lambda self, event: None if self.is_default else wait(self, event))


def _copies_do_not_wait_for_the_last_use(patch: Patch) -> None:
    wait = Stream.wait_event
    patch.setattr(Stream, "wait_event", lambda self, event: wait(self, event) if self.is_default else None)


def _the_last_use_is_recorded_on_the_link(patch: Patch) -> None:
    record, links = Event.record, []

    def on_the_link(self: Event, stream: Stream) -> None:
        if not stream.is_default:
            links.append(stream)
        record(self, links[-1] if links else stream)

    patch.setattr(Event, "record", on_the_link)


def _the_host_waits_for_no_event(patch: Patch) -> None:
    patch.setattr(Event, "synchronize", lambda self: None)


def _the_host_waits_for_no_event_of_a_slow_disk(patch: Patch) -> None:
    """The copy out of a slot has mostly ended before the next read begins, and nothing looks wrong."""
    _the_host_waits_for_no_event(patch)
    submit = DirectReader.submit

    def slow(self: DirectReader, *args: Any) -> Any:
        time.sleep(0.02)
        return submit(self, *args)

    patch.setattr(DirectReader, "submit", slow)


def _new_memory_is_used_before_it_is_zero(patch: Patch) -> None:
    wait = Stream.synchronize
    patch.setattr(Stream, "synchronize", lambda self: None if self.is_default else wait(self))


def _copies_are_timed_before_they_have_ended(patch: Patch) -> None:
    patch.setattr(Event, "query", lambda self: True)


def _no_context_is_current(patch: Patch) -> None:
    calls: list[object] = []

    def once(self: Driver, context: Any) -> int:
        calls.append(context)
        return int(self._library.cuCtxSetCurrent(context)) if len(calls) == 1 else 0

    patch.setattr(Driver, "cuCtxSetCurrent", once, raising=False)


def _pages_stay_pinned(patch: Patch) -> None:
    patch.setattr(Driver, "cuMemHostUnregister", lambda self, address: 0, raising=False)


def _a_step_input_stays_on_the_host(patch: Patch) -> None:
    bring = CudaInlet.bring

    def partly(self: CudaInlet, tensors: Sequence[Tensor]) -> list[Tensor]:
        found = bring(self, tensors)
        return [own if _is_query_start(own) else there for own, there in zip(tensors, found, strict=True)]

    patch.setattr(CudaInlet, "bring", partly)


def _the_inlet_has_one_half_and_waits_for_nothing(patch: Patch) -> None:
    bring = CudaInlet.bring

    def careless(self: CudaInlet, tensors: Sequence[Tensor]) -> list[Tensor]:
        half = next(self._turns)
        self._turns, half.read = itertools.repeat(half), None
        return bring(self, tensors)

    patch.setattr(CudaInlet, "bring", careless)


def _stays_on_the_host(is_forgotten: Callable[[Tensor], bool]) -> Fault:
    def fault(patch: Patch) -> None:
        move = Tensor.to
        patch.setattr(
            Tensor, "to", lambda self, *args, **kw: self if is_forgotten(self) else move(self, *args, **kw)
        )

    return fault


def _is_rope_table(tensor: Tensor) -> bool:
    """Cosines or sines of all positions, for heads of 16 dimensions."""
    return tensor.dim() == 2 and tensor.dtype == torch.float32 and tensor.shape[1] == 8 and len(tensor) > 40


def _is_query_start(tensor: Tensor) -> bool:
    return tensor.dim() == 1 and tensor.dtype == torch.int32 and len(tensor) > 1 and tensor[0] == 0


#: What is wrong -> how to make it so, and whether layers must come from disk for it to show.
FAULTS: dict[str, tuple[Fault, bool]] = {
    "computing does not wait for copies": (_computing_does_not_wait_for_copies, False),
    "copies do not wait for the last use": (_copies_do_not_wait_for_the_last_use, False),
    "the last use is recorded on the link": (_the_last_use_is_recorded_on_the_link, False),
    "the host waits for no event": (_the_host_waits_for_no_event, True),
    "the host waits for no event, and the disk is slow": (_the_host_waits_for_no_event_of_a_slow_disk, True),
    "new memory is used before it is zero": (_new_memory_is_used_before_it_is_zero, False),
    "copies are timed before they have ended": (_copies_are_timed_before_they_have_ended, False),
    "no context is current in the launching thread": (_no_context_is_current, False),
    "pages stay pinned": (_pages_stay_pinned, False),
    "query_start stays on the host": (_a_step_input_stays_on_the_host, False),
    "inputs are written over before they are fetched": (_the_inlet_has_one_half_and_waits_for_nothing, False),
    "rope's table stays on the host": (_stays_on_the_host(_is_rope_table), False),
}


def _the_lane_is_that_of_the_first_card(patch: Patch) -> None:
    make = CudaLane.__init__
    patch.setattr(CudaLane, "__init__", lambda self, number: make(self))


def _kernels_are_loaded_on_the_first_card(patch: Patch) -> None:
    make = CudaLauncher.__init__
    patch.setattr(CudaLauncher, "__init__", lambda self, device, image: make(self, FIRST, image))


def _streams_have_no_number(patch: Patch) -> None:
    make = PretendedCard.make_stream
    patch.setattr(PretendedCard, "make_stream", lambda self, device: make(self))


def _pinning_is_done_on_the_first_card(patch: Patch) -> None:
    patch.setattr(CurrentDevice, "set", lambda self, device: nullcontext())


FIRST = torch.device("cuda", 0)
#: What is wrong where the second card is asked for -> how to make it so.
FAULTS_OF_A_SECOND_CARD: dict[str, Fault] = {
    "the lane is that of the first card": _the_lane_is_that_of_the_first_card,
    "kernels are loaded on the first card": _kernels_are_loaded_on_the_first_card,
    "streams have no number": _streams_have_no_number,
    "pinning is done on the first card": _pinning_is_done_on_the_first_card,
}
