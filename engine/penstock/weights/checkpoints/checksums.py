"""Checksums: the SHA-256 of files, computed by a thread while the files are used. Whoever published the files
may have told the same numbers."""

from __future__ import annotations

import errno
import hashlib
import logging
import mmap
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.errors import CorruptFile
from penstock.memory.ordinary_file import open_bytes

logger = logging.getLogger(__name__)

#: After each piece, the thread waits for its turn at the interpreter, which other threads use as well. More
#: than a piece is never mapped, since mapped pages count as memory of the process.
PIECE_BYTES = 8 << 20
#: What the thread adds to its nice value: it takes the time of processors that the files' user leaves idle,
#: while that one waits for the disk.
NICENESS = 10


class Checksums:
    """Begins to read when it is made."""

    def __init__(self, files: Sequence[Path], is_logged: bool = False) -> None:
        """With `is_logged` the thread logs the checksums at its end, and nobody needs to wait for it."""
        #: The files whose checksums are computed.
        self.files = tuple(files)
        self._found: dict[Path, str] = {}
        self._error: OSError | None = None
        self._is_wanted = True
        self._is_logged = is_logged
        self._thread = threading.Thread(target=self._run, name="penstock-checksums", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait so long at most. Whether the thread has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def wait(self) -> dict[Path, str]:
        """The checksums of the files, in hexadecimal. Raises CorruptFile."""
        self._thread.join()
        if self._error is not None:
            raise CorruptFile(f"{self._error.filename} can't be read: {self._error.strerror}")
        return self._found

    def close(self) -> None:
        """End the thread, whatever is missing."""
        self._is_wanted = False
        self._thread.join()

    def _run(self) -> None:
        if sys.platform == "linux":  # elsewhere the call would be for the whole process
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.nice(0) + NICENESS)
        try:
            for file in self.files:
                self._found[file] = _checksum(self._pieces(file))
        except OSError as error:
            self._error = error
        if self._is_logged:
            for line in lines(self._found):
                logger.info("%s", line)

    def _pieces(self, file: Path) -> Iterator[mmap.mmap]:
        """Mapped, since a copy of the system's pages would take a fifth of the thread's time."""
        with open_bytes(file, buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            for start in range(0, size, PIECE_BYTES):
                if not self._is_wanted:
                    return
                with _mapped(stream.fileno(), start, min(PIECE_BYTES, size - start), file) as piece:
                    yield piece


def _mapped(descriptor: int, start: int, num_bytes: int, file: Path) -> mmap.mmap:
    """Raises OSError if the file was cut: the system kills who reads a mapped page after the end of a
    file."""
    if os.fstat(descriptor).st_size < start + num_bytes:
        raise OSError(errno.EIO, "the file was cut while it was read", str(file))
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    return mmap.mmap(descriptor, num_bytes, flags=flags, prot=mmap.PROT_READ, offset=start)


def lines(found: dict[Path, str]) -> list[str]:
    """Checksums as lines of text for people."""
    return [f"SHA-256 of {file.name}: {checksum}" for file, checksum in found.items()]


def _checksum(pieces: Iterator[mmap.mmap]) -> str:
    checksum = hashlib.sha256()
    for piece in pieces:
        checksum.update(piece)
    return checksum.hexdigest()
