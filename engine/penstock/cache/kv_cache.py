"""KVCache: K and V of all layers, in blocks that are cut out of a pool, and recurrent states in slots. The
cache knows no sequence: the block manager knows who owns which block, and which slot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from penstock.memory.pools import MemoryPool, whole_lines
from penstock.metrics import KVSpillStats
from penstock.spec import KVLayout, ModelSpec
from penstock.state_layout import NO_ROOM, GuessRoom, StateLayout


class BlockCache(Protocol):
    """Blocks, each in all layers, that can be copied out and in."""

    @property
    def block_bytes(self) -> int: ...

    def read_block(self, block: int, out: Tensor) -> None: ...

    def write_block(self, block: int, content: Tensor) -> None: ...


class KVCache:
    """`num_blocks` blocks of `block_size` tokens in each layer."""

    #: Of blocks that are elsewhere while their sequence runs, as SpilledKVCache has them: here are none.
    stats: KVSpillStats | None = None

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        layout: KVLayout,
        pool: MemoryPool,
        num_states: int = 0,
        guesses: GuessRoom = NO_ROOM,
    ) -> None:
        """Allocates all blocks at once, slots for the recurrent states of `num_states` sequences, and room
        for guesses in models with such states. Raises CapacityError if the pool is too small."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layout = layout
        #: Of each layer one tensor for each part of the layout. A layer without keys and values of its own
        #: has no blocks.
        self.layers = _layer_views(
            layout,
            pool,
            spec,
            [0 if index in spec.layers_without_kv else num_blocks for index in range(spec.num_layers)],
            block_size,
        )
        #: Of each layer one tensor for each part of its state, float32 [num_states, *shape].
        self.states = [
            _state_views(spec.state_layout(index), num_states, pool, index)
            for index in range(spec.num_layers)
        ]
        #: Of each layer and each part of its state: what drafts brought to it, float32
        #: [guesses.num_rows, *shape] for each shape of StatePart.fed.
        self.kept = [
            _kept_views(spec.state_layout(index), guesses.num_rows, pool, index)
            for index in range(spec.num_layers)
        ]
        #: Copies of a layer's states, from which paths of guesses go on: float32 [guesses.num_paths, *shape]
        #: for each part. All layers use the same memory, one after the other.
        self.ahead = _ahead_views(spec, guesses.num_paths, pool)

    @cached_property
    def _block_rows(self) -> list[Tensor]:
        """Of each part of each layer that has blocks: uint8 [num_blocks, bytes of a block]."""
        parts = [part for parts in self.layers for part in parts if len(part)]
        return [part.view(len(part), -1).view(torch.uint8) for part in parts]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers."""
        return sum(row.shape[1] for row in self._block_rows)

    def read_block(self, block: int, out: Tensor) -> None:
        """Copy a block of all layers, part by part, into the first block_bytes of `out` (uint8, on the host).
        On a GPU, read_block() waits until the bytes are there."""
        sizes = [row.shape[1] for row in self._block_rows]
        for row, own in zip(self._block_rows, torch.split(out[: self.block_bytes], sizes), strict=True):
            own.copy_(row[block])

    def write_block(self, block: int, content: Tensor) -> None:
        """Copy what read_block() gave into a block of all layers. On a GPU, write_block() waits until the
        bytes have left `content`."""
        sizes = [row.shape[1] for row in self._block_rows]
        for row, own in zip(self._block_rows, torch.split(content[: self.block_bytes], sizes), strict=True):
            row[block].copy_(own)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in all layers, in this order. They are copied one after the
        other, so that copying takes no memory. On a GPU the copies are queued."""
        if not copies:  # most steps have none
            return
        own = [part for parts in self.layers for part in parts if len(part)]  # some layers have no blocks
        for part in own:
            for source, destination in copies:
                part[destination].copy_(part[source])

    def close(self) -> None:
        """The pool has the memory, and gives it back."""

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy states (source slot, destination slot) in all layers, in this order."""
        for parts in self.states:
            for source, destination in copies:
                for part in parts:
                    part[destination].copy_(part[source])


def _layer_views(
    layout: KVLayout, pool: MemoryPool, spec: ModelSpec, num_blocks: Sequence[int], block_size: int
) -> list[tuple[Tensor, ...]]:
    """The keys and values of each layer, which has so many blocks: one tensor for each part of the layout.
    The layers follow each other without gaps, as the plan counts them. A block has a multiple of 16 tokens,
    so each layer begins at a multiple of 16 bytes, whatever the number of heads and their width are."""
    shapes = [spec.kv_shape(index) for index in range(spec.num_layers)]
    sizes = [
        number * block_size * layout.bytes_per_token(*shape)
        for number, shape in zip(num_blocks, shapes, strict=True)
    ]
    buffer = pool.allocate("kv", whole_lines(sum(sizes)))
    return [
        kv_views(layout, own, number, block_size, *shape)
        for own, number, shape in zip(
            torch.split(buffer[: sum(sizes)], sizes), num_blocks, shapes, strict=True
        )
    ]


def _state_views(layout: StateLayout, num_states: int, pool: MemoryPool, index: int) -> tuple[Tensor, ...]:
    """The states of a layer, one tensor for each part of the layout."""
    buffer = pool.allocate(f"state.{index}", num_states * layout.num_bytes)
    return tuple(_float_views(buffer, [(num_states, *part.shape) for part in layout.parts]))


def _kept_views(
    layout: StateLayout, num_rows: int, pool: MemoryPool, index: int
) -> tuple[tuple[Tensor, ...], ...]:
    """KVCache.kept of a layer."""
    shapes = [(num_rows, *shape) for part in layout.parts for shape in part.fed]
    buffer = pool.allocate(f"guesses.{index}", whole_lines(num_rows * layout.guess_bytes))
    views = iter(_float_views(buffer, shapes))
    return tuple(tuple(next(views) for _ in part.fed) for part in layout.parts)


def _ahead_views(spec: ModelSpec, num_paths: int, pool: MemoryPool) -> list[tuple[Tensor, ...]]:
    """KVCache.ahead of each layer."""
    layouts = [spec.state_layout(index) for index in range(spec.num_layers)]
    most = max((layout.num_bytes for layout in layouts), default=0)
    buffer = pool.allocate("guesses", num_paths * most)
    return [
        tuple(_float_views(buffer, [(num_paths, *part.shape) for part in layout.parts])) for layout in layouts
    ]


def _float_views(buffer: Tensor, shapes: Sequence[tuple[int, ...]]) -> Sequence[Tensor]:
    """Tensors of these shapes, one after the other in a buffer (uint8)."""
    floats, sizes = buffer.view(torch.float32), [math.prod(shape) for shape in shapes]
    views = torch.split(floats[: sum(sizes)], sizes) if sizes else ()
    return [view.view(shape) for view, shape in zip(views, shapes, strict=True)]


def kv_views(
    layout: KVLayout, buffer: Tensor, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[Tensor, ...]:
    """Views of a layer's buffer (uint8), one for each part of the layout, one after the other."""
    views, start = [], 0
    for part in layout.parts:
        shape = part.shape(num_blocks, block_size, num_kv_heads, head_dim)
        end = start + part.item_bytes * math.prod(shape)
        dtype: torch.dtype = getattr(torch, part.dtype)
        views.append(buffer[start:end].view(dtype).view(shape))
        start = end
    return tuple(views)
