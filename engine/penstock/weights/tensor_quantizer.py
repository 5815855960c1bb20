"""TensorQuantizer: one tensor of a checkpoint -> a quantized matrix. Several threads read and quantize some
rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from penstock.errors import WrongTensor
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.tensor_entry import DTYPES, TensorEntry

#: Bytes of float32 that a thread quantizes at a time.
CHUNK_BYTES = 1 << 20
#: How many chunks the disk is asked for before their turn.
AHEAD = 16


class Quantizable(Protocol):
    """A matrix, or a part of one, that rows are quantized into."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def out_features(self) -> int: ...

    def rows(self, start: int, stop: int) -> Self:
        """A view of the output channels from `start` to `stop`."""


Quantized = TypeVar("Quantized", bound=Quantizable)
Target = TypeVar("Target", contravariant=True)


class RowQuantizer(Protocol[Target]):
    """Quantizes one chunk of rows after the other."""

    def quantize(self, weight: Tensor, out: Target) -> None:
        """Quantize rows into `out`. Raises ValueError for NaN or infinity."""

    def loss(self, out: Target) -> tuple[float, float]:
        """Sums of squares: of what was lost with the last chunk, and of the chunk. Called at most once for
        each."""


class TensorQuantizer(Generic[Quantized]):
    """Fills `out` from a matrix of a floating dtype."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        entry: TensorEntry,
        out: Quantized,
        make_quantizer: Callable[[], RowQuantizer[Quantized]],
        is_transposed: bool = False,
    ) -> None:
        """Each thread makes a quantizer of its own. A transposed matrix ([in_features, out_features] in the
        file) is read here and now, as a whole."""
        self._checkpoint = checkpoint
        self._entry = entry
        self._out: Quantized = out
        self._make_quantizer: Callable[[], RowQuantizer[Quantized]] = make_quantizer
        self._whole = checkpoint.read(entry.name).t() if is_transposed else None
        self._step = max(1, CHUNK_BYTES // (4 * out.shape[1]))
        #: First rows of the chunks that no thread has taken yet.
        self._starts = iter(range(0, out.out_features, self._step))

    def run(self, num_threads: int, with_loss: bool) -> tuple[float, float]:
        """Sums of squares (zeros unless `with_loss`): of what was lost, and of the matrix.

        Raises WrongTensor (the values can't be quantized) and CorruptFile.
        """
        self._read_ahead(-AHEAD * self._step, AHEAD)
        num_threads = min(num_threads, -(-self._out.out_features // self._step))
        if num_threads <= 1:
            return self._work(with_loss)
        with ThreadPoolExecutor(num_threads, "penstock-quantizer") as pool:
            sums = list(pool.map(self._work, [with_loss] * num_threads))
        return sum(lost for lost, _ in sums), sum(of for _, of in sums)

    def _work(self, with_loss: bool) -> tuple[float, float]:
        """The work of one thread."""
        quantizer = self._make_quantizer()
        lost, of = 0.0, 0.0
        for start, rows in self._chunks():
            chunk = self._out.rows(start, start + len(rows))
            try:
                quantizer.quantize(rows, chunk)
            except ValueError as error:
                raise WrongTensor(
                    f"tensor {self._entry.name} in {self._entry.file} can't be quantized: {error}. "
                    "Download the file again, or use another checkpoint"
                ) from error
            if with_loss:
                chunk_lost, chunk_of = quantizer.loss(chunk)
                lost, of = lost + chunk_lost, of + chunk_of
        return lost, of

    def _chunks(self) -> Iterator[tuple[int, Tensor]]:
        """Rows that no other thread has, in the checkpoint's dtype. They are overwritten when the next are
        asked for."""
        step, num_rows = self._step, self._out.out_features
        shape = (step, self._out.shape[1])
        buffer = torch.empty(shape if self._whole is None else 0, dtype=DTYPES.get(self._entry.dtype))
        for start in self._starts:
            stop = min(start + step, num_rows)
            if self._whole is not None:
                yield start, self._whole[start:stop]
                continue
            self._read_ahead(start, 1)
            yield start, self._checkpoint.read_rows(self._entry.name, start, stop, buffer[: stop - start])

    def _read_ahead(self, start: int, num_chunks: int) -> None:
        """Ask the disk for `num_chunks` chunks that lie AHEAD chunks after the chunk at `start`."""
        if self._whole is None:
            first = start + AHEAD * self._step
            self._checkpoint.read_ahead(self._entry.name, first, first + num_chunks * self._step)
