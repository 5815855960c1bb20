"""LayerStreamer: each layer's weights in order, wherever they wait. This one is sequential: a streamed
layer is read when its turn comes, into the one staging slot, and overwritten by the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from penstock.memory.plan import resident_layers
from penstock.memory.pools import MemoryPool
from penstock.weights.store import LayerWeights, WeightStore


class LayerStreamer:
    """Yields every layer of a store, once per sweep."""

    def __init__(
        self,
        store: WeightStore,
        num_resident: int | None = None,
        report_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Reads the resident layers now. `num_resident` None: all. `report_progress(loaded, total)` is
        called after each."""
        self._store = store
        resident = resident_layers(store.num_layers, num_resident)
        sizes = [layout.num_bytes for layout in store.layouts]
        streamed = set(range(store.num_layers)) - resident
        slot_bytes = max((sizes[index] for index in streamed), default=0)
        self.pool = MemoryPool("weights", sum(sizes[index] for index in resident) + slot_bytes)
        self._slot = self.pool.allocate("staging", slot_bytes)
        self._resident: dict[int, LayerWeights] = {}
        #: Seconds in which sweeps waited for layers, and bytes of layers they had read.
        self.stall_s = 0.0
        self.streamed_bytes = 0
        for index in sorted(resident):
            buffer = self.pool.allocate(f"layer.{index}", sizes[index])
            self._resident[index] = store.read_layer(index, buffer)
            if report_progress is not None:
                report_progress(len(self._resident), len(resident))

    @property
    def num_resident(self) -> int:
        return len(self._resident)

    def layers(self) -> Iterator[LayerWeights]:
        """One sweep. A layer's weights are valid until the next one is asked for."""
        for index in range(self._store.num_layers):
            weights = self._resident.get(index)
            yield self._read(index) if weights is None else weights

    def _read(self, index: int) -> LayerWeights:
        started = time.perf_counter()
        before = self._store.bytes_read
        buffer = self._slot[: self._store.layouts[index].num_bytes]
        weights = self._store.read_layer(index, buffer)
        self.stall_s += time.perf_counter() - started
        self.streamed_bytes += self._store.bytes_read - before
        return weights
