"""BlockOffers: the blocks that wait to be written. Blocks that somebody waits for come first."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple


class Offer(NamedTuple):
    """A block of the cache that may be written."""

    key: bytes
    #: The key of the block before it in the text; b"" for the first one.
    parent: bytes
    #: False once the block was taken for other tokens.
    is_unchanged: Callable[[], bool]


class BlockWrite:
    """Blocks on their way to disk that somebody waits for."""

    def __init__(self, num_blocks: int, limit_s: float) -> None:
        self._left = num_blocks
        self._began_s = time.monotonic()
        self._until_s = self._began_s + limit_s
        self._ended_s = math.inf

    @property
    def is_done(self) -> bool:
        """All blocks were written or will never be, or this takes longer than it may."""
        return self._left == 0 or time.monotonic() >= self._until_s

    @property
    def elapsed_s(self) -> float:
        """Until all blocks were there, or until now."""
        return min(self._ended_s, time.monotonic()) - self._began_s

    def leave(self) -> None:
        """A block is written, or never will be. For one thread at a time."""
        self._left -= 1
        if not self._left:
            self._ended_s = time.monotonic()


class BlockOffers:
    """By block of the cache: a block that was offered again has other tokens. Any thread may ask; `changed`
    is notified when there is more to do."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._offers = OrderedDict[int, Offer]()
        self._urgent = OrderedDict[int, tuple[Offer, BlockWrite]]()

    def __len__(self) -> int:
        return len(self._offers) + len(self._urgent)

    @property
    def is_urgent(self) -> bool:
        """Somebody waits for a block."""
        return bool(self._urgent)

    def put(self, block: int, offer: Offer) -> None:
        with self.changed:
            self._offers[block] = offer
            self.changed.notify()

    def hurry(self, wanted: list[tuple[int, Offer]], limit_s: float) -> BlockWrite:
        """These come first, for `limit_s` seconds at most."""
        write = BlockWrite(len(wanted), limit_s)
        with self.changed:
            for block, offer in wanted:
                self._offers.pop(block, None)
                self._leave(block)
                self._urgent[block] = offer, write
            self.changed.notify()
        return write

    def first(self) -> tuple[int, Offer] | None:
        """The block that is written next, with its offer; None: there is none. For who holds `changed`."""
        if self._urgent:
            block, (offer, _) = next(iter(self._urgent.items()))
            return block, offer
        return next(iter(self._offers.items()), None)

    def remove(self, block: int, offer: Offer) -> bool:
        """The offer was taken or dropped. True if somebody waited for it."""
        with self.changed:
            if self._offers.get(block) is offer:
                del self._offers[block]
            is_urgent = block in self._urgent and self._urgent[block][0] is offer
            if is_urgent:
                self._leave(block)
        return is_urgent

    def _leave(self, block: int) -> None:
        if block in self._urgent:
            self._urgent.pop(block)[1].leave()
