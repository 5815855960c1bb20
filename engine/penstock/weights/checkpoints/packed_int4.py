"""4-bit codes in int32 words, as compressed-tensors' `pack-quantized` keeps them: eight to a word along the
rows of [out_features, in_features], the first in the lowest bits, each with 8 added. So a little-endian file
has rows of bytes with two codes each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from penstock.config import GROUP_SIZES
from penstock.errors import WrongTensor
from penstock.kernels.int4_tensor import Int4Tensor
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.int4_form import Int4Form, Int4Source
from penstock.weights.checkpoints.packed import check_words
from penstock.weights.checkpoints.tensor_entry import TensorEntry

#: Dtypes that scales may have.
SCALE_DTYPES = ("F16", "BF16", "F32")


def int4_entry(name: str, stored: TensorEntry, shape: tuple[int, int], source: Int4Source) -> TensorEntry:
    """The entry of a matrix [out_features, in_features] of 4-bit codes. `stored` is the array with the
    codes."""
    decode = DequantizedRows(source).read
    return TensorEntry(
        name,
        stored.file,
        stored.offset,
        "F32",
        shape,
        stored.num_bytes,
        decode,
        has_outputs_first=True,
        int4=source,
    )


@dataclass(frozen=True)
class DequantizedRows:
    """A matrix of 4-bit codes as float32."""

    source: Int4Source

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """float32 [stop - start, in_features]."""
        form = self.source.form
        arrays = self.source.read(checkpoint, start, stop)
        return Int4Tensor(group_size=form.group_size, codebook=form.codebook, **arrays).dequantize()


def compressed_int4_entries(checkpoint: Checkpoint) -> Iterator[TensorEntry]:
    """The checkpoint's tensors, and `weight` beside each `weight_packed`. Raises WrongTensor."""
    for entry in checkpoint.entries.values():
        yield entry
        if entry.name.endswith(".weight_packed"):
            check_words(entry)
            name, shape = entry.name.removesuffix("_packed"), (entry.shape[0], 8 * entry.shape[1])
            scale = checkpoint.entry(f"{name}_scale")
            yield int4_entry(name, entry, shape, CompressedInt4.of(entry, scale))


@dataclass(frozen=True)
class CompressedInt4:
    """A symmetric matrix as compressed-tensors packs it."""

    packed: TensorEntry
    scale: TensorEntry
    form: Int4Form

    @classmethod
    def of(cls, packed: TensorEntry, scale: TensorEntry) -> CompressedInt4:
        """Raises WrongTensor."""
        rows, width = packed.shape[0], 8 * packed.shape[1]
        size = shared_size(width, scale.shape[1] if len(scale.shape) == 2 else 0)
        if scale.dtype not in SCALE_DTYPES or scale.shape[:1] != (rows,) or not size:
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise WrongTensor(
                f"tensor {scale.name} in {scale.file} is {scale.dtype} {list(scale.shape)}; {packed.name} "
                f"{list(packed.shape)} needs scales of groups of {sizes} inputs, or of whole rows"
            )
        return cls(packed, scale, Int4Form(size, scale.dtype))

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> dict[str, Tensor]:
        width = 4 * self.packed.shape[1]
        codes = checkpoint.read_stored(self.packed, start * width, stop * width).view(stop - start, width)
        scale = self.scale.read_rows(checkpoint, start, stop)
        repeats = 2 * width // self.form.group_size // scale.shape[1]
        return {"codes": codes, "scale": scale.repeat_interleave(repeats, 1)}


def shared_size(width: int, num_groups: int) -> int:
    """The size of groups in which the scales of `num_groups` groups of a row can be kept: the groups' own, or
    the largest of GROUP_SIZES that divides a larger group, whose scale is repeated. 0: there is none."""
    if not num_groups or width % num_groups:
        return 0
    return next((size for size in reversed(GROUP_SIZES) if width // num_groups % size == 0), 0)
