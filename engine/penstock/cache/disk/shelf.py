"""Shelf: the blocks of one model on disk, in one folder.

    index   a head, and one Record for each extent (record.py)
    blocks  extents of one size, each with one block: the keys and values of its tokens in all layers
    lock    who writes holds it
    model.json  what the blocks are of, for people

A block's bytes are written before its record, and a record is cleared before its extent is used for another
block. So a process that is killed at any point leaves records of whole blocks only. After a power failure the
disk may have a record without its bytes; the checksum of the bytes finds that when they are read.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.cache.disk import record as records
from penstock.cache.disk.block_order import BlockOrder, OrderedBlocks
from penstock.cache.disk.record import RECORD_BYTES, Record
from penstock.errors import ConfigError
from penstock.memory.pages import PAGE
from penstock.memory.reads.patient import patiently

logger = logging.getLogger(__name__)

#: Names of files in a shelf's folder.
INDEX, BLOCKS, LOCK, ABOUT = "index", "blocks", "lock", "model.json"
#: The time of a block's last use is written again if it was so many seconds ago.
USE_SECONDS = 60.0
#: Linux' numbers, which Python does not name.
_PUNCH_HOLE, _KEEP_SIZE = 2, 1

#: os.pwritev and os.preadv, or a test's own.
Pwritev = Callable[[int, list[memoryview], int], int]


class Shelf(OrderedBlocks):
    """An open shelf. Any thread may look and read; one thread writes. Close the shelf, or use `with`."""

    def __init__(
        self, folder: Path, extent_bytes: int, is_writer: bool, pwritev: Pwritev = os.pwritev
    ) -> None:
        """Shelf.open() finds out the arguments."""
        super().__init__()
        self.folder = folder
        self.extent_bytes = extent_bytes
        #: False: another process writes, and this one only reads.
        self.is_writer = is_writer
        self._pwritev = pwritev
        self._lock = threading.RLock()
        self._descriptors: list[int] = []
        self._free: list[int] = []
        self._num_slots = 0

    @classmethod
    def open(
        cls, folder: Path, about: Mapping[str, Any], extent_bytes: int, pwritev: Pwritev = os.pwritev
    ) -> Shelf:
        """The shelf for blocks of `extent_bytes` (whole pages) in this folder, which is made if it is
        missing. `about` is written to model.json; its "fingerprint" is 64 hexadecimal digits. Raises
        ConfigError if the folder can't be written or read."""
        assert extent_bytes % PAGE == 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = _locked(folder)
            shelf = cls(folder, extent_bytes, lock is not None, pwritev)
            shelf._descriptors += [] if lock is None else [lock]
            with contextlib.ExitStack() as on_failure:
                on_failure.callback(shelf.close)
                shelf._begin(about)
                on_failure.pop_all()
        except OSError as error:
            raise ConfigError(
                f"--kv-disk: {folder} can't be used: {error.strerror}. Name another folder"
            ) from error
        return shelf

    @classmethod
    def reopen(cls, folder: Path) -> Shelf | None:
        """A shelf as it lies there; None if there is none of this version."""
        extent_bytes = read_extent_bytes(folder)
        if extent_bytes is None:
            return None
        about = read_about(folder)
        return cls.open(folder, about, extent_bytes) if "fingerprint" in about else None

    def _begin(self, about: Mapping[str, Any]) -> None:
        flags = (os.O_RDWR | os.O_CREAT) if self.is_writer else os.O_RDONLY
        self._index = os.open(self.folder / INDEX, flags | os.O_CLOEXEC, 0o600)
        self._descriptors.append(self._index)
        self._blocks = _open_direct(self.folder / BLOCKS, flags)
        self._descriptors.append(self._blocks)
        head = records.pack_head(self.extent_bytes, bytes.fromhex(about["fingerprint"]))
        index = (self.folder / INDEX).read_bytes()
        if self.is_writer and index[:RECORD_BYTES] != head:
            os.ftruncate(self._index, 0)
            os.ftruncate(self._blocks, 0)
            os.pwrite(self._index, head, 0)
            index = head
        # A full disk has no room for another file: a shelf that has one opens, and so can be made smaller.
        if self.is_writer and read_about(self.folder) != json.loads(json.dumps(dict(about))):
            _write_about(self.folder, about)
        if index[:RECORD_BYTES] == head:
            self._order = BlockOrder(records.unpack_all(index))
        self._num_slots = max(0, len(index) // RECORD_BYTES - 1)
        used = {record.slot for record in self._order}
        self._free = sorted(set(range(self._num_slots)) - used, reverse=True)

    def __enter__(self) -> Shelf:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Another process may write from now on."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    @property
    def oldest_s(self) -> float | None:
        """The last use of the block that gives way next, in seconds since 1970."""
        with self._lock:
            record = self._order.next_out
        return None if record is None else record.last_used_s

    def all_keys(self) -> list[bytes]:
        """Of all blocks."""
        with self._lock:
            return [record.key for record in self._order]

    def parent_of(self, key: bytes) -> bytes | None:
        """The key of the block before it in the text, NO_KEY for the first; None if there is no such
        block."""
        with self._lock:
            record = self._order.find(key)
        return None if record is None else record.parent

    def read(self, key: bytes, buffer: memoryview) -> bool | None:
        """Fill the buffer (extent_bytes, on a page boundary) with a block's bytes. True if they are the bytes
        that were written; None if there is no such block any more; False if they were damaged or can't be
        read: then nobody finds the block any more."""
        with self._lock:
            record = self._order.find(key)
        if record is None:
            return None
        try:
            num_bytes = patiently(os.preadv, self._blocks, [buffer], record.slot * self.extent_bytes)
        except OSError as error:
            logger.warning("a block of %s can't be read: %s", self.folder, error.strerror)
            num_bytes = 0
        if num_bytes == self.extent_bytes and records.block_checksum(key, buffer) == record.checksum:
            return True
        with self._lock:
            now = self._order.find(key)
            if now is None or (now.slot, now.checksum) != (record.slot, record.checksum):
                return None  # the block gave way while it was read
            self.remove(key)
        return False

    def use(self, keys: list[bytes]) -> None:
        """These blocks, in the order of their text, were used now."""
        now_s = time.time()
        with self._lock:
            for key in reversed(keys):
                before = self._order.use(key, now_s)
                if before is not None and now_s - before.last_used_s > USE_SECONDS and self.is_writer:
                    with contextlib.suppress(OSError):  # the block gives way earlier than it should
                        self._write_record(before._replace(last_used_s=now_s))

    def add(self, key: bytes, parent: bytes, content: memoryview) -> None:
        """Keep a block of extent_bytes. Raises OSError if the disk is full or broken; nothing is kept
        then."""
        with self._lock:
            if key in self._order:
                return
            slot = self._free.pop() if self._free else self._num_slots
            self._num_slots = max(self._num_slots, slot + 1)
        try:
            record = Record(key, parent, records.block_checksum(key, content), time.time(), slot)
            self._write_all(self._blocks, content, slot * self.extent_bytes)
            with self._lock:
                self._write_record(record)
                self._order.add(record)
        except OSError:
            with self._lock:
                self._free.append(slot)
            raise

    def evict(self, gives_back: bool = False) -> bool:
        """Remove the block that gives way next; False if there is none. `gives_back`: the file system gets
        the room back. Otherwise the next block is written there."""
        with self._lock:
            record = self._order.next_out
            if record is not None:
                self.remove(record.key, gives_back)
        return record is not None

    def remove(self, key: bytes, gives_back: bool = False) -> None:
        """Nobody finds the block any more."""
        with self._lock:
            slot = self._order.remove(key).slot
            if not self.is_writer:
                return
            with contextlib.suppress(OSError):  # the record's checksum will not be that of other bytes
                self._write_all(self._index, memoryview(bytes(RECORD_BYTES)), (slot + 1) * RECORD_BYTES)
            if gives_back:
                _punch_hole(self._blocks, slot * self.extent_bytes, self.extent_bytes)
            self._free.append(slot)

    def _write_record(self, record: Record) -> None:
        """Raises OSError."""
        data = memoryview(records.pack(record))
        self._write_all(self._index, data, (record.slot + 1) * RECORD_BYTES)

    def _write_all(self, descriptor: int, data: memoryview, offset: int) -> None:
        """Raises OSError, also where only a part was written."""
        if patiently(self._pwritev, descriptor, [data], offset) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_extent_bytes(folder: Path) -> int | None:
    """The bytes of an extent of a shelf; None if there is no shelf of this version in the folder."""
    try:
        with (folder / INDEX).open("rb") as stream:
            return records.extent_bytes_of(stream.read(RECORD_BYTES))
    except OSError:
        return None


def read_about(folder: Path) -> dict[str, Any]:
    """model.json; {} if it is missing or broken."""
    try:
        about = json.loads((folder / ABOUT).read_text())
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def delete(folder: Path) -> None:
    """Remove a shelf. Only who holds its lock may do so."""
    shutil.rmtree(folder, ignore_errors=True)


def _write_about(folder: Path, about: Mapping[str, Any]) -> None:
    """As a whole or not at all."""
    part = folder / f"{ABOUT}.part"
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as stream:
            json.dump(dict(about), stream, indent=1)
        part.replace(folder / ABOUT)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _locked(folder: Path) -> int | None:
    """The descriptor of the shelf's lock; None if another process writes. Raises OSError."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open_direct(path: Path, flags: int) -> int:
    """A descriptor whose reads and writes bypass the page cache, where the file system can do so. Raises
    OSError."""
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0) | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _punch_hole(descriptor: int, offset: int, num_bytes: int) -> None:
    """Give room back to the file system. One that can't do it keeps the room, which the next blocks use."""
    fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
    if fallocate is not None:
        fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(num_bytes))
