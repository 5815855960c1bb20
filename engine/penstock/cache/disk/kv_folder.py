"""KVFolder: a folder with a shelf for each model, and one limit for the bytes of all their blocks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.cache.disk import record as records
from penstock.cache.disk.block_order import BlockOrder
from penstock.cache.disk.shelf import INDEX, Shelf, delete, read_about, read_extent_bytes
from penstock.errors import ConfigError

#: Of a model that is not served, this part of the limit at least gives way at a time.
_PART = 64


@dataclass(frozen=True)
class ShelfSummary:
    """What a shelf holds, by its index."""

    folder: Path
    about: Mapping[str, Any]
    num_blocks: int
    num_bytes: int
    #: The last uses of the block that gives way next and of the block that was used last, in seconds since
    #: 1970; 0 without blocks.
    oldest_s: float
    newest_s: float
    #: How many of the blocks are pieces of recurrent states.
    num_pieces: int = 0

    @property
    def num_states(self) -> int:
        """Recurrent states that the pieces make."""
        return self.num_pieces // int(self.about.get("state_blocks", 1))


def summaries(folder: Path) -> list[ShelfSummary]:
    """All shelves of a folder, by name. Only indexes are read."""
    found = (_summary(each) for each in sorted(folder.iterdir()) if each.is_dir()) if folder.is_dir() else ()
    return [each for each in found if each is not None]


def _summary(folder: Path) -> ShelfSummary | None:
    extent_bytes = read_extent_bytes(folder)
    if extent_bytes is None:
        return None
    try:
        order = BlockOrder(records.unpack_all((folder / INDEX).read_bytes()))
    except OSError:
        return None
    first = order.next_out
    return ShelfSummary(
        folder,
        read_about(folder),
        len(order),
        len(order) * extent_bytes,
        first.last_used_s if first else 0.0,
        max((record.last_used_s for record in order), default=0.0),
        sum(record.is_state for record in order),
    )


class KVFolder:
    """The blocks of all models that share a limit. What was used least recently gives way, of whatever model
    it is. Blocks of a model that another process writes stay, and count."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self.path = path
        self.limit_bytes = limit_bytes
        self._others: dict[Path, ShelfSummary] = {}
        #: Bytes that were written since the others were looked at, which may write at the same time.
        self._unseen_bytes = 0

    def open_shelf(self, name: str, about: Mapping[str, Any], extent_bytes: int) -> Shelf:
        """The shelf of this name. Blocks that are beyond the limit give way at once. Raises ConfigError."""
        if extent_bytes > self.limit_bytes:
            raise ConfigError(
                f"--kv-disk-size {self.limit_bytes} has no room for one block of {extent_bytes} bytes: "
                "give it some gigabytes"
            )
        shelf = Shelf.open(self.path / name, about, extent_bytes)
        self._others = {each.folder: each for each in summaries(self.path) if each.folder != shelf.folder}
        if shelf.is_writer:
            self.make_room(shelf, 0, gives_back=True)
        return shelf

    def make_room(self, shelf: Shelf, num_bytes: int, gives_back: bool = False) -> bool:
        """Let blocks give way until `shelf` has room for so many bytes more. False if there is no such room:
        the rest of the folder is other processes' work."""
        self._unseen_bytes += num_bytes
        if self._unseen_bytes >= self.limit_bytes // _PART:
            self._unseen_bytes = 0
            self._others = {each.folder: each for each in summaries(self.path) if each.folder != shelf.folder}
        while shelf.num_bytes + self.others_bytes + num_bytes > self.limit_bytes:
            if not (self._shrink_others(shelf, num_bytes) or shelf.evict(gives_back)):
                return False
        return True

    @property
    def others_bytes(self) -> int:
        """Bytes of the other models' blocks."""
        return sum(each.num_bytes for each in self._others.values())

    def _shrink_others(self, shelf: Shelf, num_bytes: int) -> bool:
        """Let blocks of the model whose blocks are the oldest give way, if they are older than the shelf's
        own."""
        own_s = shelf.oldest_s
        older = [each for each in self._others.values() if each.num_bytes]
        oldest = min(older, key=lambda each: each.oldest_s, default=None)
        if oldest is None or (own_s is not None and oldest.oldest_s >= own_s):
            return False
        del self._others[oldest.folder]
        part = max(num_bytes, self.limit_bytes // _PART)
        has_shrunk = shrink(oldest.folder, part, float("inf") if own_s is None else own_s)
        left = _summary(oldest.folder)
        if left is not None:
            self._others[oldest.folder] = left
        return has_shrunk or left is None


def shrink(folder: Path, num_bytes: int, before_s: float) -> bool:
    """Let blocks of a shelf give way, so many bytes at least if there are as many that were last used before
    this time. A shelf that is empty then is removed. False if nothing was removed, as where another process
    writes."""
    shelf = Shelf.reopen(folder)
    if shelf is None:
        return False
    with shelf:
        if not shelf.is_writer:
            return False
        bytes_before = shelf.num_bytes
        while bytes_before - shelf.num_bytes < num_bytes:
            oldest_s = shelf.oldest_s
            if oldest_s is None or oldest_s >= before_s:
                break
            shelf.evict(gives_back=True)
        if not len(shelf):
            delete(folder)
        return shelf.num_bytes < bytes_before or not len(shelf)


def usable(path: Path) -> None:
    """Make the folder, for this user alone, if it is missing. Raises ConfigError if it can't be written."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--kv-disk: {path} can't be made: {error.strerror}. Name another folder"
        ) from error
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"--kv-disk: {path} can't be written. Name another folder, or change its rights")
