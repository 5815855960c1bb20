"""Frames: what machines send each other. A fixed header, fields in JSON, then arrays as they lie in memory.

    magic "PSTL" | kind, 1 byte | 3 bytes of zero | bytes of the JSON, uint32 | bytes of the arrays, uint64
    | CRC-32 of JSON and arrays, uint32 | CRC-32 of the header so far, uint32

Numbers are little-endian, in arrays as well. A reader knows beforehand how much it takes, and takes no more.
The header has a checksum of its own, since a wrong length would make the reader wait for bytes that never
come. TCP's checksum has 16 bits and ends at each machine that passes packets on: a damaged message gets past
it now and then. Nothing that is read is ever run.
"""

from __future__ import annotations

import enum
import json
import math
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

_HEADER, _CHECK = struct.Struct("<4sB3xIQI"), struct.Struct("<I")
_MAGIC, _OLD_MAGIC = b"PSTL", b"PSTK"
#: Bytes of the JSON of a frame, at most.
MAX_FIELDS_BYTES = 1 << 20
MAX_ARRAYS = 16
DTYPES = {"float32": torch.float32, "int64": torch.int64, "int32": torch.int32}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class WireError(ConnectionError):
    """The other side sent what no version of this program sends, or too much."""


class DamagedFrame(WireError):
    """A message is not as it was sent."""

    def __init__(self) -> None:
        super().__init__(
            "a message was damaged on its way: its checksum is wrong. Look at the network between the "
            "machines: cables, cards, and what passes packets on"
        )


class Kind(enum.IntEnum):
    """What a frame is about."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSED = 5
    BEAT = 6  # "I am alive", while there is nothing else to say
    ASK = 7  # from the leader, before steps
    ANSWER = 8
    STEP = 9  # from the leader
    RESULT = 10
    FAILED = 11  # instead of ANSWER or RESULT


class Frame(NamedTuple):
    """One message."""

    kind: Kind
    fields: dict[str, Any] = {}
    arrays: Mapping[str, Tensor] = {}

    def parts(self) -> list[bytes | memoryview]:
        """The frame's bytes, in order. Arrays are on the host."""
        arrays = {name: array.contiguous() for name, array in self.arrays.items()}
        forms = [[name, _NAMES[array.dtype], list(array.shape)] for name, array in arrays.items()]
        text = json.dumps([self.fields, forms], separators=(",", ":")).encode()
        bodies = [memoryview(array.numpy().data).cast("B") for array in arrays.values() if array.numel()]
        num_bytes, check = sum(body.nbytes for body in bodies), _checksum(text, *bodies)
        header = _HEADER.pack(_MAGIC, self.kind, len(text), num_bytes, check)
        return [header + _CHECK.pack(zlib.crc32(header)) + text, *bodies]


def _checksum(*parts: bytes | bytearray | memoryview) -> int:
    """CRC-32 of the parts in their order."""
    check = 0
    for part in parts:
        check = zlib.crc32(part, check)
    return check


def read_frame(
    read_into: Callable[[memoryview], None], limit: Callable[[], int], max_fields: int = MAX_FIELDS_BYTES
) -> Frame:
    """The next frame. read_into fills a buffer, or raises. Raises WireError for a frame with more than
    limit() bytes of arrays (it is asked when the frame has begun) or `max_fields` of JSON, and for anything
    that is no frame; DamagedFrame for a frame that is not as it was sent."""
    head = bytearray(_HEADER.size + _CHECK.size)
    read_into(memoryview(head))
    magic, code, num_text, num_body, check = _HEADER.unpack_from(head)
    if magic == _OLD_MAGIC:
        raise WireError("the other side is an older Penstock: install the same version on all machines")
    is_whole = _CHECK.unpack_from(head, _HEADER.size) == (zlib.crc32(head[: _HEADER.size]),)
    if magic == _MAGIC and not is_whole:
        raise DamagedFrame
    if magic != _MAGIC or code not in Kind._value2member_map_ or any(head[5:8]):
        raise WireError(
            "what came is no message of Penstock: it was damaged, or something else uses this port"
        )
    if num_text > max_fields or num_body > limit():
        raise WireError(f"a message of {num_text} + {num_body} bytes came, which is more than is taken here")
    text, body = bytearray(num_text), bytearray(num_body)
    read_into(memoryview(text))
    if num_body:
        read_into(memoryview(body))
    if _checksum(text, body) != check:
        raise DamagedFrame
    try:
        fields, forms = json.loads(text.decode())
    except (ValueError, TypeError, RecursionError) as error:  # TypeError: no two parts
        raise WireError("the fields of a message make no sense") from error
    if not isinstance(fields, dict):
        raise WireError("the fields of a message are no object")
    return Frame(Kind(code), fields, _arrays(forms, body))


def _arrays(forms: object, body: bytearray) -> dict[str, Tensor]:
    """Views of a frame's body. Raises WireError unless the forms fill it exactly."""
    if not isinstance(forms, list) or len(forms) > MAX_ARRAYS:
        raise WireError("the arrays of a message make no sense")
    found, start = dict[str, Tensor](), 0
    for form in forms:
        name, dtype, shape = _form(form)
        size = math.prod(shape)
        end = start + size * dtype.itemsize
        if end > len(body):
            raise WireError(f"a message ends in the middle of {name}")
        # Whoever makes a frame puts arrays of 8 bytes an element first, so all are aligned.
        flat = (
            torch.frombuffer(body, dtype=dtype, count=size, offset=start)
            if size
            else torch.empty(0, dtype=dtype)
        )
        found[name] = flat.view(shape)
        start = end
    if start != len(body):
        raise WireError(f"a message has {len(body) - start} bytes that belong to no array")
    return found


def _form(form: object) -> tuple[str, torch.dtype, tuple[int, ...]]:
    match form:
        case [str() as name, str() as dtype, list() as shape] if dtype in DTYPES and len(shape) <= 2:
            if all(type(size) is int and 0 <= size < 1 << 40 for size in shape):
                return name, DTYPES[dtype], tuple(shape)
    raise WireError("an array of a message makes no sense")
