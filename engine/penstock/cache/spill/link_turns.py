"""LinkTurns: blocks that lie in the host's memory come over the link into a slot ahead of their layer, and go
back after it.

All of it is queued, and the link keeps the order, slot by slot: a layer begins when its blocks have arrived;
what it has changed is copied back when it is computed; and then the blocks of layer n + 2 are copied into the
same slot, while layer n + 1 is computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from penstock.cache.spill.spill_memory import SpillMemory
from penstock.cache.spill.spilled_cache import NUM_SLOTS, SpilledKVCache


class LinkTurns:
    """One sweep over all layers in their order. Close it, or use `with`."""

    def __init__(
        self,
        memory: SpillMemory,
        cache: SpilledKVCache,
        reads: Sequence[Sequence[range]],
        writes: Sequence[range],
    ) -> None:
        """Begins to copy. `reads` and `writes` as LayerTurns has them."""
        self._memory = memory
        self._cache = cache
        self._reads = reads
        self._writes = writes
        for layer in range(min(NUM_SLOTS, len(reads))):
            self._read(layer)

    def __enter__(self) -> LinkTurns:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def begin(self, layer: int) -> None:
        """What is launched from now on waits for the layer's blocks."""
        self._acquire(layer)

    def end(self, layer: int) -> None:
        """The layer is launched."""
        for source, slot in self._regions(layer):
            self._memory.link.copy_back(slot, source, self._pieces(slot, self._writes))
        self._cache.stats.written_bytes += self._num_bytes(self._writes)
        if layer + NUM_SLOTS < len(self._reads):
            self._read(layer + NUM_SLOTS)

    def finish(self) -> None:
        """Nothing can fail here; close() waits."""

    def close(self) -> None:
        """Wait until the sweep's blocks are in the host's memory, where other threads may read them now, and
        until nothing is on its way into a slot for a layer that was given up."""
        for layer in range(min(NUM_SLOTS, len(self._reads))):
            self._acquire(layer)
        self._memory.link.synchronize()

    def _acquire(self, layer: int) -> None:
        for _, slot in self._regions(layer):
            self._memory.link.acquire(slot, 0.0)

    def _read(self, layer: int) -> None:
        """Also where nothing is read: the layer may write into its slot only when the slot's last layer has
        been copied back."""
        for source, slot in self._regions(layer):
            self._memory.link.copy(source, slot, self._pieces(slot, self._reads[layer]))
        self._cache.stats.read_bytes += self._num_bytes(self._reads[layer])

    def _regions(self, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All of the layer's blocks, part by part: where they lie, and the layer's slot."""
        cache = self._cache
        for offset, slot in cache.places(layer, [range(cache.num_resident, cache.num_blocks)]):
            yield self._memory.buffer[offset : offset + slot.numel()], slot

    def _pieces(self, slot: Tensor, blocks: Sequence[range]) -> list[tuple[int, int]]:
        """(offset, bytes) of the blocks in a part's region."""
        first = self._cache.num_resident
        size = slot.numel() // (self._cache.num_blocks - first)
        return [((run.start - first) * size, len(run) * size) for run in blocks]

    def _num_bytes(self, blocks: Sequence[range]) -> int:
        return sum(map(len, blocks)) * self._cache.layer_block_bytes
