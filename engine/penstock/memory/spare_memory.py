"""SpareMemory: host memory of models that left, kept for the models that come.

The system finds and clears each page of fresh memory before a read can fill it, and a virtual machine gets
the page from its host first: that may take longer than the disk takes to read as much. The pages of a model
that left are there already.
"""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.memory.direct_io import aligned_pages
from penstock.memory.pages import round_up


@dataclass(eq=False)
class _Area:
    purpose: str
    pages: mmap.mmap
    #: The first pages, which were lent before and not given back. The system has yet to find the others.
    kept_bytes: int = 0
    lent_bytes: int = 0

    @property
    def spare_bytes(self) -> int:
        return max(0, self.kept_bytes - self.lent_bytes)

    def look(self) -> None:
        """Notices that nobody looks at the pages any more: only then may they be resized."""
        try:
            self.pages.resize(len(self.pages))
        except BufferError:
            return
        self.lent_bytes = 0

    def give_back(self, num_bytes: int) -> None:
        self.kept_bytes -= num_bytes
        self.pages.madvise(mmap.MADV_DONTNEED, self.kept_bytes, num_bytes)


class Lent(NamedTuple):
    #: uint8, in whole pages, with any content.
    buffer: Tensor
    #: The pages of so many bytes, from the start on, are there.
    num_ready: int


class SpareMemory:
    """May be asked from any thread."""

    def __init__(self) -> None:
        self._areas: list[_Area] = []
        self._lock = threading.Lock()

    def take(self, purpose: str, num_bytes: int) -> Lent:
        """Memory at which nobody else looks. It is spare again when its tensors are gone, and stays for the
        same purpose: a small matrix does not get the memory of all layers. Where more is lent than is spare
        for the purpose, as much of the other spare memory is given back."""
        num_bytes = round_up(num_bytes)
        if num_bytes == 0:
            return Lent(torch.empty(0, dtype=torch.uint8), 0)
        with self._lock:
            for area in self._areas:
                area.look()
            area = self._find(purpose, num_bytes)
            num_ready, area.lent_bytes = min(area.kept_bytes, num_bytes), num_bytes
            self._give_back(self._num_bytes - (num_bytes - num_ready))
            area.kept_bytes = max(area.kept_bytes, num_bytes)
            # A tensor of the mmap itself would keep it alive, and not from being resized.
            view = memoryview(area.pages)[:num_bytes]
            return Lent(torch.frombuffer(view, dtype=torch.uint8), num_ready)

    def make_room(self, num_bytes: int) -> None:
        """Gives as much of what is spare back to the system: somebody takes so many bytes elsewhere."""
        with self._lock:
            for area in self._areas:
                area.look()
            self._give_back(self._num_bytes - num_bytes)

    def keep(self, num_bytes: int) -> None:
        """Gives what is spare back to the system, but for `num_bytes`."""
        with self._lock:
            for area in self._areas:
                area.look()
            self._give_back(max(0, num_bytes))

    @property
    def num_bytes(self) -> int:
        """Spare bytes."""
        with self._lock:
            for area in self._areas:
                area.look()
            return self._num_bytes

    # ------------------------------------------------------------ with the lock held

    @property
    def _num_bytes(self) -> int:
        return sum(area.spare_bytes for area in self._areas)

    def _find(self, purpose: str, num_bytes: int) -> _Area:
        """The smallest free area that is large enough, else the largest one, grown, else a new one."""
        free = [area for area in self._areas if area.purpose == purpose and not area.lent_bytes]
        free.sort(key=lambda area: len(area.pages))
        if not free:
            area = _Area(purpose, aligned_pages(num_bytes))
            self._areas.append(area)
            return area
        area = next((area for area in free if len(area.pages) >= num_bytes), free[-1])
        if len(area.pages) < num_bytes:
            area.pages.resize(num_bytes)
        return area

    def _give_back(self, left: int) -> None:
        """Until at most `left` bytes are spare."""
        for area in self._areas:
            excess = self._num_bytes - max(0, left)
            if excess > 0 and area.spare_bytes:
                area.give_back(min(round_up(excess), area.spare_bytes))
        self._areas = [area for area in self._areas if area.kept_bytes or area.lent_bytes]
