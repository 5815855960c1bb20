"""WeightFormat: how one tensor lies in bytes, in a checkpoint and in a layer's buffer, and how the buffer is
filled.

A tensor is kept as one or more arrays (components): INT8 keeps integers and float32 scales. The first axis of
each component is the tensor's first axis, so that the rows of fused parts (q, k, v) lie one after the other
in each component. A new format is a class like Int8; layouts, stores, tiers and streamers only call its
methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.errors import WrongTensor
from penstock.kernels import Matrix, QuantizedTensor
from penstock.weights.checkpoints.tensor_entry import ARRAY_DTYPES, TensorEntry
from penstock.weights.tensor_source import TensorSource, is_transposed

if TYPE_CHECKING:
    from penstock.weights.tensor_quantizer import TensorQuantizer
    from penstock.weights.tensors import TensorSpec

#: Bytes of integers that are read at a time.
CHUNK_BYTES = 4 << 20


class Component(NamedTuple):
    """One array of a tensor."""

    #: What follows the tensor's name in a checkpoint.
    suffix: str
    #: The name of the dtype in safetensors.
    dtype: str
    shape: tuple[int, ...]
    #: The shape in files without the first axis. The first axis belongs to the tensor's rows, one by one or
    #: some of them together.
    columns: tuple[int, ...]
    #: Makes the array of the one before, where the array is in no file.
    derive: Callable[[Tensor], Tensor] | None = None

    @property
    def item_bytes(self) -> int:
        return ARRAY_DTYPES[self.dtype].itemsize

    @property
    def num_bytes(self) -> int:
        return self.item_bytes * math.prod(self.shape)

    def view(self, buffer: Tensor) -> Tensor:
        """`buffer` (uint8 [num_bytes]) as this array."""
        return buffer.view(ARRAY_DTYPES[self.dtype]).view(self.shape)


class Loss(NamedTuple):
    """How much of a checkpoint's tensor was lost when a buffer was filled, as sums of squares: of the
    differences, and of the tensor."""

    lost: float
    of: float


class WeightFormat(Protocol):
    """How a tensor is kept. Formats are values: equal values are one format."""

    @property
    def name(self) -> str: ...

    @property
    def is_matrix(self) -> bool:
        """Whether tokens are multiplied by the tensor. If so, a layer gets a Matrix, otherwise a Tensor."""

    @property
    def operand_types(self) -> tuple[type, ...]:
        """The type of what operand() returns, and the types of the matrices in it."""

    @property
    def group_size(self) -> int:
        """Inputs that share a scale; 0 where all inputs of an output channel do, or where there is no
        scale."""

    @property
    def can_be_split(self) -> bool:
        """Whether two places can have output channels of one matrix, each some rows of every array."""

    def components(self, shape: tuple[int, ...]) -> tuple[Component, ...]:
        """The arrays of a tensor of this shape."""

    def operand(self, arrays: Sequence[Tensor]) -> Matrix | Tensor:
        """What a layer computes with, from views of the components in their order."""

    def holds(self, entry: TensorEntry) -> bool:
        """Whether the checkpoint holds a tensor's part in this very format, so that the part is copied."""

    def grouped(self, tensor: TensorSpec, group_size: int) -> WeightFormat:
        """This format with a scale per `group_size` inputs; the format itself where it has no scales."""

    def scheme(self) -> dict[str, Any] | None:
        """What compressed-tensors calls the format. {} if the tensor is kept as plain floating point; None if
        compressed-tensors has no name for the format, so that no converted model can be described."""

    def check(self, source: TensorSource, tensor: TensorSpec) -> set[str]:
        """The names in the checkpoint that belong to the tensor. Raises WrongTensor and MissingTensor."""

    def fill(
        self,
        source: TensorSource,
        tensor: TensorSpec,
        arrays: Sequence[Tensor],
        num_threads: int = 1,
        with_loss: bool = False,
    ) -> dict[str, Loss]:
        """Read the tensor from the checkpoint into its components. Returns the loss of each part that was
        quantized on the way, if `with_loss`. Raises CheckpointError kinds."""

    def dequantize(self, source: TensorSource, part: str, exact: Tensor) -> Tensor:
        """The values of a part for which holds() is true. `exact` is what the checkpoint holds, as
        float32."""

    def from_rows(self, rows: Tensor) -> Matrix:
        """A matrix of this format from float32 rows [out_features, in_features]. Raises ValueError."""

    def fill_random(self, arrays: Sequence[Tensor], generator: torch.Generator) -> None:
        """Fill the components with values that keep activations about as large as in a trained model."""


