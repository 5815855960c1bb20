"""BMInf's own checkpoint.pt, which is no pickle: the tree of a model's layers, with each parameter's bytes in
place. Matrices are INT8 already, with a float16 scale per output channel.

    layer        = u32 number of parameters, u32 number of layers inside, the parameters, the layers inside
    parameter    = name, u8 number of axes, u32 for each axis, u32 number of bytes, u8 dtype, the bytes
    layer inside = name, layer
    name         = u32 length, UTF-8

Integers and scales are kept: our INT8 has float32 scales, which hold every float16. BMInf keeps embeddings
and its head in float16, and these are rounded to INT8 as those of any other checkpoint.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from penstock.errors import CorruptFile
from penstock.memory.ordinary_file import open_bytes
from penstock.weights.checkpoints.tensor_entry import DTYPES, TensorEntry
from penstock.weights.checkpoints.torch_files.faults import Malformed
from penstock.weights.checkpoints.torch_files.torch_file import is_torch_file

NAME = "checkpoint.pt"
DTYPE_CODES = {0: "I8", 1: "F16"}
#: The names of the root's layers in CPM-1 and in CPM-2 and EVA.
ROOTS = ({"token_embedding", "position_embedding", "layernorm", "layers"},
         {"enc_layers", "dec_layers", "ln_enc", "ln_dec", "input_embedding", "output_embedding",
          "position_bias_enc", "position_bias_dec"})  # fmt: skip
MAX_DEPTH, MAX_AXES, MAX_NAME_BYTES = 6, 4, 64
#: Parameters and layers together; CPM-2 has about 2,000.
MAX_PARTS = 50_000


def is_bminf(folder: Path) -> bool:
    """Whether a folder has BMInf's file. A pickle of that name is a file of torch.save."""
    file = folder / NAME
    if not file.is_file() or is_torch_file(file):
        return False
    with open_bytes(file) as stream:
        head = stream.read(8)
    return len(head) == 8 and struct.unpack("<II", head) in ((0, 4), (0, 8))


def read_tree(file: Path) -> dict[str, TensorEntry]:
    """The parameters by their names, which begin with the names of their layers. Raises CorruptFile."""
    try:
        with open_bytes(file) as stream:
            reader = _Reader(stream, file, file.stat().st_size)
            entries = {entry.name: entry for entry in reader.layer("", 0)}
            reader.check_end(entries)
            return entries
    except OSError as error:
        raise CorruptFile(f"{file} can't be read: {error.strerror}") from error
    except (Malformed, UnicodeDecodeError) as error:
        raise CorruptFile(
            f"{file} can't be read as a checkpoint of BMInf: {error}. Download the file again"
        ) from error


@dataclass
class _Reader:
    """Reads the tree front to back, and steps over the bytes of parameters."""

    stream: BinaryIO
    file: Path
    size: int
    num_parts: int = 0

    def layer(self, prefix: str, depth: int) -> Iterator[TensorEntry]:
        """The parameters of a layer and of all layers inside."""
        num_parameters, num_layers = self._numbers("II")
        self.num_parts += num_parameters + num_layers
        if self.num_parts > MAX_PARTS or depth > MAX_DEPTH:
            raise Malformed(f"it has more than {MAX_PARTS} layers and parameters, or layers too deep")
        for _ in range(num_parameters):
            yield self._parameter(prefix)
        for _ in range(num_layers):
            yield from self.layer(f"{prefix}{self._name()}.", depth + 1)

    def check_end(self, entries: dict[str, TensorEntry]) -> None:
        """Raises Malformed if there is something else after the tree, or another tree than a model's."""
        if self.stream.tell() != self.size:
            raise Malformed(f"its tree ends at {self.stream.tell()}, and the file at {self.size} bytes")
        roots = {name.partition(".")[0] for name in entries}
        if roots not in ROOTS:
            raise Malformed(f"its parts are {', '.join(sorted(roots))[:200]}, which no model of BMInf has")

    def _parameter(self, prefix: str) -> TensorEntry:
        name = prefix + self._name()
        (num_axes,) = self._numbers("B")
        if num_axes > MAX_AXES:
            raise Malformed(f"{name} has {num_axes} axes")
        shape = self._numbers("I" * num_axes)
        num_bytes, code = self._numbers("IB")
        dtype = DTYPE_CODES.get(code, "")
        if not dtype or math.prod(shape) * DTYPES[dtype].itemsize != num_bytes:
            raise Malformed(f"{name} of shape {list(shape)} has {num_bytes} bytes of dtype {code}")
        offset = self.stream.tell()
        if offset + num_bytes > self.size:
            raise Malformed(f"it ends within {name}: the file is cut")
        self.stream.seek(offset + num_bytes)
        return TensorEntry(name, self.file, offset, dtype, shape, num_bytes)

    def _name(self) -> str:
        (length,) = self._numbers("I")
        if not 0 < length <= MAX_NAME_BYTES:
            raise Malformed(f"a name of {length} bytes")
        return self._take(length).decode("utf-8")

    def _numbers(self, kinds: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{kinds}", self._take(struct.calcsize(f"<{kinds}")))

    def _take(self, count: int) -> bytes:
        found = self.stream.read(count)
        if len(found) != count:
            raise Malformed("it ends within its tree: the file is cut")
        return found
