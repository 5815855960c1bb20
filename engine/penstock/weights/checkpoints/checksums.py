"""Checksums: the SHA-256 of files, computed by a thread while the files are used. Whoever published the files
may have told the same numbers."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.errors import CorruptFile

logger = logging.getLogger(__name__)

#: After each piece, the thread waits for its turn at the interpreter, which other threads use as well.
READ_BYTES = 8 << 20


class Checksums:
    """Begins to read when it is made."""

    def __init__(self, files: Sequence[Path], is_logged: bool = False) -> None:
        """With `is_logged` the thread logs the checksums at its end, and nobody needs to wait for it."""
        self._files = files
        self._found: dict[Path, str] = {}
        self._error: OSError | None = None
        self._is_wanted = True
        self._is_logged = is_logged
        self._thread = threading.Thread(target=self._run, name="penstock-checksums", daemon=True)
        self._thread.start()

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
        try:
            for file in self._files:
                self._found[file] = _checksum(self._pieces(file))
        except OSError as error:
            self._error = error
        if self._is_logged:
            for line in lines(self._found):
                logger.info("%s", line)

    def _pieces(self, file: Path) -> Iterator[memoryview]:
        buffer = bytearray(READ_BYTES)
        with file.open("rb", buffering=0) as stream:
            while self._is_wanted and (count := stream.readinto(buffer)):
                yield memoryview(buffer)[:count]


def lines(found: dict[Path, str]) -> list[str]:
    """Checksums as lines of text for people."""
    return [f"SHA-256 of {file.name}: {checksum}" for file, checksum in found.items()]


def _checksum(pieces: Iterator[memoryview]) -> str:
    checksum = hashlib.sha256()
    for piece in pieces:
        checksum.update(piece)
    return checksum.hexdigest()
