"""PickleBytes: the bytes of a pickle, read front to back and no further than a limit; and the opcodes that
are followed by a value (pickletools.py of Python describes all opcodes)."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import BinaryIO

from penstock.weights.checkpoints.torch_files.faults import Malformed
from penstock.weights.checkpoints.torch_files.pickled_names import Inert

#: Bytes of a pickle. A tensor takes about 200.
MAX_PICKLE_BYTES = 64 << 20
#: Bytes of a whole number: states of random numbers have 16.
MAX_NUMBER_BYTES = 1024
MAX_LINE_BYTES = 4096


class PickleBytes:
    """Raises Malformed where the bytes end, or where a length is beyond the limit."""

    def __init__(self, stream: BinaryIO, limit: int = MAX_PICKLE_BYTES) -> None:
        self._stream = stream
        self._left = limit

    def take(self, count: int) -> bytes:
        """The next `count` bytes. A length in a pickle is a claim: no memory is taken for it before it is
        compared with the limit."""
        if count < 0 or count > self._left:
            raise Malformed("the pickle ends within a value, or is too long")
        self._left -= count
        found = self._stream.read(count)
        if len(found) != count:
            raise Malformed("the pickle ends within a value")
        return found

    def number(self, kind: str) -> int:
        """A number of a fixed size, as struct names its kind."""
        return int(struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0])

    def line(self) -> str:
        """The next line, without its end."""
        found = self._stream.readline(min(MAX_LINE_BYTES, self._left))
        self._left -= len(found)
        if not found.endswith(b"\n"):
            raise Malformed("a line in the pickle is too long")
        return found[:-1].decode("utf-8", errors="replace")

    def text(self, count: int) -> str:
        return self.take(count).decode("utf-8", errors="replace")

    def data(self, count: int) -> Inert:
        """Raw bytes, which only states of random numbers and the like have."""
        self.take(count)
        return Inert("bytes")

    def whole_number(self, count: int) -> int:
        if count > MAX_NUMBER_BYTES:
            raise Malformed(f"a number in the pickle has {count} bytes")
        return int.from_bytes(self.take(count), "little", signed=True)

    def real(self) -> float:
        return float(struct.unpack(">d", self.take(8))[0])


#: Opcode -> the value that it pushes.
LITERALS: dict[int, Callable[[PickleBytes], object]] = {
    ord("N"): lambda source: None,
    0x88: lambda source: True,
    0x89: lambda source: False,
    ord("K"): lambda source: source.number("B"),
    ord("M"): lambda source: source.number("H"),
    ord("J"): lambda source: source.number("i"),
    0x8A: lambda source: source.whole_number(source.number("B")),
    0x8B: lambda source: source.whole_number(source.number("i")),
    ord("G"): PickleBytes.real,
    0x8C: lambda source: source.text(source.number("B")),
    ord("X"): lambda source: source.text(source.number("I")),
    0x8D: lambda source: source.text(source.number("Q")),
    # A text of Python 2.
    ord("U"): lambda source: source.text(source.number("B")),
    ord("T"): lambda source: source.text(source.number("i")),
    ord("C"): lambda source: source.data(source.number("B")),
    ord("B"): lambda source: source.data(source.number("I")),
    0x8E: lambda source: source.data(source.number("Q")),
    0x96: lambda source: source.data(source.number("Q")),
    ord(")"): lambda source: (),
    ord("]"): lambda source: [],
    ord("}"): lambda source: {},
    0x8F: lambda source: Inert("set"),
}
