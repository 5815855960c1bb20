"""UnitWriter: writes units into their files. A unit is read and quantized while the one before is written."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.weights.conversion import layer_file
from penstock.weights.conversion.report import ConversionReport
from penstock.weights.conversion.rounding import Rounding
from penstock.weights.conversion.unit_files import UnitFile
from penstock.weights.store import WeightStore
from penstock.weights.tensors import TensorSpec


class PendingFile(NamedTuple):
    """A file that is being written."""

    file: UnitFile
    errors: dict[str, float]
    #: What the manifest says of the file, and the seconds that writing took.
    written: Future[tuple[dict[str, Any], float]]


class UnitWriter:
    """Has two buffers, however many units there are."""

    def __init__(
        self, store: WeightStore, target: Path, rounding: Rounding, report: ConversionReport
    ) -> None:
        """Bytes and seconds are added to `report`."""
        self._store = store
        self._target = target
        self._rounding = rounding
        self._report = report

    def write(
        self, files: Sequence[UnitFile], done: Collection[str]
    ) -> Generator[tuple[UnitFile, dict[str, Any]], None, None]:
        """Yields each file that is on the disk, with what the manifest says about it. `done` are the names of
        files that an earlier run has written."""
        done = frozenset(done)  # the caller adds names while files are written
        looks_back = self._rounding.looks_back
        sizes = [file.num_bytes for file in files if looks_back or file.name not in done]
        buffers = [torch.empty(max(sizes, default=0), dtype=torch.uint8) for _ in range(min(2, len(files)))]
        pending: PendingFile | None = None
        with ThreadPoolExecutor(1, "penstock-writer") as thread:
            for file in files:
                if file.name in done:
                    if looks_back:
                        self._look_at(file, buffers[-1][: file.num_bytes])
                    continue
                buffers.reverse()  # the first one is being written
                buffer = buffers[0][: file.num_bytes]
                errors = self._quantize(file.tensors, buffer)
                if pending is not None:
                    yield self._finish(pending)
                head = layer_file.header(file.stored, self._part_rows(file.tensors))
                stored = buffer[: file.num_stored_bytes]
                written = thread.submit(_write, self._target / file.name, head, stored)
                pending = PendingFile(file, errors, written)
            if pending is not None:
                yield self._finish(pending)

    def _quantize(self, tensors: tuple[TensorSpec, ...], buffer: Tensor) -> dict[str, float]:
        """Quantize tensors into `buffer`; returns their errors."""
        started, before = time.perf_counter(), self._store.bytes_read
        errors = self._rounding.read(tensors, buffer)
        self._report.quantize_s += time.perf_counter() - started
        self._report.bytes_read += self._store.bytes_read - before
        return errors

    def _look_at(self, file: UnitFile, buffer: Tensor) -> None:
        layer_file.read(self._target / file.name, buffer)
        self._rounding.look_at(file.tensors, buffer)

    def _finish(self, pending: PendingFile) -> tuple[UnitFile, dict[str, Any]]:
        """Wait until a file is on the disk; returns the file, and what the manifest says about it."""
        entry, seconds = pending.written.result()
        self._report.write_s += seconds
        self._report.bytes_written += entry["file_bytes"]
        return pending.file, entry | {"errors": pending.errors}

    def _part_rows(self, tensors: tuple[TensorSpec, ...]) -> dict[str, int]:
        """Rows of the parts of fused tensors."""
        parts = [part for tensor in tensors if len(tensor.parts) > 1 for part in tensor.parts]
        return {part: self._store.source.entry(part).shape[0] for part in parts}


def _write(path: Path, head: bytes, buffer: Tensor) -> tuple[dict[str, Any], float]:
    started = time.perf_counter()
    return layer_file.write(path, head, buffer), time.perf_counter() - started
