"""UnitWriter: writes units into their files. A unit is read and quantized while the one before is written,
also where both are in one file."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.weights.conversion import layer_file
from penstock.weights.conversion.report import ConversionReport
from penstock.weights.conversion.rounding import Rounding
from penstock.weights.conversion.unit_files import StoredUnit, UnitFile
from penstock.weights.conversion.whole_file import NewFile
from penstock.weights.store import WeightStore
from penstock.weights.tensors import TensorSpec


class FileInWork:
    """A file that gets one unit after the other. A thread writes."""

    def __init__(self, file: UnitFile, path: Path, head: bytes, thread: ThreadPoolExecutor) -> None:
        self.file = file
        #: The errors of the file's tensors.
        self.errors: dict[str, float] = {}
        self._thread = thread
        self._new_file: NewFile | None = None
        self._seconds = 0.0
        self._last: Future[None] = thread.submit(self._write, self._begin, path, head)
        self._end: Future[dict[str, Any]] | None = None

    def add(self, unit: StoredUnit, buffer: Tensor) -> None:
        """Have a unit written. Waits until the unit before is written, so that its buffer is free. After the
        last unit, the thread waits for the disk while the next file's units are quantized."""
        self._last.result()
        self._last = self._thread.submit(self._write, self._add, unit, buffer)
        if unit is self.file.units[-1]:
            self._end = self._thread.submit(self._finish, self._last)

    def finish(self) -> tuple[dict[str, Any], float]:
        """Wait until the file is on the disk. Returns what the manifest says of the file, and the seconds
        that writing took."""
        assert self._end is not None
        return self._end.result(), self._seconds

    def discard(self) -> None:
        """Remove the file if it was not finished. Nothing may be under way."""
        if self._new_file is not None:
            self._new_file.discard()

    def _write(self, write: Callable[..., None], *values: object) -> None:
        started = time.perf_counter()
        write(*values)
        self._seconds += time.perf_counter() - started

    def _begin(self, path: Path, head: bytes) -> None:
        self._new_file = NewFile(path)
        self._new_file.add([head])

    def _add(self, unit: StoredUnit, buffer: Tensor) -> None:
        assert self._new_file is not None
        self._new_file.add(layer_file.data(unit, buffer))

    def _finish(self, last: Future[None]) -> dict[str, Any]:
        last.result()  # raises what kept the last unit from being written
        assert self._new_file is not None
        return self._new_file.finish()


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
        if not self._rounding.looks_back:
            files = [file for file in files if file.name not in done]
        units = [(file, unit) for file in files for unit in file.units]
        size = max((unit.layout.num_bytes for _, unit in units), default=0)
        buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(min(2, len(units)))]
        work: FileInWork | None = None
        try:
            with ThreadPoolExecutor(1, "penstock-writer") as thread:
                for file, unit in units:
                    buffers.reverse()  # the first one is being written
                    buffer = buffers[0][: unit.layout.num_bytes]
                    if file.name in done:
                        self._look_at(file, unit, buffer)
                        continue
                    errors = self._quantize(unit.tensors, buffer)
                    if work is not None and work.file is not file:
                        yield self._finish(work)
                        work = None
                    work = work or FileInWork(file, self._target / file.name, self._head(file), thread)
                    work.errors |= errors
                    work.add(unit, buffer)
                if work is not None:
                    yield self._finish(work)
        finally:
            if work is not None:
                work.discard()

    def _quantize(self, tensors: tuple[TensorSpec, ...], buffer: Tensor) -> dict[str, float]:
        """Quantize tensors into `buffer`; returns their errors."""
        started, before = time.perf_counter(), self._store.bytes_read
        errors = self._rounding.read(tensors, buffer)
        self._report.quantize_s += time.perf_counter() - started
        self._report.bytes_read += self._store.bytes_read - before
        return errors

    def _look_at(self, file: UnitFile, unit: StoredUnit, buffer: Tensor) -> None:
        """Calibration sees the units that an earlier run has written."""
        before = itertools.takewhile(lambda each: each is not unit, file.units)
        offset = sum(each.num_file_bytes for each in before)
        layer_file.read(self._target / file.name, buffer[: unit.layout.num_stored_bytes], offset)
        unit.layout.derive(buffer)
        self._rounding.look_at(unit.tensors, buffer)

    def _finish(self, work: FileInWork) -> tuple[UnitFile, dict[str, Any]]:
        """Wait until a file is on the disk; returns the file, and what the manifest says about it."""
        entry, seconds = work.finish()
        self._report.write_s += seconds
        self._report.bytes_written += entry["file_bytes"]
        return work.file, entry | {"errors": work.errors}

    def _head(self, file: UnitFile) -> bytes:
        """The file's header, with the rows of the parts of fused tensors."""
        tensors = (tensor for unit in file.units for tensor in unit.tensors)
        parts = [part for tensor in tensors if len(tensor.parts) > 1 for part in tensor.parts]
        rows = {part: self._store.source.entry(part).shape[0] for part in parts}
        return layer_file.header(file.units, rows)