@dataclass(frozen=True)
class Floats:
    """Plain floating point: float32 for norms, biases and tables of positions, whatever dtype the checkpoint
    has. The files of a converted model may have matrices of other dtypes, which become INT8 when they are
    loaded."""

    #: As safetensors names it.
    dtype: str = "F32"
    is_matrix = False
    operand_types: ClassVar[tuple[type, ...]] = (Tensor,)
    can_be_split: ClassVar[bool] = False
    group_size = 0

    @property
    def name(self) -> str:
        return str(ARRAY_DTYPES[self.dtype]).removeprefix("torch.")

    def components(self, shape: tuple[int, ...]) -> tuple[Component, ...]:
        return (Component("", self.dtype, shape, shape[1:]),)

    def operand(self, arrays: Sequence[Tensor]) -> Tensor:
        return arrays[0]

    def holds(self, entry: TensorEntry) -> bool:
        return entry.dtype == self.dtype and entry.decode is None

    def check(self, source: TensorSource, tensor: TensorSpec) -> set[str]:
        names = set()
        for part in tensor.parts:
            entry = source.entry(part)
            check_shape(tensor, entry)
            if entry.dtype == "I8":
                raise WrongTensor(
                    f"tensor {entry.name} in {entry.file} is INT8, where floating point is needed"
                )
            names.add(entry.name)
        return names

    def fill(
        self,
        source: TensorSource,
        tensor: TensorSpec,
        arrays: Sequence[Tensor],
        num_threads: int = 1,
        with_loss: bool = False,
    ) -> dict[str, Loss]:
        torch.cat([source.read(part).to(arrays[0].dtype) for part in tensor.parts], out=arrays[0])
        return {}

    def dequantize(self, source: TensorSource, part: str, exact: Tensor) -> Tensor:
        return exact

    def grouped(self, tensor: TensorSpec, group_size: int) -> Floats:
        return self

    def scheme(self) -> dict[str, Any] | None:
        return {}

    def from_rows(self, rows: Tensor) -> Matrix:
        raise TypeError("tensors of floats are not matrices")

    def fill_random(self, arrays: Sequence[Tensor], generator: torch.Generator) -> None:
        arrays[0].fill_(1.0)


