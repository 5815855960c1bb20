"""The form of vLLM's KV events in msgpack: arrays, the first field of an event its name. Fields come in the
order of vLLM's classes:

    batch          [seconds since 1970, events, data_parallel_rank]
    BlockStored    [name, block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name,
                   extra_keys]
    BlockRemoved   [name, block_hashes, medium]
    AllBlocksCleared  [name]

`extra_keys` is there for texts with a cache_salt alone: vLLM's arrays end before it, and those who decode
arrays pass over what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from penstock.generation.blocks.block_log import (
    AllCleared,
    BlockEvent,
    BlocksRemoved,
    BlocksStored,
)

#: vLLM's word for the memory in which a model computes, whatever it is.
MEDIUM = "GPU"
#: This server is one engine, and not one of several that share the requests.
RANK = 0


def batch(events: Iterable[BlockEvent], time_s: float, block_size: int) -> list[Any]:
    """What is packed."""
    return [time_s, [_event(event, block_size) for event in events], RANK]


def block_hash(key: bytes) -> int:
    """The last 64 bits of a block's key, as vLLM shortens its own."""
    return int.from_bytes(key[-8:], "big")


def _event(event: BlockEvent, block_size: int) -> list[Any]:
    if isinstance(event, AllCleared):
        return ["AllBlocksCleared"]
    hashes = [block_hash(key) for key in event.keys]
    if isinstance(event, BlocksRemoved):
        return ["BlockRemoved", hashes, MEDIUM]
    return _stored(event, hashes, block_size)


def _stored(event: BlocksStored, hashes: list[int], block_size: int) -> list[Any]:
    name, number = event.adapter or (None, None)
    parent = block_hash(event.parent) if event.parent else None
    fields = ["BlockStored", hashes, parent, list(event.token_ids), block_size, number, MEDIUM, name]
    # The salt is in the hash of a text's first block, and through it in all others.
    salts = [[event.salt], *(None for _ in hashes[1:])] if event.salt and parent is None else None
    return [*fields, salts] if salts is not None else fields


def packer() -> Callable[[list[Any]], bytes]:
    """A function that packs. Raises ImportError where msgpack is not installed."""
    import msgpack

    pack: Callable[[list[Any]], bytes] = msgpack.Packer().pack
    return pack
