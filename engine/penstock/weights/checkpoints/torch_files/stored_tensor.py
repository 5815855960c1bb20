"""StoredTensor: which elements of which storage a tensor of a torch file is, as the file's pickle says. The
numbers come from the file, so each of them is checked here. Nothing here knows where a storage lies."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.weights.checkpoints.safetensors_header import OTHER_DTYPE_BYTES
from penstock.weights.checkpoints.tensor_entry import DTYPES
from penstock.weights.checkpoints.torch_files.faults import Malformed

#: torch's class of a storage -> the dtype's name in safetensors.
STORAGES = {
    "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16", "DoubleStorage": "F64",
    "CharStorage": "I8", "ByteStorage": "U8", "ShortStorage": "I16", "IntStorage": "I32",
    "LongStorage": "I64", "BoolStorage": "BOOL", "UntypedStorage": "U8",
}  # fmt: skip
#: torch's dtypes that have no storage class of their own.
NEWER_DTYPES = {
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "uint16": "U16", "uint32": "U32", "uint64": "U64",
}  # fmt: skip
#: More axes than any layer's tensors have.
MAX_AXES = 16
MAX_SIZE = 1 << 48
#: The elements between a view's first and last element may be this many times the view's own elements. A
#: reader of rows takes memory for all of them.
MAX_SPREAD = 8


def item_bytes(dtype: str) -> int:
    """Bytes of an element; `dtype` is a name that this file gives."""
    return DTYPES[dtype].itemsize if dtype in DTYPES else OTHER_DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class Storage:
    """A row of elements in the file, or a part of one."""

    key: str
    dtype: str
    num_items: int

    @property
    def num_bytes(self) -> int:
        return self.num_items * item_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A view of a storage. Offset and strides count elements of `dtype`."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(
        cls, storage: object, offset: object, shape: object, stride: object, dtype: str = ""
    ) -> StoredTensor:
        """Raises Malformed for a view that is not inside its storage, or that repeats elements."""
        if not isinstance(storage, Storage):
            raise Malformed("a tensor has no storage")
        sizes, strides, first = sizes_of(shape), sizes_of(stride), size_of(offset)
        if len(sizes) != len(strides):
            raise Malformed(f"a tensor has {len(sizes)} axes and {len(strides)} strides")
        tensor = cls(storage, dtype or storage.dtype, first, sizes, strides)
        available = storage.num_bytes // item_bytes(tensor.dtype)
        if first + tensor.extent > available:
            raise Malformed(
                f"a tensor of shape {list(sizes)} needs {first + tensor.extent} elements of a storage that "
                f"has {available}"
            )
        if tensor.num_items > tensor.extent:
            raise Malformed(
                f"a tensor of shape {list(sizes)} repeats the {tensor.extent} elements that it has in the "
                "file (an expanded tensor); save tensor.clone() in its place"
            )
        if tensor.extent > MAX_SPREAD * tensor.num_items:
            raise Malformed(
                f"a tensor of shape {list(sizes)} is scattered over {tensor.extent} elements of its storage; "
                "save tensor.clone() in its place"
            )
        return tensor

    @property
    def num_items(self) -> int:
        return math.prod(self.shape)

    @property
    def extent(self) -> int:
        """Elements from the first one to the last one."""
        if not self.num_items:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one after the other in the order of rows."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return self.num_items == 0
            expected *= size
        return True


def size_of(value: object) -> int:
    """Raises Malformed for anything but a size."""
    if type(value) is not int or not 0 <= value <= MAX_SIZE:
        raise Malformed("a size, a stride or an offset is not a number in range")
    return value


def sizes_of(value: object) -> tuple[int, ...]:
    """Raises Malformed for anything but a few sizes."""
    if not isinstance(value, tuple | list) or len(value) > MAX_AXES:
        raise Malformed(f"a shape is not a tuple of at most {MAX_AXES} sizes")
    return tuple(map(size_of, value))
