"""LayerTurns: spilled blocks come into a slot ahead of their layer, and go back to the file after it.

One thread does both, in this order: what layer n has changed is written, and then the blocks of layer n + 2
are read into the same slot, while layer n + 1 is computed. So no read overtakes a write, and a slot never has
blocks of two layers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

from penstock.cache.spill.spill_file import SpillFile
from penstock.cache.spill.spilled_cache import NUM_SLOTS, SpilledKVCache, finish


class LayerTurns:
    """One sweep over all layers in their order. Close it, or use `with`."""

    def __init__(
        self,
        file: SpillFile,
        cache: SpilledKVCache,
        reads: Sequence[Sequence[range]],
        writes: Sequence[range],
    ) -> None:
        """Begins to read. `reads`: for each layer, the spilled blocks that it needs. `writes`: the blocks
        that every layer changes."""
        self._file = file
        self._cache = cache
        self._reads = reads
        self._writes = writes
        self._is_ended = False
        self._arrivals = [
            file.thread.submit(self._read, layer) for layer in range(min(NUM_SLOTS, len(reads)))
        ]
        self._last: Future[None] = self._arrivals[-1]

    def __enter__(self) -> LayerTurns:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def begin(self, layer: int) -> None:
        """Wait for the layer's blocks. Raises CorruptFile, also for what earlier layers could not write."""
        began_s = time.perf_counter()
        self._arrivals[layer].result()
        self._cache.stats.wait_s += time.perf_counter() - began_s

    def end(self, layer: int) -> None:
        """The layer is computed."""
        self._last = self._file.thread.submit(self._turn, layer)
        self._arrivals.append(self._last)

    def finish(self) -> None:
        """Wait until everything is in the file. Raises CorruptFile."""
        began_s = time.perf_counter()
        for turn in self._arrivals[-NUM_SLOTS:]:
            turn.result()
        self._cache.stats.wait_s += time.perf_counter() - began_s

    def close(self) -> None:
        """Nothing more is read, and the slots are free when this returns."""
        self._is_ended = True
        self._last.exception()

    def _turn(self, layer: int) -> None:
        cache = self._cache
        self._file.write(list(cache.places(layer, self._writes)))
        cache.stats.written_bytes += sum(map(len, self._writes)) * cache.layer_block_bytes
        if layer + NUM_SLOTS < len(self._reads):
            self._read(layer + NUM_SLOTS)

    def _read(self, layer: int) -> None:
        if self._is_ended:
            return
        cache = self._cache
        finish(self._file.begin_read(cache.places(layer, self._reads[layer])))
        cache.stats.read_bytes += sum(map(len, self._reads[layer])) * cache.layer_block_bytes
