"""ThroughHost: what a store on disk takes for its cache where blocks of a card lie on the host, too."""

from __future__ import annotations

from torch import Tensor

from penstock.cache.host.host_shelf import HostShelf
from penstock.cache.kv_cache import BlockCache


class ThroughHost:
    """A store on disk writes blocks that the host has, by their slots, and reads into blocks of the card."""

    def __init__(self, host: HostShelf, card: BlockCache) -> None:
        self._host, self._card = host, card

    @property
    def block_bytes(self) -> int:
        return self._card.block_bytes

    def read_block(self, slot: int, out: Tensor) -> None:
        self._host.read_block(slot, out)

    def write_block(self, block: int, content: Tensor) -> None:
        self._card.write_block(block, content)
