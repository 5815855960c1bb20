"""Record: what a shelf's index says of one block, as bytes. No file here.

The index of a shelf is one record for each extent of the shelf's file of blocks, at the extent's own place,
and before them a head. A record has a checksum of itself, which covers its place too, and the checksum of the
block's bytes. So a record that was written in part, or that lies at another's place, is no record, and bytes
that are not the record's are found when they are read."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

#: The version of all files of a shelf. A shelf of another version is emptied.
FORMAT_VERSION = 1
#: A page has a whole number of records.
RECORD_BYTES = 128
KEY_BYTES = 32
#: The key of no block: the parent of a block with which a text begins.
NO_KEY = bytes(KEY_BYTES)
#: The keys of pieces of recurrent states begin so (state_pieces.py); those of blocks are hashes.
STATE_TAG = b"state\0\0\0"

_MAGIC, _HEAD_MAGIC = b"PKVR", b"PKVH"
_RECORD = struct.Struct(f"<4sI{KEY_BYTES}s{KEY_BYTES}sQd")
_HEAD = struct.Struct(f"<4sIQ{KEY_BYTES}s")
_CHECKSUM = struct.Struct("<I")
#: A record with its checksum and the zeros after it.
_SEALED = struct.Struct(f"{_RECORD.format}I{RECORD_BYTES - _RECORD.size - 4}x")


class Record(NamedTuple):
    """One block on disk."""

    key: bytes
    #: The key of the block before it in the text.
    parent: bytes
    #: block_checksum() of its bytes.
    checksum: int
    #: In seconds since 1970.
    last_used_s: float
    #: The number of its extent.
    slot: int

    @property
    def is_state(self) -> bool:
        """It is a piece of a recurrent state."""
        return self.key.startswith(STATE_TAG)


def block_checksum(key: bytes, content: bytes | memoryview) -> int:
    """64 bits: CRC-32 of a block's key and bytes, and Adler-32 of its bytes. Any flipped byte changes them.
    (A cryptographic hash would take longer than the reading on processors without instructions for it.)"""
    return zlib.crc32(content, zlib.crc32(key)) << 32 | zlib.adler32(content)


def pack(record: Record) -> bytes:
    """RECORD_BYTES bytes, for the place of the record's slot."""
    return _sealed(_RECORD.pack(_MAGIC, FORMAT_VERSION, *record[:-1]), record.slot)


def unpack_all(index: bytes) -> Iterator[Record]:
    """All records that pack() made for their places, after the head of an index."""
    records = memoryview(index)[RECORD_BYTES : len(index) // RECORD_BYTES * RECORD_BYTES]
    crc32, body_bytes = zlib.crc32, _RECORD.size  # an index may have 100,000 records
    for slot, fields in enumerate(_SEALED.iter_unpack(records)):
        magic, version, key, parent, content_checksum, last_used_s, checksum = fields
        start = slot * RECORD_BYTES
        if magic != _MAGIC or version != FORMAT_VERSION:
            continue
        if crc32(records[start : start + body_bytes], slot) == checksum:
            yield Record(key, parent, content_checksum, last_used_s, slot)


def pack_head(extent_bytes: int, fingerprint: bytes) -> bytes:
    """The head of an index: RECORD_BYTES bytes. `fingerprint`: 32 bytes, of everything that all blocks have
    in common."""
    return _sealed(_HEAD.pack(_HEAD_MAGIC, FORMAT_VERSION, extent_bytes, fingerprint), 0)


def extent_bytes_of(index: bytes) -> int | None:
    """The bytes of an extent by an index's head; None if this is no index of this version."""
    head = index[:RECORD_BYTES]
    body = head[: _HEAD.size]
    if head[:4] != _HEAD_MAGIC or head != _sealed(body, 0):
        return None
    _, version, extent_bytes, _ = _HEAD.unpack(body)
    return int(extent_bytes) if version == FORMAT_VERSION else None


def _sealed(body: bytes, slot: int) -> bytes:
    """The body with its checksum after it, and zeros up to RECORD_BYTES."""
    return (body + _CHECKSUM.pack(zlib.crc32(body, slot))).ljust(RECORD_BYTES, b"\0")
