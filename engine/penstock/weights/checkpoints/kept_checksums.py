"""Kept checksums: the SHA-256 of weight files, in a file from one start to the next. A file that has the
size, the times and the inode that it had is not read again."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.weights.checkpoints.checksums import Checksums

logger = logging.getLogger(__name__)


#: How long it may take until a computation that nobody wants has ended.
WAIT_S = 0.1


class Unwanted(Exception):
    """The computation was given up."""


class KeptChecksums:
    """The checksums that a file keeps."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def known(self, files: Sequence[Path]) -> dict[Path, str] | None:
        """The checksums of these files, if all of them are kept. Raises OSError if one of the files is
        missing."""
        kept = self._read()
        found = {file: kept.get(str(file.resolve()), {}) for file in files}
        if any(each.get("state") != _state(file) for file, each in found.items()):
            return None
        return {file: str(each["sha256"]) for file, each in found.items()}

    def of(self, files: Sequence[Path], is_wanted: Callable[[], bool] = lambda: True) -> dict[Path, str]:
        """The checksums of these files. What is not kept is computed, which reads the files, and kept. Raises
        CorruptFile and OSError, and Unwanted soon after is_wanted() has said no."""
        known = self.known(files)
        if known is not None:
            return known
        states = {file: _state(file) for file in files}
        with contextlib.closing(Checksums(files)) as checksums:
            while not checksums.join(WAIT_S):
                if not is_wanted():
                    raise Unwanted("nobody waits for the checksums of the weights any more")
            found = checksums.wait()
        new: dict[str, dict[str, object]] = {
            str(file.resolve()): {"state": states[file], "sha256": found[file]}
            for file in files
            if _state(file) == states[file]
        }
        self._write(self._read() | new)
        return found

    def _read(self) -> dict[str, dict[str, object]]:
        """{} if the file is missing or broken."""
        try:
            kept = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        is_sound = isinstance(kept, dict) and all(isinstance(each, dict) for each in kept.values())
        return kept if is_sound else {}

    def _write(self, kept: dict[str, dict[str, object]]) -> None:
        """As a whole or not at all. What can't be kept is computed again."""
        part = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w") as stream:
                json.dump(kept, stream)
            part.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            logger.warning("the checksums of weights can't be kept in %s: %s", self._path, error.strerror)


def _state(file: Path) -> list[int]:
    """What changes when a file changes."""
    status = file.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
