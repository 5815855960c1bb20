"""LayerStreamer: each layer's weights in order, wherever they wait, read ahead of time.

Resident layers have a buffer of their own and are read once. Streamed layers share a ring of staging slots:
a slot is filled while other layers are computed, lent to one layer of the sweep, and filled again. One rule
decides what is read next: of all layers that are not in memory, the one that the sweep will meet first and
that has a place to go to. So reading goes on from the last layer to the first of the next sweep, the first
sweep computes while resident layers still arrive, and with one slot nothing overlaps (the plain twin).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.errors import CorruptFile
from penstock.memory.direct_io import DirectReader, aligned_buffer, round_up
from penstock.memory.pools import MemoryPool
from penstock.spec import LayerLayout, TensorSpec
from penstock.weights.store import LayerWeights, WeightStore

#: Layers that are being read at the same time: the disk never waits for the next request, and what the
#: sweep needs next is not stuck behind more than this.
MAX_READS = 2


class LayerReader(Protocol):
    """Brings layers into memory, on threads of its own."""

    def submit(self, index: int, buffer: Tensor) -> Future[int]:
        """Fill `buffer` (page aligned, whole pages) with layer `index`; the result is the number of bytes
        that were read."""

    def close(self) -> None:
        """After all that was submitted is done."""


class StoreReader:
    """Layers that lie in a file as in their buffer are read directly, several reads in flight; the others go
    through the store, one after the other, to be quantized on the way in."""

    def __init__(self, store: WeightStore, num_threads: int = 1, direct: DirectReader | None = None) -> None:
        """`num_threads` are for quantizing."""
        self._store = store
        self._ranges = [store.contiguous_layer(index) for index in range(store.num_layers)]
        self._direct = (direct or DirectReader()) if any(self._ranges) else None
        self._thread = ThreadPoolExecutor(
            1, "penstock-reader", initializer=torch.set_num_threads, initargs=(num_threads,)
        )

    def is_direct(self, index: int) -> bool:
        """Whether layer `index` is read as it is, with nothing left to compute."""
        return self._ranges[index] is not None

    def submit(self, index: int, buffer: Tensor) -> Future[int]:
        found = self._ranges[index]
        if found is None or self._direct is None:
            return self._thread.submit(self._read, index, buffer)
        try:
            return self._direct.submit(*found, buffer)
        except CorruptFile as error:
            failed: Future[int] = Future()
            failed.set_exception(error)
            return failed

    def read_resident(self, tensors: tuple[TensorSpec, ...]) -> LayerWeights:
        """Embedding or head, into memory of its own. Raises CheckpointError kinds."""
        found = self._store.contiguous(tensors)
        if found is None or self._direct is None:
            return self._store.read_resident(tensors)
        buffer = aligned_buffer(found.num_bytes)
        self._direct.submit(*found, buffer).result()
        return LayerWeights.views(LayerLayout.of(tensors), buffer)

    def close(self) -> None:
        self._thread.shutdown()
        if self._direct is not None:
            self._direct.close()

    def _read(self, index: int, buffer: Tensor) -> int:
        before = self._store.bytes_read
        self._store.read_layer(index, buffer[: self._store.layouts[index].num_bytes])
        return self._store.bytes_read - before


@dataclass
class _Arrival:
    """A layer in memory, or on its way there."""

    buffer: Tensor
    read: Future[int]
    #: The staging slot; None for resident layers.
    slot: int | None


class LayerStreamer:
    """Yields every layer of a store, once per sweep. One sweep at a time."""

    def __init__(
        self,
        store: WeightStore,
        reader: LayerReader,
        resident: frozenset[int],
        num_slots: int,
    ) -> None:
        """Begins to read."""
        sizes = [round_up(layout.num_bytes) for layout in store.layouts]
        self._store = store
        self._reader = reader
        self._resident = resident
        streamed = [size for index, size in enumerate(sizes) if index not in resident]
        num_slots = min(num_slots, len(streamed))
        if streamed and num_slots < 1:
            raise ValueError("streamed layers need a staging slot")
        slot_bytes = max(streamed, default=0)
        self.pool = MemoryPool("weights", sum(sizes[i] for i in resident) + num_slots * slot_bytes)
        self._slots = [self.pool.allocate(f"staging.{i}", slot_bytes) for i in range(num_slots)]
        self._buffers = {i: self.pool.allocate(f"layer.{i}", sizes[i]) for i in sorted(resident)}
        self._lock = threading.Lock()
        self._arrivals: dict[int, _Arrival] = {}
        self._free_slots = list(range(num_slots))
        self._position = 0
        self._num_reads = 0
        self._num_sweeps = 0
        self._is_closed = False
        #: Seconds in which sweeps waited for layers, and bytes of layers that were read for them.
        self.stall_s = 0.0
        self.streamed_bytes = 0
        self._pump()

    @property
    def store(self) -> WeightStore:
        return self._store

    @property
    def num_resident(self) -> int:
        return len(self._resident)

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def wait_until_loaded(self, report_progress: Callable[[int, int], None] | None = None) -> None:
        """Until every resident layer is in memory, without a sweep. `report_progress(loaded, total)` is
        called after each, and may raise to give up. Raises what reading raised."""
        for num_loaded, index in enumerate(sorted(self._resident), 1):
            self._arrive(index)
            if report_progress is not None:
                report_progress(num_loaded, self.num_resident)
        with self._lock:
            self._position = 0
        self._pump()

    def layers(self) -> Generator[LayerWeights, None, None]:
        """One sweep. A layer's weights are valid until the next one is asked for.

        Raises what reading raised (CorruptFile); the layer is read anew in the next sweep.
        """
        self._num_sweeps += 1
        this_sweep = self._num_sweeps
        for index in range(self._store.num_layers):
            arrival = self._arrive(index)
            try:
                yield LayerWeights.views(self._store.layouts[index], arrival.buffer)
            finally:
                # A sweep that was given up and is closed late takes nothing from the one that goes on.
                if this_sweep == self._num_sweeps:
                    self._release(index, arrival)

    def close(self) -> None:
        """Ask for nothing more, and wait for what is being read into our buffers."""
        with self._lock:
            self._is_closed = True
            reads = [arrival.read for arrival in self._arrivals.values()]
        for read in reads:
            read.exception()
        self._reader.close()

    def _arrive(self, index: int) -> _Arrival:
        """Wait for a layer."""
        with self._lock:
            self._position = index
            has_place = index in self._arrivals or index in self._resident or bool(self._free_slots)
        if not has_place:
            self._give_up_the_last()
        self._pump()
        with self._lock:
            arrival = self._arrivals[index]
        started = time.perf_counter()
        try:
            num_bytes = arrival.read.result()
        except BaseException:
            self._forget(index)
            raise
        self.stall_s += time.perf_counter() - started
        if arrival.slot is not None:
            self.streamed_bytes += num_bytes
        return arrival

    def _give_up_the_last(self) -> None:
        """All slots hold layers of a sweep that ended early: drop the one that is needed last."""
        with self._lock:
            staged = [index for index, arrival in self._arrivals.items() if arrival.slot is not None]
            last = max(staged, key=lambda index: (index - self._position) % self._store.num_layers)
            arrival = self._arrivals[last]
        arrival.read.exception()  # its slot is free only when nobody writes into it any more
        self._forget(last)

    def _release(self, index: int, arrival: _Arrival) -> None:
        if arrival.slot is not None:
            self._forget(index)
        with self._lock:
            self._position = (index + 1) % self._store.num_layers
        self._pump()

    def _forget(self, index: int) -> None:
        with self._lock:
            arrival = self._arrivals.pop(index)
            if arrival.slot is not None:
                self._free_slots.append(arrival.slot)

    def _pump(self) -> None:
        """Ask for layers as long as there is one to ask for."""
        while True:
            with self._lock:
                index = self._next_to_read()
                if index is None:
                    return
                slot = None if index in self._resident else self._free_slots.pop()
                buffer = self._buffers[index] if slot is None else self._slots[slot]
                try:
                    read = self._reader.submit(index, buffer)
                except RuntimeError:  # the interpreter goes down, and takes no new work
                    self._is_closed = True
                    return
                self._arrivals[index] = _Arrival(buffer, read, slot)
                self._num_reads += 1
            read.add_done_callback(self._on_read)

    def _next_to_read(self) -> int | None:
        num_layers = self._store.num_layers
        for ahead in range(0 if self._is_closed else num_layers):
            if ahead and self._num_reads >= MAX_READS:
                break  # what the sweep waits for now is asked for in any case
            index = (self._position + ahead) % num_layers
            if index not in self._arrivals and (index in self._resident or self._free_slots):
                return index
        return None

    def _on_read(self, _: Future[int]) -> None:
        """On a reading thread."""
        with self._lock:
            self._num_reads -= 1
        self._pump()
