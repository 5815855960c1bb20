"""SpilledKVCache: a KV cache of which some blocks are in memory, in all layers, and the others elsewhere: in
a file, or beside a card in the host's memory.

"Memory" is the one in which layers are computed. The first `num_resident` blocks are there. The others have a
place elsewhere for each layer, and pass through one of two slots when a layer is computed: a slot has room
for all of one layer, so that each block has its own place in a slot, too. The blocks of a layer lie side by
side there and in the slots, so that blocks with neighbouring numbers are one read.

Keys and values of all layers are rows of the same tensors: first each layer's resident blocks, layer after
layer, and then the slots. Kernels get these tensors with the rows in place of the numbers of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor

from penstock.cache.kv_cache import kv_views
from penstock.cache.spill.spill_file import Place
from penstock.memory.pools import MemoryPool, whole_lines
from penstock.metrics import KVSpillStats
from penstock.spec import KVLayout, ModelSpec

#: One layer is computed while the blocks of the next one arrive.
NUM_SLOTS = 2


class SpillStore(Protocol):
    """Where blocks lie that are not in memory, between two sweeps. The places are on the host."""

    def begin_read(self, places: Iterable[Place]) -> list[Future[int]]:
        """Bring the bytes of each place into its tensor. A future for each read that goes on, which gives its
        bytes or raises CorruptFile."""

    def write(self, places: Sequence[Place]) -> None:
        """Returns when all is written. Raises CorruptFile."""

    def close(self) -> None: ...


class Turns(Protocol):
    """Brings the blocks of each layer into a slot and back, in one sweep over all layers in their order."""

    def __enter__(self) -> Turns: ...

    def __exit__(self, *exc: object) -> None:
        """What was begun has ended: the slots are free."""

    def begin(self, layer: int) -> None:
        """The layer is computed now. Raises CorruptFile."""

    def end(self, layer: int) -> None:
        """The layer is computed, or launched."""

    def finish(self) -> None:
        """Wait until every change is where it belongs. Raises CorruptFile."""


#: Begins the turns of a sweep, from the blocks that each layer reads and those that every layer changes.
BeginTurns = Callable[["SpilledKVCache", Sequence[Sequence[range]], Sequence[range]], Turns]


class SpilledKVCache:
    """Blocks of `block_size` tokens. All layers have keys and values of one shape."""

    def __init__(
        self,
        spec: ModelSpec,
        num_resident: int,
        num_spilled: int,
        block_size: int,
        layout: KVLayout,
        pool: MemoryPool,
        store: SpillStore,
        turns: BeginTurns,
    ) -> None:
        """The store has num_spilled * block_bytes. Raises CapacityError if the pool is too small."""
        self.num_blocks = num_resident + num_spilled
        self.num_resident = num_resident
        self.block_size = block_size
        self.layout = layout
        self.num_layers = spec.num_layers
        self._store = store
        self._begin_turns = turns
        self.stats = KVSpillStats(num_spilled, 0)
        self._num_spilled = num_spilled
        num_rows = spec.num_layers * num_resident + NUM_SLOTS * num_spilled
        token_bytes = layout.bytes_per_token(*spec.kv_shape(0))
        buffer = pool.allocate("kv", whole_lines(num_rows * block_size * token_bytes))
        #: One tensor for each part of the layout: the blocks of all layers, and the slots.
        self.parts = kv_views(layout, buffer, num_rows, block_size, *spec.kv_shape(0))
        #: The same as uint8 [num_rows, bytes of a block].
        self._rows = [part.view(num_rows, -1).view(torch.uint8) for part in self.parts]
        self.stats.num_bytes = num_spilled * self.block_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers."""
        return self.num_layers * self.layer_block_bytes

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of a block in one layer."""
        return sum(row.shape[1] for row in self._rows)

    @property
    def part_bytes(self) -> int:
        """Bytes of the largest part of a block in one layer."""
        return max(row.shape[1] for row in self._rows)

    def turns(self, reads: Sequence[Sequence[range]], writes: Sequence[range]) -> Turns:
        """Begin a sweep. `reads`: for each layer, the spilled blocks that it needs. `writes`: the blocks that
        every layer changes."""
        return self._begin_turns(self, reads, writes)

    def shift(self, layer: int, is_spilled: bool) -> int:
        """What is added to the number of a block, of which a layer's blocks have one kind or the other, and
        gives the block's row in `parts`."""
        if not is_spilled:
            return layer * self.num_resident
        slot = layer % NUM_SLOTS
        return (self.num_layers - 1) * self.num_resident + slot * self._num_spilled

    def places(self, layer: int, blocks: Sequence[range]) -> Iterator[Place]:
        """Where a layer's spilled blocks lie in the store, and where in the layer's slot."""
        at = layer * self._num_spilled * self.layer_block_bytes
        shift = self.shift(layer, is_spilled=True)
        for row in self._rows:
            size = row.shape[1]
            for run in blocks:
                offset = at + (run.start - self.num_resident) * size
                yield offset, row[run.start + shift : run.stop + shift].flatten()
            at += self._num_spilled * size

    def parts_in_ram(self, layer: int) -> tuple[Tensor, ...] | None:
        """A layer's spilled blocks where they lie, of the shapes of `parts`; None: in a file."""
        buffer: Tensor | None = getattr(self._store, "buffer", None)
        if buffer is None:
            return None
        places = self.places(layer, [range(self.num_resident, self.num_blocks)])
        return tuple(
            buffer[offset : offset + slot.numel()].view(part.dtype).view(self._num_spilled, *part.shape[1:])
            for part, (offset, slot) in zip(self.parts, places, strict=True)
        )

    def copy_blocks(self, layer: int, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) of one layer, in this order. Spilled ones are in the
        layer's slot."""
        for source, destination in copies:
            for part in self.parts:
                part[self._row(layer, destination)].copy_(part[self._row(layer, source)])

    def _row(self, layer: int, block: int) -> int:
        return block + self.shift(layer, block >= self.num_resident)

    def read_block(self, block: int, out: Tensor) -> None:
        """Copy a block of all layers into the first block_bytes of `out` (uint8, on a page boundary), as
        KVCache.read_block() does. Raises CorruptFile."""
        if block < self.num_resident:
            for own, row in self._pieces(block, out):
                own.copy_(row)
            return
        finish(self._store.begin_read(self._extents(block, out)))

    def write_block(self, block: int, content: Tensor) -> None:
        """Copy what read_block() gave into a block of all layers. Raises CorruptFile."""
        if block < self.num_resident:
            for own, row in self._pieces(block, content):
                row.copy_(own)
            return
        self._store.write(list(self._extents(block, content)))

    def _pieces(self, block: int, content: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """A resident block's pieces of `content`, layer by layer and part by part, and their rows."""
        start = 0
        for layer in range(self.num_layers):
            for row in self._rows:
                end = start + row.shape[1]
                yield content[start:end], row[self._row(layer, block)]
                start = end

    def _extents(self, block: int, content: Tensor) -> Iterator[Place]:
        """The pieces of a spilled block's bytes, and their places in the store."""
        start = 0
        for layer in range(self.num_layers):
            for offset, row in self.places(layer, [range(block, block + 1)]):
                yield offset, content[start : start + len(row)]
                start += len(row)

    def close(self) -> None:
        """Give the store's room back."""
        self._store.close()


def finish(reads: Sequence[Future[int]]) -> None:
    """Wait for all, and raise the first error."""
    errors = [error for read in reads if (error := read.exception()) is not None]
    if errors:
        raise errors[0]
