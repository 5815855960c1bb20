"""The directory of a zip file whose entries are stored as they are, as torch.save writes them
(PKWARE's APPNOTE describes the format). An entry's bytes are then a range of the file."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import BinaryIO

from penstock.weights.checkpoints.torch_files.faults import Malformed

#: An entry takes some 70 bytes.
MAX_DIRECTORY_BYTES = 8 << 20
_END, _END64, _LOCATOR = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_ENTRY, _LOCAL = b"PK\x01\x02", b"PK\x03\x04"
_END_BYTES, _LOCATOR_BYTES, _ENTRY_BYTES, _LOCAL_BYTES = 22, 20, 46, 30
_MAX_COMMENT = 0xFFFF
_UNKNOWN = 0xFFFFFFFF
_IS_ENCRYPTED = 1


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """Where the bytes of an entry lie."""

    name: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Listed:
    """An entry as the directory lists it. `start` is the place of its local header."""

    name: bytes
    start: int
    num_bytes: int


def read_directory(stream: BinaryIO, size: int) -> dict[str, ZipEntry]:
    """The entries of a file of `size` bytes by their names. Raises Malformed: also for entries that are
    compressed, that lie over one another, or whose name comes twice."""
    start, num_bytes = _find_directory(stream, size)
    if num_bytes > MAX_DIRECTORY_BYTES or start + num_bytes > size:
        raise Malformed("its zip directory is too large, or lies outside of the file")
    stream.seek(start)
    raw = stream.read(num_bytes)
    entries: dict[str, ZipEntry] = {}
    end = 0
    for listed in sorted(_listed(raw), key=lambda each: each.start):
        entry = _locate(stream, listed, start)
        if entry.name in entries:
            raise Malformed(f"it has {entry.name!r} twice")
        if listed.start < end:
            raise Malformed(f"its entry {entry.name!r} lies over another entry")
        entries[entry.name], end = entry, entry.offset + entry.num_bytes
    return entries


def _find_directory(stream: BinaryIO, size: int) -> tuple[int, int]:
    """Place and size of the directory."""
    start = max(0, size - _END_BYTES - _MAX_COMMENT)
    stream.seek(start)
    tail = stream.read(size - start)
    at = tail.rfind(_END)
    if at < 0 or at + _END_BYTES > len(tail):
        raise Malformed("the end of its zip directory is missing: the file is cut")
    num_bytes, place = struct.unpack_from("<II", tail, at + 12)
    if at >= _LOCATOR_BYTES and tail[at - _LOCATOR_BYTES : at].startswith(_LOCATOR):
        (place64,) = struct.unpack_from("<Q", tail, at - _LOCATOR_BYTES + 8)
        stream.seek(min(place64, size))
        record = stream.read(56)
        if len(record) < 56 or not record.startswith(_END64):
            raise Malformed("the end of its zip directory makes no sense")
        num_bytes, place = struct.unpack_from("<QQ", record, 40)
    return place, num_bytes


def _listed(raw: bytes) -> list[_Listed]:
    found: list[_Listed] = []
    at = 0
    while at < len(raw):
        if raw[at : at + 4] != _ENTRY or at + _ENTRY_BYTES > len(raw):
            raise Malformed("its zip directory makes no sense")
        flags, method = struct.unpack_from("<HH", raw, at + 8)
        packed, num_bytes, name_length, extra_length, comment_length = struct.unpack_from(
            "<IIHHH", raw, at + 20
        )
        (start,) = struct.unpack_from("<I", raw, at + 42)
        name_end = at + _ENTRY_BYTES + name_length
        name, extra = raw[at + _ENTRY_BYTES : name_end], raw[name_end : name_end + extra_length]
        num_bytes, packed, start = _wide(extra, [num_bytes, packed, start])
        if method != 0 or flags & _IS_ENCRYPTED or packed != num_bytes:
            raise Malformed(
                f"its entry {_text(name)!r} is compressed or encrypted, which torch.save never does (a "
                "TorchScript program has such entries: save the model's state_dict() in its place)"
            )
        found.append(_Listed(name, start, num_bytes))
        at = name_end + extra_length + comment_length
    if at != len(raw):
        raise Malformed("its zip directory ends within an entry")
    return found


def _wide(extra: bytes, values: list[int]) -> list[int]:
    """The values, where those that don't fit into 32 bits are taken from the field for wide values."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        field = extra[at + 4 : at + 4 + length]
        if kind == 1:
            wide = list(struct.unpack(f"<{len(field) // 8}Q", field[: len(field) // 8 * 8]))
            missing = sum(value == _UNKNOWN for value in values)
            if len(wide) < missing:
                raise Malformed("its zip directory lacks sizes")
            return [wide.pop(0) if value == _UNKNOWN else value for value in values]
        at += 4 + length
    return values


def _locate(stream: BinaryIO, listed: _Listed, limit: int) -> ZipEntry:
    """Where an entry's bytes begin: after its local header, which repeats the name. Entries end before
    `limit`."""
    stream.seek(min(listed.start, limit))
    head = stream.read(_LOCAL_BYTES + len(listed.name))
    if len(head) < _LOCAL_BYTES + len(listed.name) or not head.startswith(_LOCAL):
        raise Malformed(f"its entry {_text(listed.name)!r} is not where the directory says")
    name_length, extra_length = struct.unpack_from("<HH", head, 26)
    offset = listed.start + _LOCAL_BYTES + name_length + extra_length
    if head[_LOCAL_BYTES:] != listed.name or name_length != len(listed.name):
        raise Malformed(f"its entry {_text(listed.name)!r} has another name in the directory")
    if offset + listed.num_bytes > limit:
        raise Malformed(f"its entry {_text(listed.name)!r} reaches beyond the entries")
    return ZipEntry(_text(listed.name), offset, listed.num_bytes)


def _text(name: bytes) -> str:
    return name.decode("utf-8", errors="replace")
