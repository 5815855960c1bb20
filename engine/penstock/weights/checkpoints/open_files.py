"""OpenFiles: the files of a checkpoint, each opened when it is read first. Several threads may read."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import CorruptFile
from penstock.memory.reads.patient import patiently
from penstock.weights.checkpoints.tensor_entry import TensorEntry


class OpenFiles:
    """close() gives the file descriptors back; a file that is read after that is opened again. The end of the
    object closes, too."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._descriptors)

    def close(self) -> None:
        _close(self._descriptors)

    def read_into(self, target: Tensor, entry: TensorEntry, start: int) -> None:
        """Fill `target` (contiguous) with the bytes of a tensor from `start` on. Raises CorruptFile."""
        view = memoryview((target.view(torch.uint8) if target.dim() else target).numpy().data).cast("B")
        descriptor, done = self._descriptor(entry.file), 0
        while done < len(view):
            try:
                count = patiently(os.preadv, descriptor, [view[done:]], entry.offset + start + done)
            except OSError as error:
                raise CorruptFile(
                    f"reading tensor {entry.name} from {entry.file} failed: {error.strerror}"
                ) from error
            if count == 0:
                raise CorruptFile(
                    f"{entry.file} ends within tensor {entry.name}: the file was cut after it was opened. "
                    "Download it again"
                )
            done += count

    def will_need(self, file: Path, offset: int, num_bytes: int) -> None:
        """Have the system fetch bytes while something else is done. Raises CorruptFile."""
        os.posix_fadvise(self._descriptor(file), offset, num_bytes, os.POSIX_FADV_WILLNEED)

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._descriptors:
                try:
                    self._descriptors[file] = patiently(os.open, file, os.O_RDONLY)
                except OSError as error:
                    raise CorruptFile(f"{file} can't be opened any more: {error.strerror}") from error
            return self._descriptors[file]


def _close(descriptors: dict[Path, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
