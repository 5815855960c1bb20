"""Blocks of keys and values: where they lie, and copies of them."""

from __future__ import annotations

import pytest
import torch

from penstock.cache.kv_cache import KVCache
from penstock.errors import CapacityError
from penstock.memory.pools import MemoryPool
from penstock.spec import FLOAT16, ModelSpec


def cache(num_bytes: int = 1 << 20) -> KVCache:
    spec = ModelSpec(
        architecture="Tiny",
        norm_eps=1e-5,
        num_layers=3,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=8,
        vocab_size=10,
        max_position_embeddings=64,
    )
    return KVCache(spec, 5, 16, FLOAT16, MemoryPool("test", num_bytes))


def test_copies_are_made_in_order_in_all_layers_and_touch_nothing_else() -> None:
    made = cache()
    for index in range(3):
        for part in made.layers[index]:
            part.copy_(torch.randn(part.shape))
    before = [[part.clone() for part in made.layers[index]] for index in range(3)]
    made.copy_blocks([(0, 3), (4, 0)])
    for index in range(3):
        for now, then in zip(made.layers[index], before[index], strict=True):
            assert torch.equal(now[3], then[0]) and torch.equal(now[0], then[4])
            assert torch.equal(now[[1, 2, 4]], then[[1, 2, 4]])


def test_a_pool_that_is_too_small_refuses() -> None:
    with pytest.raises(CapacityError):
        cache(3 * 5 * 2 * 2 * 8 * 16 * 2 - 1)
