"""OpenFiles: the files of a checkpoint, each opened when it is read first. Several threads may read. What is
read of a file that was changed since its header was read is refused."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import CorruptFile
from penstock.memory.ordinary_file import FileIdentity, open_ordinary
from penstock.memory.reads.block_reads import OpenFile
from penstock.memory.reads.patient import patiently
from penstock.weights.checkpoints.tensor_entry import TensorEntry


class OpenFiles:
    """close() gives the file descriptors back; a file that is read after that is opened again. The end of the
    object closes, too."""

    def __init__(self, known: Mapping[Path, FileIdentity]) -> None:
        """`known`: what files were when their headers were read; others count as they are when they are
        opened."""
        self._known = known
        self._files: dict[Path, OpenFile] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._files)

    def close(self) -> None:
        _close(self._files)

    def read_into(self, target: Tensor, entry: TensorEntry, start: int) -> None:
        """Fill `target` (contiguous) with the bytes of a tensor from `start` on. Raises CorruptFile."""
        view = memoryview((target.view(torch.uint8) if target.dim() else target).numpy().data).cast("B")
        file, done = self._open(entry.file), 0
        while done < len(view):
            try:
                count = patiently(os.preadv, file.descriptor, [view[done:]], entry.offset + start + done)
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
        file.check()

    def will_need(self, file: Path, offset: int, num_bytes: int) -> None:
        """Have the system fetch bytes while something else is done. Raises CorruptFile."""
        os.posix_fadvise(self._open(file).descriptor, offset, num_bytes, os.POSIX_FADV_WILLNEED)

    def _open(self, path: Path) -> OpenFile:
        with self._lock:
            if path not in self._files:
                try:
                    descriptor, status = patiently(open_ordinary, path)
                except OSError as error:
                    raise CorruptFile(f"{path} can't be opened any more: {error.strerror}") from error
                known = self._known.get(path, FileIdentity.of(status))
                self._files[path] = OpenFile(path, descriptor, False, False, known)
            return self._files[path]


def _close(files: dict[Path, OpenFile]) -> None:
    while files:
        os.close(files.popitem()[1].descriptor)
