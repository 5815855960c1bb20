"""QuantizationError: how far a matrix, once quantized, is from the matrix that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.errors import WrongTensor
from penstock.kernels import Matrix
from penstock.weights.formats.planes_format import UpperPlane
from penstock.weights.formats.stacked_format import in_one_format
from penstock.weights.store import WeightStore
from penstock.weights.tensor_source import TensorSource
from penstock.weights.tensors import TensorSpec

#: Elements of a matrix that are compared with their quantized form at a time.
CHUNK_ELEMENTS = 1 << 22
#: Rows from which the error of a whole checkpoint is estimated.
SAMPLE_ROWS = 256


@dataclass(frozen=True)
class QuantizationError:
    """How far a tensor's quantized form is from the tensor that the checkpoint holds."""

    name: str
    #: Frobenius norm of the difference over that of the tensor.
    relative: float
    #: The relative error of the worst output channel.
    worst_channel: float
    #: Largest magnitude over root mean square, in the channel where this ratio is largest. Outliers make
    #: absmax scales coarse.
    outlier_ratio: float

    @classmethod
    def of(cls, name: str, weight: Tensor, quantized: Matrix) -> QuantizationError:
        """Compare [out_features, in_features] with its quantized form."""
        # Some rows at a time: an embedding in float64 would be larger than most models' layers.
        step = max(1, CHUNK_ELEMENTS // weight.shape[1])
        sums = [
            _row_sums(rows.double(), quantized.rows(start, start + len(rows)))
            for start, rows in zip(range(0, len(weight), step), torch.split(weight, step), strict=True)
        ]
        lost, norms, peaks = (torch.cat(column) for column in zip(*sums, strict=True))
        nonzero = norms.clamp_min(torch.finfo(torch.float64).tiny)
        rms = (nonzero / weight.shape[1]).sqrt()
        return cls(
            name,
            relative=float((lost.sum() / nonzero.sum()).sqrt()),
            worst_channel=float((lost / nonzero).max().sqrt()),
            outlier_ratio=float((peaks / rms).max()),
        )


def _row_sums(exact: Tensor, quantized: Matrix) -> tuple[Tensor, Tensor, Tensor]:
    """For each row: sum of squares of the differences, sum of squares, largest magnitude."""
    lost = (exact - quantized.dequantize().double()).square().sum(1)
    return lost, exact.square().sum(1), exact.abs().amax(1)


def quantization_errors(store: WeightStore, exact: WeightStore | None = None) -> Iterator[QuantizationError]:
    """The errors of a store's matrices, computed one at a time. Without `exact`, each matrix of the
    checkpoint is compared with its quantized form; with `exact`, the store's matrix is compared with the
    matrix of the store from which it was converted. A matrix that the checkpoint (or `exact`) holds quantized
    has no error to report."""
    source = store.source if exact is None else exact.source
    for tensor in _quantized(store, source):
        rows = torch.cat([source.rows(tensor, part) for part in tensor.parts]).float()
        ours = (
            tensor.format.from_rows(rows)
            if exact is None
            else store.read_resident((tensor,)).matrix(tensor.name)
        )
        yield QuantizationError.of(", ".join(tensor.parts), rows, ours)


def matrices(store: WeightStore) -> Iterator[TensorSpec]:
    """The matrices of a model. The parts of a stacked matrix, each in a format of its own, count as
    matrices."""
    for tensor in (tensor for tensors in store.tensors.groups for tensor in tensors):
        if isinstance(tensor.format, UpperPlane):
            yield replace(tensor, format=tensor.format.whole)
        else:
            yield from in_one_format(tensor) if tensor.is_matrix else ()


def _quantized(store: WeightStore, source: TensorSource) -> Iterator[TensorSpec]:
    """The matrices that `source` does not hold in the store's format."""
    for tensor in matrices(store):
        if not tensor.format.holds(source.entry(tensor.parts[0])):
            yield tensor


def sample_error(store: WeightStore) -> QuantizationError | None:
    """The error of some rows of the layers' first matrix that is quantized, or of the embedding's if no
    other is: what to expect of the others. None if no matrix is quantized. Raises WrongTensor."""
    outside = {part for tensor in (*store.tensors.embedding, *store.tensors.head) for part in tensor.parts}
    found = sorted(_quantized(store, store.source), key=lambda tensor: tensor.parts[0] in outside)
    if not found:
        return None
    tensor, part = found[0], found[0].parts[0]
    entry = store.source.entry(part)
    rows = store.source.read(part, 0, min(SAMPLE_ROWS, entry.shape[0])).float()
    try:
        return QuantizationError.of(part, rows, tensor.format.from_rows(rows))
    except ValueError as error:
        raise WrongTensor(f"tensor {part} in {entry.file} can't be quantized: {error}") from error
