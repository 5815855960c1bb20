"""Files that are there as a whole or not at all, whatever happens while they are written, and the lock on a
folder to which one process at a time writes."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.errors import CapacityError, CheckpointError, ConfigError, PenstockError

#: Ending of the name of a file that is being written, or was when its process was killed.
TEMPORARY = ".penstock-part"
LOCK = ".penstock-lock"
#: Processors have instructions for this checksum.
CHECKSUM = "sha256"
READ_BYTES = 16 << 20


def describe(path: Path) -> dict[str, Any]:
    """Size and checksum, as write() returns them, of a file as the disk has it. Raises OSError."""
    checksum = hashlib.new(CHECKSUM)
    with path.open("rb", buffering=0) as stream:
        while piece := stream.read(READ_BYTES):
            checksum.update(piece)
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return _description(stream.tell(), checksum.hexdigest())


def describe_bytes(content: bytes) -> dict[str, Any]:
    """Size and checksum, as write() will return them, of a file with this content."""
    return _description(len(content), hashlib.new(CHECKSUM, content).hexdigest())


def _description(num_bytes: int, checksum: str) -> dict[str, Any]:
    return {"file_bytes": num_bytes, CHECKSUM: checksum}


class NewFile:
    """A file that has another name until all of it is on the disk. Who does not finish the file discards
    it. Every method raises CapacityError (the disk is full) and ConfigError, and leaves nothing behind
    then."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._checksum, self._num_bytes = hashlib.new(CHECKSUM), 0
        self._temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._descriptor = os.open(self._temporary, flags, 0o666)
        except OSError as error:
            raise _unwritable(path, error) from error
        self._is_open = True

    def add(self, pieces: Iterable[bytes | memoryview]) -> None:
        """Write more bytes."""
        with self._discarded_if_it_fails():
            for piece in pieces:
                _write_all(self._descriptor, memoryview(piece))
                self._checksum.update(piece)
                self._num_bytes += len(piece)

    def finish(self) -> dict[str, Any]:
        """Wait until all bytes are on the disk, and only then give the file its name. Returns size and
        checksum."""
        with self._discarded_if_it_fails():
            os.fdatasync(self._descriptor)
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            self._close()
            os.replace(self._temporary, self._path)
            sync_folder(self._path.parent)
        return _description(self._num_bytes, self._checksum.hexdigest())

    def discard(self) -> None:
        """Remove a file that was not finished; a finished file stays."""
        if self._is_open:
            self._close()
            self._temporary.unlink(missing_ok=True)

    @contextmanager
    def _discarded_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.discard()
            self._temporary.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise _unwritable(self._path, error) from error
            raise

    def _close(self) -> None:
        self._is_open = False
        os.close(self._descriptor)


def write(path: Path, pieces: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a file under another name, wait until all of it is on the disk, and only then rename it to
    `path`; returns size and checksum. Raises what NewFile raises."""
    file = NewFile(path)
    file.add(pieces)
    return file.finish()


def write_json(path: Path, content: object) -> dict[str, Any]:
    """write() for JSON."""
    return write(path, [json_bytes(content)])


def json_bytes(content: object) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def sync_folder(folder: Path) -> None:
    """Make sure that renames in a folder survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_leftover(path: Path) -> bool:
    """Whether a file belongs to a process that is writing here, or was when it was killed."""
    return path.name == LOCK or path.name.endswith(TEMPORARY)


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Be the only process that writes to `folder`, and remove what a process that was killed left there.

    The folder is made if it is not there. The lock is the system's (flock), so the lock ends with the
    process. Raises CheckpointError if another process has the lock, and what write() raises.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _lock_file(folder)
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        for path in folder.glob(f"*{TEMPORARY}"):
            path.unlink()
        yield
    finally:
        # The file goes while it is locked: a process that has opened it by now sees that it has no name.
        (folder / LOCK).unlink(missing_ok=True)
        os.close(descriptor)


def _lock_file(folder: Path) -> int:
    """A descriptor that holds the lock."""
    while True:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_file(descriptor, folder / LOCK):
                return descriptor
        except BlockingIOError as error:
            os.close(descriptor)
            raise CheckpointError(
                f"another process is converting to {folder}, or writing a model there; wait until it is "
                "done, or choose another folder"
            ) from error
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its owner removed the file between our two calls: try again with a new file


def _is_file(descriptor: int, path: Path) -> bool:
    """Whether `path` is still the name of the opened file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _unwritable(path: Path, error: OSError) -> PenstockError:
    kind = CapacityError if error.errno in (errno.ENOSPC, errno.EDQUOT) else ConfigError
    return kind(
        f"writing {path} failed: {error.strerror}. Files that were written before are kept: remove the "
        "cause, and run the same command again"
    )


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]
