"""A GGUF file as it is (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): its metadata, where each
tensor lies, and the other files of a model in parts. Only headers are read."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from penstock.errors import CheckpointNotFound, CorruptFile

Metadata = dict[str, Any]

VERSIONS = (2, 3)
#: A longer header is refused: vocabularies of 256,000 tokens take 10 to 30 MB.
MAX_HEADER_BYTES = 256 << 20
#: The name of a part of a large model, such as name-00002-of-00003.gguf.
GGUF_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
#: Metadata types of fixed size, as struct spells them.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
_TOO_LONG = f"the file ends within its header, or the header has more than {MAX_HEADER_BYTES >> 20} MiB"


@dataclass(frozen=True)
class Part:
    """One file of a model."""

    path: Path
    metadata: Metadata
    #: Name, shape (rows first), type and offset of each tensor.
    tensors: list[tuple[str, tuple[int, ...], int, int]]
    #: Bytes of the header.
    end: int


def is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()


def read_metadata(path: Path) -> Metadata:
    """The metadata of a model, of which `path` is the file or any of its parts. Raises what read_parts()
    raises."""
    return next(read_parts(path)).metadata


def read_parts(path: Path) -> Iterator[Part]:
    """The files of a model in order, of which `path` is one. Names tell the parts of a model; a part with
    another name is found if the names beside it leave exactly one place free. Raises CheckpointNotFound (a
    part is missing) and CorruptFile."""
    if match := GGUF_PART.fullmatch(path.name):
        paths = _named_parts(path.parent, match[1], int(match[3]))
    else:
        own = _read(path)
        number, count = _place(own)
        if count == 1:
            yield own
            return
        paths = _parts_beside(path, number, count)
    for part in paths:
        if not part.is_file():
            raise CheckpointNotFound(f"{path} is one of {len(paths)} files, and {part.name} is not there")
    for number, part in enumerate(paths, 1):
        found = _read(part)
        if found.metadata.keys() >= {"split.no", "split.count"} and _place(found) != (number, len(paths)):
            raise CorruptFile(
                f"{part} is named as part {number} of {len(paths)}, and is part {_place(found)[0]} of "
                f"{_place(found)[1]} by its header: give the parts the names that they were published with"
            )
        yield found


def _named_parts(folder: Path, name: str, count: int) -> list[Path]:
    return [folder / f"{name}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def _place(part: Part) -> tuple[int, int]:
    """The number of a part, from 1 on, and the number of all parts, as the header has them."""
    number, count = part.metadata.get("split.no", 0), part.metadata.get("split.count", 1)
    if not isinstance(number, int) or not isinstance(count, int) or not 0 <= number < max(count, 1):
        raise CorruptFile(f"{part.path} is part {number} of {count} by its header; download it again")
    return number + 1, max(count, 1)


def _parts_beside(path: Path, number: int, count: int) -> list[Path]:
    matches = [match for other in path.parent.glob("*.gguf") if (match := GGUF_PART.fullmatch(other.name))]
    found = []
    for name in sorted({match[1] for match in matches if int(match[3]) == count}):
        parts = _named_parts(path.parent, name, count)
        if not parts[number - 1].exists():
            parts[number - 1] = path
            found += [parts] if all(part.is_file() for part in parts) else []
    if len(found) == 1:
        return found[0]
    raise CheckpointNotFound(
        f"{path} is part {number} of {count} by its header, and its name does not say so: the other parts "
        f"are not found by it. Put all parts into one folder under the names that they were published with: "
        f"NAME-{1:05d}-of-{count:05d}.gguf and so on"
    )


def _read(path: Path) -> Part:
    """Raises CorruptFile."""
    try:
        with path.open("rb", buffering=1 << 20) as stream:
            metadata, tensors = _Reader(stream, min(path.stat().st_size, MAX_HEADER_BYTES)).header()
            return Part(path, metadata, tensors, stream.tell())
    except OSError as error:
        raise CorruptFile(f"{path} can't be read: {error.strerror}") from error
    except (ValueError, OverflowError) as error:
        raise CorruptFile(f"{path} has no readable GGUF header ({error}); download it again") from error


class _Reader:
    """Reads a header front to back. Raises ValueError for bytes that are no header."""

    def __init__(self, stream: BinaryIO, limit: int) -> None:
        """No byte from `limit` on is read."""
        self._stream = stream
        self._left = limit

    def header(self) -> tuple[Metadata, list[tuple[str, tuple[int, ...], int, int]]]:
        """Metadata, and for each tensor its name, shape (rows first), type and offset."""
        if self._bytes(4) != b"GGUF":
            raise ValueError("the file does not begin with GGUF")
        version = self._number("I")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version:#x}; known are {VERSIONS}, little-endian")
        num_tensors, num_values = self._number("Q"), self._number("Q")
        metadata: Metadata = {}
        for _ in range(num_values):
            key = self._string()
            metadata[key] = self._value(self._number("I"))
        return metadata, [self._tensor() for _ in range(num_tensors)]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dimensions = self._string(), self._number("I")
        if num_dimensions > 8:
            raise ValueError(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
        return name, shape, self._number("I"), self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise ValueError(f"a value of type {kind}")
        kind, count = self._number("I"), self._number("Q")
        if kind == STRING:
            return self._strings(count)
        if kind not in SCALARS:
            raise ValueError(f"an array of type {kind}")
        item = SCALARS[kind]
        return list(struct.unpack(f"<{count}{item}", self._bytes(count * struct.calcsize(f"<{item}"))))

    def _number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self._bytes(struct.calcsize(f"<{kind}")))[0]

    def _string(self) -> str:
        return self._bytes(self._number("Q")).decode("utf-8", errors="replace")

    def _strings(self, count: int) -> list[str]:
        """Vocabularies have 100,000 of them: nothing is called twice for one."""
        read, length, found = self._stream.read, struct.Struct("<Q"), list[str]()
        for _ in range(count):
            head = read(8) if self._left >= 8 else b""
            size = length.unpack(head)[0] if len(head) == 8 else MAX_HEADER_BYTES
            self._left -= 8 + size
            text = read(size) if self._left >= 0 else b""
            if len(text) != size:
                raise ValueError(_TOO_LONG)
            found.append(text.decode("utf-8", errors="replace"))
        return found

    def _bytes(self, count: int) -> bytes:
        self._left -= count
        found = self._stream.read(count) if self._left >= 0 else b""
        if len(found) != count:
            raise ValueError(_TOO_LONG)
        return found