@dataclass(frozen=True)
class Int8:
    """Symmetric INT8: w = integer * scale, with one float32 scale per output channel, or per `group_size`
    inputs of an output channel. Checkpoints of other dtypes are quantized while they are read, some rows at a
    time."""

    group_size: int = 0
    is_matrix = True
    operand_types: ClassVar[tuple[type, ...]] = (QuantizedTensor,)
    can_be_split: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return f"int8, groups of {self.group_size}" if self.group_size else "int8"

    def components(self, shape: tuple[int, ...]) -> tuple[Component, ...]:
        groups = (shape[1] // self.group_size,) if self.group_size else ()
        return (
            Component("_scale", "F32", (shape[0], *groups), groups or (1,)),
            Component("", "I8", shape, shape[1:]),
        )

    def operand(self, arrays: Sequence[Tensor]) -> QuantizedTensor:
        scale, qweight = arrays
        return QuantizedTensor(qweight, scale)

    def holds(self, entry: TensorEntry) -> bool:
        if entry.int8 is not None:
            return entry.int8.group_size == self.group_size
        return entry.dtype == "I8"

    def grouped(self, tensor: TensorSpec, group_size: int) -> Int8:
        return Int8(group_size)

    def scheme(self) -> dict[str, Any] | None:
        strategy = {"strategy": "group", "group_size": self.group_size} if self.group_size else {}
        per_channel = {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "strategy": "channel",
            "dynamic": False,
        }
        return per_channel | strategy

    def check(self, source: TensorSource, tensor: TensorSpec) -> set[str]:
        names = set()
        for part in tensor.parts:
            entry = source.entry(part)
            check_shape(tensor, entry)
            names.add(entry.name)
            if entry.dtype == "I8":
                scale = source.entry(part + "_scale")
                self._check_scale(tensor, entry, scale)
                names |= {scale.name, entry.name + "_shape", *(each.name for each in entry.sources)}
        return names

    def _check_scale(self, tensor: TensorSpec, entry: TensorEntry, scale: TensorEntry) -> None:
        """Raises WrongTensor if the number of scales is wrong."""
        groups = tensor.shape[1] // self.group_size if self.group_size else 1
        if scale.shape not in ((entry.shape[0], groups), (entry.shape[0] * groups,)):
            raise WrongTensor(
                f"tensor {scale.name} in {scale.file} has shape {list(scale.shape)}; the quantization that "
                f"config.json names calls for {[entry.shape[0], groups]}"
            )

    def fill(
        self,
        source: TensorSource,
        tensor: TensorSpec,
        arrays: Sequence[Tensor],
        num_threads: int = 1,
        with_loss: bool = False,
    ) -> dict[str, Loss]:
        from penstock.weights.quantize import row_quantizer
        from penstock.weights.tensor_quantizer import TensorQuantizer

        whole, losses = self.operand(arrays), dict[str, Loss]()
        for part, entry, start, end in rows_of_parts(source, tensor):
            rows = whole.rows(start, end)
            if self.holds(entry):
                _copy(source, part, rows, num_threads)
                continue
            quantizer = TensorQuantizer(
                source.checkpoint, entry, rows, row_quantizer, is_transposed(tensor, entry)
            )
            losses |= quantized(source, part, entry, quantizer, num_threads, with_loss)
        return losses

    def dequantize(self, source: TensorSource, part: str, exact: Tensor) -> Tensor:
        if source.entry(part).int8 is not None:
            return exact  # the entry has made floats of the integers
        scale = source.read(part + "_scale").float().view(exact.shape[0], -1)
        return exact * scale.repeat_interleave(exact.shape[1] // scale.shape[1], 1)

    def from_rows(self, rows: Tensor) -> QuantizedTensor:
        from penstock.weights.quantize import quantize

        return quantize(rows, self.group_size)

    def fill_random(self, arrays: Sequence[Tensor], generator: torch.Generator) -> None:
        qweight, scale = self.operand(arrays)
        qweight.random_(-127, 128, generator=generator)  # of variance 73 ** 2
        scale.fill_(1 / (73 * qweight.shape[1] ** 0.5))


#: The formats that most tensors have.
FLOAT32, INT8 = Floats(), Int8()


def rows_of_parts(source: TensorSource, tensor: TensorSpec) -> Iterator[tuple[str, TensorEntry, int, int]]:
    """Each part of a matrix: its name, its entry, and its first and last rows in the matrix."""
    start = 0
    for part in tensor.parts:
        entry = source.entry(part)
        end = start + entry.shape[1 if is_transposed(tensor, entry) else 0]
        yield part, entry, start, end
        start = end


def quantized(
    source: TensorSource,
    part: str,
    entry: TensorEntry,
    quantizer: TensorQuantizer[Any],
    num_threads: int,
    with_loss: bool,
) -> dict[str, Loss]:
    """Quantizes a part, and counts its bytes. What was lost, by the part's name, if that is asked for."""
    loss = Loss(*quantizer.run(num_threads, with_loss))
    source.count(entry.num_bytes)
    return {part: loss} if with_loss else {}


def check_shape(tensor: TensorSpec, entry: TensorEntry) -> None:
    """Raises WrongTensor if a part's rows can't be rows of the tensor."""
    has_other_order = is_transposed(tensor, entry)
    shape = entry.shape[::-1] if has_other_order else entry.shape
    if len(shape) != len(tensor.shape) or shape[1:] != tensor.shape[1:]:
        raise WrongTensor(
            f"tensor {entry.name} in {entry.file} has shape {list(entry.shape)}; the config calls for "
            f"{'rows of ' if len(tensor.parts) > 1 else ''}{list(tensor.shape)}"
            f"{' transposed' if has_other_order else ''}"
        )


def stored_rows(source: TensorSource, part: str, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
    """Integers of rows start:stop of a part that Int8 holds (int8 [rows, in_features]), and their scales
    [rows, num_groups] where both lie together in the file. Raises CorruptFile."""
    entry = source.entry(part)
    if entry.int8 is None:
        return source.read(part, start, stop), None
    source.count(entry.num_bytes * (stop - start) // entry.shape[0])
    return entry.int8.read(source.checkpoint, start, stop)


def copy_scales(source: TensorSource, part: str, scale: Tensor) -> None:
    """Copy all scales of a part, where they are a tensor of their own."""
    if source.entry(part).int8 is None:
        stored = source.read(part + "_scale").flatten()[: scale.numel()]
        scale.copy_(stored.view(scale.shape))


def _copy(source: TensorSource, part: str, rows: QuantizedTensor, num_threads: int) -> None:
    """Copy integers and scales as the checkpoint holds them. Threads gain where both lie in blocks."""
    num_rows, width = rows.qweight.shape
    is_direct = source.entry(part).int8 is None
    step = max(1, CHUNK_BYTES // width)

    def copy(start: int) -> None:
        chunk = rows.rows(start, start + step)
        stop = start + chunk.out_features
        if is_direct:
            source.read(part, start, stop, chunk.qweight)
            return
        integers, scales = stored_rows(source, part, start, stop)
        assert scales is not None
        chunk.qweight.copy_(integers)
        chunk.scale.copy_(scales)

    starts = range(0, num_rows, step)
    if is_direct or num_threads == 1:
        for start in starts:
            copy(start)
    else:
        with ThreadPoolExecutor(max(1, min(num_threads, len(starts))), "penstock-blocks") as pool:
            list(pool.map(copy, starts))
    copy_scales(source, part, rows.scale)
