"""Processes within a limit of memory, which counts the page cache, too (a cgroup; needs root). And how far
the kernel reads ahead in files that are opened meanwhile."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


class LimitedProcess:
    """A process that reads lines and answers each with a line, and that has at most so many bytes."""

    def __init__(self, name: str, limit_bytes: int, words: Sequence[str]) -> None:
        self._group = group = _group(f"penstock-{name}-{os.getpid()}", limit_bytes)
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: _enter(group),
        )

    def ask(self, line: str) -> str:
        """Raises RuntimeError if the process has ended, for instance because it took too much memory."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        if answer := self._process.stdout.readline():
            return answer
        raise RuntimeError(f"the process ended with {self._process.wait()}: {self._process.args}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for _ in range(20):  # the kernel may still be clearing up
            with contextlib.suppress(OSError):
                self._group.rmdir()
                break
            time.sleep(0.1)


def _group(name: str, limit_bytes: int) -> Path:
    is_v2 = (CGROUPS / "cgroup.controllers").exists()
    if is_v2:
        (CGROUPS / "cgroup.subtree_control").write_text("+memory")
    group = CGROUPS / name if is_v2 else CGROUPS / "memory" / name
    group.mkdir()
    (group / ("memory.max" if is_v2 else "memory.limit_in_bytes")).write_text(str(limit_bytes))
    return group


def _enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def forget_pages(path: Path) -> None:
    """Drop a file's pages from the page cache. Those that another process has read count for that process,
    and would be there for all."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def read_ahead(path: Path, kib: int | None) -> Iterator[None]:
    """Meanwhile, the kernel reads so far ahead in files that are opened on the disk of `path`. None: as far
    as the machine is set up for. A file keeps what it was opened with."""
    device = os.stat(path).st_dev
    folder = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    queue = next(each / "queue" for each in (folder, folder.parent) if (each / "queue").exists())
    setting = queue / "read_ahead_kb"
    before = setting.read_text()
    try:
        if kib is not None:
            setting.write_text(str(kib))
        yield
    finally:
        if kib is not None:
            setting.write_text(before)
