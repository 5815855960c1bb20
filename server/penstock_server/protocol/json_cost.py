"""JsonCost: what JSON would take in memory once it is read, found from its bytes before anything is made of
them.

`[[],[],...` and `{"a":1},...` take thirty times their size as Python's objects, and a single emoji makes a
long text four times as large. The bytes are looked at in chunks, so that looking takes little memory, and
numpy leaves the other threads their turns meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Bytes of the body that are looked at together.
CHUNK_BYTES = 1 << 18
#: What Python takes, at most and in bytes, for a number or other value in a list (28 and a pointer of 8), and
#: in addition for a text without its characters, for the name of a member, and for a list or object, which
#: may become an object of pydantic's as well (250 and 500).
VALUE_BYTES, TEXT_BYTES, NAME_BYTES, CONTAINER_BYTES = 40, 24, 64, 750
#: The longest name of a member that an error shows.
_MAX_NAME_BYTES = 64
_QUOTE, _COMMA, _COLON, _BRACKET_OPENS, _BRACKET_CLOSES = b'",:{}'


@dataclass(frozen=True)
class JsonCost:
    num_bytes: int
    #: How many lists and objects lie in each other.
    depth: int
    #: The member of the outermost object that was being looked at when one of the limits was passed.
    field: str | None = None

    @classmethod
    def of(cls, data: bytes | bytearray, most_bytes: int, most_depth: int) -> JsonCost:
        """The cost of JSON in UTF-8. Looking ends soon after one of the limits is passed. What is no JSON has
        some cost, too."""
        scan = _Scan(data)
        start = 0
        while start < len(data):
            start = scan.look(start)
            if scan.num_bytes > most_bytes or scan.depth > most_depth:
                return cls(scan.num_bytes, scan.depth, scan.field())
        return cls(scan.num_bytes, scan.depth)


class _Scan:
    """What was seen so far, from the beginning on."""

    def __init__(self, data: bytes | bytearray) -> None:
        self._data = data
        self.num_bytes = 0
        self.depth = 0
        self._level = 0
        self._is_in_text = False
        #: The text that began in an earlier chunk: its characters, and bytes of the widest of them.
        self._open = _TextSize()
        #: Where the colon after the last name of the outermost object stands; -1: there was none.
        self._last_name_end = -1

    def look(self, start: int) -> int:
        """Looks at the chunk that begins at `start`, and returns its end."""
        import numpy as np

        chunk = bytes(self._data[start : start + CHUNK_BYTES])
        if len(chunk) == CHUNK_BYTES and (chunk.endswith((b"\\", b"\\u"))):
            # A backslash and what it escapes are looked at together, and so is a `u` with its first digit: it
            # tells whether this is half of a pair.
            before_u = chunk[: len(chunk) - chunk.endswith(b"u")]
            num_escapes = len(before_u) - len(before_u.rstrip(b"\\"))
            if num_escapes % 2 and len(before_u) > 1:
                chunk = before_u[:-1]
        end = start + len(chunk)
        if b"\\" in chunk:  # afterwards every quote begins or ends a text
            chunk = chunk.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        if self._is_in_text and b'"' not in chunk:
            self._open.add(chunk)
            return end
        bytes_ = np.frombuffer(chunk, np.uint8)
        quotes = bytes_ == _QUOTE
        parity = np.cumsum(quotes, dtype=np.uint8) & 1
        outside = (parity == 1) if self._is_in_text else (parity == 0)
        self._add_texts(chunk, np.flatnonzero(quotes), outside)
        brackets = bytes_ | 32  # [ and ] become { and }
        opens = (brackets == _BRACKET_OPENS) & outside
        closes = (brackets == _BRACKET_CLOSES) & outside
        colons = (bytes_ == _COLON) & outside
        num_values = int(np.count_nonzero((bytes_ == _COMMA) & outside))
        num_containers, num_names = int(np.count_nonzero(opens)), int(np.count_nonzero(colons))
        self.num_bytes += VALUE_BYTES * num_values + CONTAINER_BYTES * num_containers + NAME_BYTES * num_names
        levels = self._level + np.cumsum(opens.view(np.int8) - closes.view(np.int8), dtype=np.int32)
        if len(levels):
            self.depth = max(self.depth, int(levels.max()))
            self._level = int(levels[-1])
        if num_names and len(names := np.flatnonzero(colons & (levels == 1))):
            self._last_name_end = start + int(names[-1])
        return end

    def _add_texts(self, chunk: bytes, quotes: Any, outside: Any) -> None:
        """Counts the chunk's part of texts. quotes: where they begin and end."""
        if not len(quotes):
            return
        first, last = int(quotes[0]), int(quotes[-1])
        if self._is_in_text:
            self._open.add(chunk[:first])
            self.num_bytes += self._open.num_bytes
        if len(quotes) > 1:
            between = _TextSize()
            between.add(chunk[first : last + 1])
            # Of these characters only those of texts are kept.
            num_outside = int(outside[first : last + 1].sum())
            self.num_bytes += max(0, between.num_bytes - num_outside)
        self.num_bytes += TEXT_BYTES * ((len(quotes) + (not self._is_in_text)) // 2)
        self._is_in_text ^= bool(len(quotes) % 2)
        self._open = _TextSize()
        if self._is_in_text:
            self._open.add(chunk[last + 1 :])

    def field(self) -> str | None:
        """The last name of the outermost object."""
        end = self._last_name_end
        if end < 0:
            return None
        before = bytes(self._data[max(0, end - 2 * _MAX_NAME_BYTES) : end]).rstrip()
        _, quote, name = before.removesuffix(b'"').rpartition(b'"')
        if not quote or len(name) > _MAX_NAME_BYTES:
            return None
        return name.decode(errors="replace")


class _TextSize:
    """What a text takes whose bytes come in parts."""

    def __init__(self) -> None:
        self._num_chars = 0
        self._width = 1
        self._is_ascii = True
        self._num_utf8 = 0

    @property
    def num_bytes(self) -> int:
        # Python also keeps the UTF-8 of a text that has others than ASCII's characters.
        return self._num_chars * self._width + (0 if self._is_ascii else self._num_utf8)

    def add(self, part: bytes) -> None:
        import numpy as np

        self._num_utf8 += len(part)
        self._num_chars += len(part)
        if not part.isascii():
            self._is_ascii = False
            bytes_ = np.frombuffer(part, np.uint8)
            self._num_chars -= int(np.count_nonzero((bytes_ & 0xC0) == 0x80))
            widest = int(bytes_.max())
            # A character up to U+00FF begins with a byte up to C3; one beyond U+FFFF begins with F0 or more.
            self._width = max(self._width, 4 if widest >= 0xF0 else 2 if widest > 0xC3 else 1)
        if b"\\u" in part:
            is_pair = b"\\ud" in part or b"\\uD" in part
            self._width = max(self._width, 4 if is_pair else 2)
            self._is_ascii = False
