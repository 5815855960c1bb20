"""Ordinary files of a model: how they are opened, and how one sees later that they are still the same."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, NamedTuple

from penstock.errors import CorruptFile


class FileIdentity(NamedTuple):
    """What the system says of a file whose bytes stay as they are."""

    inode: int
    num_bytes: int
    modified_ns: int
    #: When anything of the file changed: its bytes, its names, its rights.
    changed_ns: int
    #: Rights, number of names, owner and group.
    rights: tuple[int, int, int, int]

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        rights = status.st_mode, status.st_nlink, status.st_uid, status.st_gid
        return cls(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, rights)

    def check(self, path: Path, now: FileIdentity) -> None:
        """Raises CorruptFile if bytes of the file at `path` may have been changed since. Other rights, a new
        name or a removed one are no harm: a deleted file is there as long as somebody has it open."""
        if self == now:
            return
        is_as_long_and_old = self[:3] == now[:3]
        if is_as_long_and_old and (self.rights != now.rights or _has_moved(path, now.inode)):
            return
        if is_as_long_and_old:  # whether the bytes are the same, only reading all of them could tell
            raise CorruptFile(
                f"{path} was changed while it was in use: its change time (ctime) is new. `touch -a`, an "
                "extended attribute or a security label do that, and so do other bytes under the old date. "
                "Start again; put the model back before if its bytes are others"
            )
        raise CorruptFile(
            f"{path} was changed while it was in use, so its weights may not be the model's any more; "
            "put the model back and start again"
        )


def _has_moved(path: Path, inode: int) -> bool:
    try:
        return path.stat().st_ino != inode
    except OSError:
        return True


def identity_of(path: Path) -> FileIdentity:
    """Of the file that a path leads to now. Raises CorruptFile."""
    try:
        return FileIdentity.of(path.stat())
    except OSError as error:
        raise unreadable(path, error) from error


def open_ordinary(path: Path, flags: int = 0) -> tuple[int, os.stat_result]:
    """A descriptor for reading, and what the system says of the file. To open or read a named pipe or a
    device could wait for ever, or never end. Raises OSError, and CorruptFile for anything but a file."""
    # Without O_NONBLOCK, opening a named pipe waits for a writer. For files the flag means nothing.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        check_ordinary(path, status.st_mode)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    os.set_blocking(descriptor, True)
    return descriptor, status


def check_ordinary(path: Path, mode: int) -> None:
    """Raises CorruptFile for what is neither file nor folder."""
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise CorruptFile(
            f"{path} is no ordinary file but a {_kind(mode)}; put the model's own file in its place"
        )


def open_bytes(path: Path, buffering: int = -1) -> BinaryIO:
    """path.open("rb") for an ordinary file. Raises OSError and CorruptFile."""
    return open(path, "rb", buffering, opener=lambda *_: open_ordinary(path)[0])


def unreadable(path: Path, error: OSError) -> CorruptFile:
    """The error for a file that can't be read."""
    return CorruptFile(f"{path} can't be read: {error.strerror}")


def _kind(mode: int) -> str:
    kinds = (stat.S_ISFIFO, "named pipe"), (stat.S_ISSOCK, "socket")
    return next((name for is_kind, name in kinds if is_kind(mode)), "device")
