"""Streams and events of the pretended card, in the place of torch.cuda's.

The default stream runs at once, in the order of the host. What is queued on another stream runs as late as
the rules allow: when somebody waits for it, and no further than that. Functions of the host are called on a
thread of their own, as the driver calls them, while nobody holds the lock.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from pretended_card.races import Races

if TYPE_CHECKING:
    from pretended_card.card import PretendedCard

#: Milliseconds between any two events.
ELAPSED_MS = 0.5
_numbers = itertools.count(1)


class Stream:
    def __init__(self, races: Races, handle: int, device: torch.device, *, is_default: bool = False) -> None:
        self.device = device
        self.stream_id = 0 if is_default else next(_numbers)
        self.cuda_stream = handle
        self.is_default = is_default
        self.num_queued = 0
        self._num_run = 0
        #: A thread runs what comes next. While it waits for a function of the host, it has no lock.
        self._is_running = False
        #: How much of each stream has run before what is queued here, since this stream waited for it.
        self.awaited: dict[Stream, int] = {}
        #: How much the host knows to have run, because it waited.
        self.num_known = 0
        self._queue: deque[Callable[[], object]] = deque()
        self.races = races
        if not is_default:
            races.detector._handle_stream_creation(self.stream_id)

    def enqueue(self, action: Callable[[], object]) -> None:
        if self.is_default:
            action()
            return
        with self.races.lock:
            self._queue.append(action)
            self.num_queued += 1

    def run(self, until: int) -> None:
        with self.races.lock:
            while self._num_run < until and not self.is_default:
                if self._is_running:
                    self.races.changed.wait()
                    continue
                self._is_running = True
                try:
                    self._queue.popleft()()
                finally:
                    self._is_running = False
                    self._num_run += 1
                    self.races.changed.notify_all()

    def has_run(self, until: int) -> bool:
        return self.is_default or self._num_run >= until

    def wait_event(self, event: Event) -> None:
        with self.races.lock:
            self.races.detector._handle_event_wait(event.number, self.stream_id)
            for stream, until in event.before.items():
                self.awaited[stream] = max(until, self.awaited.get(stream, 0))
        self.enqueue(event.run)

    def all_before(self) -> dict[Stream, int]:
        """How much of each stream comes before what will be queued here."""
        return self.awaited | {self: self.num_queued}

    def synchronize(self) -> None:
        with self.races.lock:
            self.run(self.num_queued)
            tell_host(self.all_before())
            self.races.detector._handle_stream_synchronization(self.stream_id)


def tell_host(before: dict[Stream, int]) -> None:
    """The host has waited until so much of each stream had run."""
    for stream, until in before.items():
        stream.num_known = max(stream.num_known, until)


class Event:
    def __init__(self, races: Races, enable_timing: bool = False) -> None:
        self.number = next(_numbers)
        self._races = races
        self._is_timed = enable_timing
        #: The stream that it was recorded on, and how much was queued there before it.
        self._place: tuple[Stream, int] | None = None
        #: How much of each stream comes before it.
        self.before: dict[Stream, int] = {}
        races.detector._handle_event_creation(self.number)

    def record(self, stream: Stream) -> None:
        with self._races.lock:
            self._place, self.before = (stream, stream.num_queued), stream.all_before()
            self._races.detector._handle_event_record(self.number, stream.stream_id)

    def query(self) -> bool:
        return self._has_happened()

    def _has_happened(self) -> bool:
        return self._place is None or self._place[0].has_run(self._place[1])

    @property
    def run(self) -> Callable[[], None]:
        """What runs everything before it, as it is recorded now."""
        if self._place is None:
            return lambda: None
        stream, until = self._place
        return lambda: stream.run(until)

    def synchronize(self) -> None:
        with self._races.lock:
            self.run()
            tell_host(self.before)
            self._races.detector._handle_event_synchronization(self.number)

    def elapsed_time(self, end: Event) -> float:
        for condition, text in (
            (self._is_timed and end._is_timed, "be created with argument 'enable_timing=True'"),
            (
                self._place is not None and end._place is not None,
                "be recorded before calculating elapsed time",
            ),
            (self._has_happened() and end._has_happened(), "be completed before calculating elapsed time"),
        ):
            if not condition:
                raise RuntimeError(f"Both events must {text}.")
        return ELAPSED_MS


class CurrentDevice(threading.local):
    """Of each thread: its number. A thread begins with the first card."""

    number = 0

    @contextlib.contextmanager
    def set(self, device: torch.device | int) -> Iterator[None]:
        before = self.number
        self.number = device if isinstance(device, int) else int(device.index)
        try:
            yield
        finally:
            self.number = before


class CurrentStream:
    """Of each thread, on the card."""

    def __init__(self, card: PretendedCard) -> None:
        self._card = card
        self._local = threading.local()

    def get(self, device: object = None) -> Stream:
        """torch.cuda.current_stream()."""
        self._card.check_own(device, "a stream")
        return self.of_card()

    def of_card(self) -> Stream:
        """What torch's own operations use, which go to their tensors' card."""
        return getattr(self._local, "stream", self._card.default_stream)

    @contextlib.contextmanager
    def set(self, stream: Stream) -> Iterator[None]:
        before = self.of_card()
        self._local.stream = stream
        try:
            with self._card.current_device.set(stream.device):
                yield
        finally:
            self._local.stream = before
