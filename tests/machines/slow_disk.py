"""A disk that is slower than this machine's: a control group in which reads have a limit. Needs root rights
and cgroup v1's blkio controller."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_CONTROLLER = Path("/sys/fs/cgroup/blkio")


def can_slow_disks() -> bool:
    return os.geteuid() == 0 and (_CONTROLLER / "cgroup.procs").exists()


@contextlib.contextmanager
def slow_disk(name: str, folder: Path, bytes_per_s: int) -> Iterator[Path]:
    """A group whose processes read from the disk of a folder at most so fast, together: enter_group() makes
    the calling process one of them. All of them have to end before the `with`."""
    device, group = os.stat(folder).st_dev, _CONTROLLER / name
    group.mkdir(exist_ok=True)
    try:
        limit = f"{os.major(device)}:{os.minor(device)} {bytes_per_s}"
        (group / "blkio.throttle.read_bps_device").write_text(limit)
        yield group
    finally:
        group.rmdir()


def enter_group(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))
