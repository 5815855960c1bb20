"""KVCache: block-structured K and V of all layers, carved from a pool. Knows no sequence: who owns which
block is the block manager's business."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.memory.pools import MemoryPool
from penstock.spec import ModelSpec


class KVCache:
    """`num_blocks` blocks of `block_size` tokens in each layer."""

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        pool: MemoryPool,
    ) -> None:
        """Allocates everything at once. Raises CapacityError if the pool is too small."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        heads, head_dim = spec.num_kv_heads, spec.head_dim
        half = num_blocks * heads * head_dim * block_size * dtype.itemsize
        self._layers: list[tuple[Tensor, Tensor]] = []
        for index in range(spec.num_layers):
            buffer = pool.allocate(f"kv.{index}", 2 * half)
            k = buffer[:half].view(dtype).view(num_blocks, heads, head_dim, block_size)
            v = buffer[half:].view(dtype).view(num_blocks, heads, block_size, head_dim)
            self._layers.append((k, v))

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K [num_blocks, num_kv_heads, head_dim, block_size] and V [num_blocks, num_kv_heads,
        block_size, head_dim] of one layer."""
        return self._layers[index]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in all layers, one after the other, so that it takes no
        memory. Queued, on a GPU."""
        for k, v in self._layers:
            for source, destination in copies:
                k[destination].copy_(k[source])
                v[destination].copy_(v[source])
