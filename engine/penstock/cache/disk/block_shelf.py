"""BlockShelf: what a store needs of the place where its blocks lie, on disk (Shelf) or on the host
(HostShelf), and the traits of a tier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from torch import Tensor

from penstock.memory.direct_io import aligned_buffer


class BlockShelf(Protocol):
    """Blocks of one size by key. Any thread may look and read."""

    @property
    def folder(self) -> Path | str:
        """Where the blocks are, for people."""

    @property
    def is_writer(self) -> bool: ...

    @property
    def extent_bytes(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    def __contains__(self, key: object) -> bool: ...

    def __len__(self) -> int: ...

    def parent_of(self, key: bytes) -> bytes | None:
        """The key of the block before it in the text; None if there is no such block."""

    def read(self, key: bytes, buffer: memoryview) -> bool | None:
        """Fill the buffer. None: there is no such block any more; False: it is damaged."""

    def use(self, keys: list[bytes]) -> None: ...

    def add(self, key: bytes, parent: bytes, content: memoryview) -> None:
        """Raises OSError."""

    def close(self) -> None: ...


#: One kind of shelf.
Of = TypeVar("Of", bound=BlockShelf, contravariant=True)


class Room(Protocol[Of]):
    """How many bytes the shelves of a tier may have."""

    limit_bytes: int

    @property
    def others_bytes(self) -> int:
        """Bytes on other shelves."""

    def make_room(self, shelf: Of, num_bytes: int) -> bool:
        """Let blocks give way until `shelf` has room for so many bytes more."""


@dataclass(frozen=True)
class Tier:
    """What differs between tiers beside their shelves."""

    name: str
    #: One for all tiers: is notified when a block has come or gone.
    changed: threading.Condition
    #: What is read is kept there as well: the tier between this one and the KV cache.
    above: BlockShelf | None = None
    #: Bytes a second that are expected in either direction, until the first blocks were moved.
    usual_rate: float = 200e6
    #: Makes the memory of each thread, uint8 [num_bytes].
    make_buffer: Callable[[int], Tensor] = aligned_buffer
