"""TensorQuantizer: one tensor of a checkpoint -> INT8. Several threads read and quantize some rows at a
time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from penstock.errors import WrongTensor
from penstock.kernels import QuantizedTensor
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.tensor_entry import DTYPES, TensorEntry
from penstock.weights.quantize import RowQuantizer

#: Bytes of float32 that a thread quantizes at a time.
CHUNK_BYTES = 1 << 20
#: How many chunks the disk is asked for before their turn.
AHEAD = 16


class TensorQuantizer:
    """Fills `out` from a matrix of a floating dtype."""

    def __init__(
        self, checkpoint: Checkpoint, entry: TensorEntry, out: QuantizedTensor, is_transposed: bool = False
    ) -> None:
        """A transposed matrix ([in_features, out_features] in the file) is read here and now, as a whole."""
        self._checkpoint = checkpoint
        self._entry = entry
        self._out = out
        self._whole = checkpoint.read(entry.name).t() if is_transposed else None
        self._step = max(1, CHUNK_BYTES // (4 * out.qweight.shape[1]))
        #: First rows of the chunks that no thread has taken yet.
        self._starts = iter(range(0, len(out.scale), self._step))

    def run(self, num_threads: int, with_loss: bool) -> tuple[float, float]:
        """Sums of squares (zeros unless `with_loss`): of what was lost, and of the matrix.

        Raises WrongTensor (the values can't be quantized) and CorruptFile.
        """
        self._read_ahead(-AHEAD * self._step, AHEAD)
        num_threads = min(num_threads, -(-len(self._out.scale) // self._step))
        if num_threads <= 1:
            return self._work(with_loss)
        with ThreadPoolExecutor(num_threads, "penstock-quantizer") as pool:
            sums = list(pool.map(self._work, [with_loss] * num_threads))
        return sum(lost for lost, _ in sums), sum(of for _, of in sums)

    def _work(self, with_loss: bool) -> tuple[float, float]:
        """The work of one thread."""
        quantizer = RowQuantizer(self._step, self._out.qweight.shape[1])
        lost, of = 0.0, 0.0
        for start, rows in self._chunks():
            chunk = QuantizedTensor(*(whole[start : start + len(rows)] for whole in self._out))
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
        step, num_rows = self._step, len(self._out.scale)
        shape = (step, self._out.qweight.shape[1])
        buffer = torch.empty(shape if self._whole is None else 0, dtype=DTYPES.get(self._entry.dtype))
        for start in self._starts:
            stop = min(start + step, num_rows)
            if self._whole is not None:
                yield start, self._whole[start:stop]
                continue
            self._read_ahead(start, 1)
            yield start, self._checkpoint.read_rows(self._entry.name, start, stop, buffer[: stop - start])

    def _read_ahead(self, start: int, num_chunks: int) -> None:
        """Ask the disk for `num_chunks` chunks that lie AHEAD chunks behind the chunk at `start`."""
        if self._whole is None:
            first = start + AHEAD * self._step
            self._checkpoint.read_ahead(self._entry.name, first, first + num_chunks * self._step)
