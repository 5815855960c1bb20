"""Direct reads against plain ones, and with a preadv that misbehaves."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from penstock.cache.disk.shelf import Shelf
from penstock.errors import CorruptFile
from penstock.memory import direct_io
from penstock.memory.direct_io import (
    PAGE,
    POPULATED_BYTES,
    DirectReader,
    PopulatedAhead,
    Preadv,
    aligned_buffer,
    round_up,
)
from penstock.memory.reads import patient, queued_reads
from penstock.memory.reads.queued_reads import QueuedReads
from penstock.weights.checkpoints.open_files import OpenFiles
from penstock.weights.checkpoints.tensor_entry import TensorEntry

PREADV = os.preadv


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Some pages and a ragged end."""
    path = tmp_path / "data"
    path.write_bytes(random.Random(0).randbytes(37 * PAGE + 123))
    return path


def test_buffers_are_whole_zeroed_pages() -> None:
    buffer = aligned_buffer(3 * PAGE + 1)
    assert buffer.numel() == 4 * PAGE and buffer.data_ptr() % PAGE == 0 and not buffer.any()
    assert aligned_buffer(0).numel() == 0


@pytest.mark.parametrize("preadv", [None, os.preadv], ids=["queued", "threads"])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("block_bytes", [PAGE, 4 * PAGE, 1 << 20])
def test_any_range_is_what_the_file_holds(
    file: Path, block_bytes: int, depth: int, preadv: Preadv | None
) -> None:
    content, rng = file.read_bytes(), random.Random(1)
    with DirectReader(block_bytes, depth, preadv) as reader:
        ranges = [(0, len(content)), (36 * PAGE, PAGE + 123), (0, 0), (5 * PAGE, 1)]
        for _ in range(20):
            offset = rng.randrange(37) * PAGE
            ranges.append((offset, rng.randint(1, len(content) - offset)))
        buffers = [aligned_buffer(num_bytes) for _, num_bytes in ranges]
        reads = [
            reader.submit(file, offset, num_bytes, buffer)
            for (offset, num_bytes), buffer in zip(ranges, buffers, strict=True)
        ]
        for (offset, num_bytes), buffer, read in zip(ranges, buffers, reads, strict=True):
            assert read.result() == num_bytes
            assert bytes(buffer[:num_bytes].numpy()) == content[offset : offset + num_bytes]


def test_a_file_system_without_direct_reads(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags)

    monkeypatch.setattr(os, "open", refuse)
    buffer = aligned_buffer(2 * PAGE)
    with DirectReader() as reader:
        assert not reader.is_direct(file)
        reader.submit(file, PAGE, PAGE, buffer).result()
    assert bytes(buffer[:PAGE].numpy()) == file.read_bytes()[PAGE : 2 * PAGE]


class ChangedPreadv:
    """Returns at most `most` bytes, or fails at an offset; counts what is in flight."""

    def __init__(self, most: int = 1 << 30, failing_offset: int = -1, cut_at: int = 1 << 60) -> None:
        self.most, self.failing_offset, self.cut_at = most, failing_offset, cut_at
        self.offsets: list[int] = []
        self.lock = threading.Lock()

    def __call__(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        with self.lock:
            self.offsets.append(offset)
        if offset == self.failing_offset:
            raise OSError(errno.EIO, "Input/output error")
        count = PREADV(descriptor, views, offset)
        return max(0, min(count, self.most, self.cut_at - offset))


def test_short_reads_go_on_from_a_page_boundary(file: Path) -> None:
    content, preadv = file.read_bytes(), ChangedPreadv(most=3 * PAGE)
    buffer = aligned_buffer(len(content))
    with DirectReader(1 << 20, 2, preadv) as reader:
        reader.submit(file, 0, len(content), buffer).result()
    assert bytes(buffer[: len(content)].numpy()) == content
    assert preadv.offsets == list(range(0, 37 * PAGE + 123, 3 * PAGE))


def test_read_errors_name_the_file_and_come_once_all_blocks_are_done(file: Path) -> None:
    preadv = ChangedPreadv(failing_offset=4 * PAGE)
    with DirectReader(2 * PAGE, 2, preadv) as reader:
        buffer = aligned_buffer(20 * PAGE)
        with pytest.raises(CorruptFile, match=r"data failed: Input/output error"):
            reader.submit(file, 0, 20 * PAGE, buffer).result()
        preadv.failing_offset = -1  # a passing fault: the next read of the same file works
        assert reader.submit(file, 0, 20 * PAGE, buffer).result() == 20 * PAGE


class InterruptedPreadv:
    """os.preadv that fails with each of these errors first."""

    def __init__(self, *errors: int) -> None:
        self.errors = list(errors)

    def __call__(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        if self.errors:
            raise OSError(self.errors.pop(), "an error that passes")
        return PREADV(descriptor, views, offset)


@pytest.mark.parametrize("error", [errno.EINTR, errno.EAGAIN, errno.ENOMEM])
def test_errors_that_pass_are_tried_again(
    error: int, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By threads, by the queue of the system, of a tensor, and of a block on a shelf; also where it is found
    out whether the file system has direct reads. One that never passes is told."""
    monkeypatch.setattr(patient, "PAUSES_S", (0.0, 0.0, 0.0))
    content, buffer = file.read_bytes(), aligned_buffer(38 * PAGE)
    with DirectReader(3 * PAGE, 2, InterruptedPreadv(error, error)) as reader:
        assert reader.submit(file, 0, len(content), buffer).result() == len(content)
    assert bytes(buffer[: len(content)].numpy()) == content
    with (
        DirectReader(3 * PAGE, 2, InterruptedPreadv(*4 * [error])) as reader,
        pytest.raises(CorruptFile, match="data failed: an error that passes"),
    ):
        reader.submit(file, 0, PAGE, buffer).result()
    with monkeypatch.context() as patch:
        ChangedEnds(patch, error=error)
        with DirectReader(1 << 20, 2) as reader:
            assert reader.submit(file, 0, len(content), buffer.zero_()).result() == len(content)
    assert bytes(buffer[: len(content)].numpy()) == content
    patched = InterruptedPreadv(error)
    monkeypatch.setattr(os, "preadv", patched)
    with DirectReader() as reader:
        is_direct = reader.is_direct(file)
        assert not (is_direct and patched.errors)
    patched.errors = [error]
    entry, target = TensorEntry("a", file, PAGE, "U8", (PAGE,), PAGE), torch.zeros(PAGE, dtype=torch.uint8)
    files = OpenFiles({})
    files.read_into(target, entry, 0)
    files.close()
    assert bytes(target.numpy()) == content[PAGE : 2 * PAGE] and not patched.errors
    with Shelf.open(tmp_path / "shelf", {"fingerprint": "00" * 32}, PAGE) as shelf:
        shelf.add(b"k" * 32, b"\0" * 32, memoryview(buffer.numpy().data)[:PAGE])
        patched.errors = [error]
        assert shelf.read(b"k" * 32, memoryview(aligned_buffer(PAGE).numpy().data)) and not patched.errors


@pytest.mark.parametrize("cut_at", [0, 3 * PAGE, 3 * PAGE + 100])
def test_a_file_that_ends_early(file: Path, cut_at: int) -> None:
    with DirectReader(1 << 20, 1, ChangedPreadv(cut_at=cut_at)) as reader:
        read = reader.submit(file, 0, 20 * PAGE, aligned_buffer(20 * PAGE))
        with pytest.raises(CorruptFile, match=rf"data ends at {cut_at}"):
            read.result()


class ChangedEnds:
    """Ends of queued reads, as a system might report them: at most `most` bytes come at a time, or a read
    fails with `error`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int = 1 << 30, error: int = 0) -> None:
        self.most, self.error, self.num_ends, self._wait = most, error, 0, QueuedReads.wait
        monkeypatch.setattr(direct_io, "is_queued", lambda descriptor: True)
        monkeypatch.setattr(QueuedReads, "wait", lambda reads: self.ends(reads))

    def ends(self, reads: QueuedReads) -> list[tuple[int, int]]:
        ends = self._wait(reads)
        self.num_ends += len(ends)
        return [(key, -self.error or min(result, self.most)) for key, result in ends]


def test_queued_reads_that_come_short_or_fail(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, buffer = file.read_bytes(), aligned_buffer(38 * PAGE)
    ends = ChangedEnds(monkeypatch, most=3 * PAGE)
    with DirectReader(1 << 20, 2) as reader:
        assert reader.submit(file, 0, len(content), buffer).result() == len(content)
        assert bytes(buffer[: len(content)].numpy()) == content and ends.num_ends == 13
        ends.most = 0
        with pytest.raises(CorruptFile, match="data ends at 4096"):
            reader.submit(file, PAGE, 9 * PAGE, buffer).result()
        ends.error, ends.most = errno.EIO, 1 << 30
        failing = ChangedPreadv(failing_offset=0)
        with monkeypatch.context() as patch, pytest.raises(CorruptFile, match=r"data failed: Input/output"):
            patch.setattr(os, "preadv", failing)
            reader.submit(file, 0, 20 * PAGE, buffer).result()
        buffer.zero_()  # a fault that has passed when the range is read the plain way
        assert reader.submit(file, 0, len(content), buffer).result() == len(content)
        assert bytes(buffer[: len(content)].numpy()) == content


@pytest.mark.parametrize("fails", ["submit", "read"])
def test_close_waits_for_blocks_that_are_read_in_the_plain_way(
    fails: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their buffers may be freed as soon as close() has returned."""
    reading, closed, was_closed = threading.Event(), threading.Event(), list[bool]()

    def preadv(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        reading.set()
        was_closed.append(closed.wait(0.3))  # for what must not come
        return PREADV(descriptor, views, offset)

    def refuse(*arguments: object) -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    ChangedEnds(monkeypatch, error=errno.EIO)
    reader, buffer = DirectReader(1 << 20, 2), aligned_buffer(PAGE)
    assert reader.is_direct(file)
    monkeypatch.setattr(os, "preadv", preadv)
    if fails == "submit":
        monkeypatch.setattr(QueuedReads, "submit", refuse)
    submitting = threading.Thread(target=reader.submit, args=(file, 0, PAGE, buffer))
    submitting.start()
    assert reading.wait(60)
    reader.close()
    closed.set()
    submitting.join()
    assert was_closed == [False] and bytes(buffer.numpy()) == file.read_bytes()[:PAGE]


@pytest.mark.parametrize(("ends", "expected"), [([1, 1, 0], True), ([0], True), ([1] * 8, False)])
def test_a_read_that_has_ended_when_somebody_looks_is_tried_again(
    ends: list[int], expected: bool, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QueuedReads, "submit", lambda reads, orders: len(orders))
    monkeypatch.setattr(QueuedReads, "wait", lambda reads, least: [(0, 1)] * ends.pop(0))
    monkeypatch.setattr(queued_reads, "_tried", {})
    with file.open("rb") as opened:
        assert queued_reads.is_queued(opened.fileno()) == expected and not ends


def test_reads_that_the_system_does_not_queue(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read at once; where it has no queue at all, on threads."""

    def refuse(*arguments: object) -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    content, buffer = file.read_bytes(), aligned_buffer(38 * PAGE)
    with monkeypatch.context() as patch:
        patch.setattr(direct_io, "is_queued", lambda descriptor: True)
        patch.setattr(QueuedReads, "submit", refuse)
        with DirectReader(3 * PAGE, 2) as reader:
            reader.submit(file, 0, len(content), buffer).result()
    assert bytes(buffer[: len(content)].numpy()) == content
    buffer.zero_()
    monkeypatch.setattr(QueuedReads, "__init__", refuse)
    with DirectReader(3 * PAGE, 2) as reader:
        reader.submit(file, 0, len(content), buffer).result()
    assert bytes(buffer[: len(content)].numpy()) == content


@pytest.mark.parametrize("keeps_times", [False, True])
def test_a_file_that_is_changed_while_it_is_read(file: Path, keeps_times: bool) -> None:
    """In the middle of a range of several blocks, by somebody who may even put the times back."""
    before = file.stat()

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = os.preadv(descriptor, buffers, offset)
        if offset == PAGE:
            with file.open("r+b") as stream:
                stream.write(b"other bytes")
            if keeps_times:
                os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        return count

    with DirectReader(PAGE, 1, preadv) as reader:
        assert reader.submit(file, 0, PAGE, aligned_buffer(PAGE)).result() == PAGE
        with pytest.raises(CorruptFile, match=f"{file} was changed while it was in use"):
            reader.submit(file, 0, 4 * PAGE, aligned_buffer(4 * PAGE)).result()


def test_a_file_of_which_only_the_change_time_is_new(file: Path) -> None:
    """Its bytes may be others, too, so it is refused; the error says what else it can be."""
    with DirectReader() as reader:
        assert reader.submit(file, 0, PAGE, aligned_buffer(PAGE)).result() == PAGE
        os.utime(file, ns=(1, file.stat().st_mtime_ns))  # as `touch -a` does
        with pytest.raises(
            CorruptFile, match="was changed while it was in use: its change time .* Start again"
        ):
            reader.submit(file, 0, PAGE, aligned_buffer(PAGE)).result()


def test_a_file_with_other_rights_or_names_is_the_same_file(file: Path) -> None:
    with DirectReader() as reader:

        def reads() -> bool:
            return reader.submit(file, 0, PAGE, aligned_buffer(PAGE)).result() == PAGE

        assert reads()
        file.chmod(0o400)
        assert reads()
        file.with_name("second name").hardlink_to(file)
        assert reads()
        file.with_name("second name").unlink()
        file.rename(file.with_name("moved"))
        assert reads()
        file.with_name("moved").unlink()
        assert reads()


@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.safetensors"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(path))
    with DirectReader() as reader, pytest.raises(CorruptFile, match=f"{path} (is no ordinary|can't be read)"):
        reader.submit(path, 0, PAGE, aligned_buffer(PAGE))


def test_a_file_that_was_changed_or_is_gone(file: Path, tmp_path: Path) -> None:
    buffer = aligned_buffer(PAGE)
    with DirectReader() as reader:
        with pytest.raises(CorruptFile, match="nothing can't be read: No such file"):
            reader.submit(tmp_path / "nothing", 0, PAGE, buffer)
        reader.submit(file, 0, PAGE, buffer).result()
        content = file.read_bytes()
        replacement = tmp_path / "replacement"
        replacement.write_bytes(bytes(len(content)))
        replacement.rename(file)  # the old file lives on while it is open
        reader.submit(file, 0, PAGE, buffer).result()
        assert bytes(buffer.numpy()) == content[:PAGE]
    with DirectReader() as reader:
        reader.submit(file, 0, PAGE, buffer).result()
        with file.open("r+b") as stream:
            stream.truncate(PAGE)
        with pytest.raises(CorruptFile, match="was changed"):
            reader.submit(file, 0, PAGE, buffer)


def test_blocks_are_served_in_order_and_ranges_overlap(file: Path) -> None:
    """The next range begins while the last block of the one before is still in flight."""
    entered, may_end = threading.Event(), threading.Event()

    def preadv(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        if offset == PAGE:
            entered.set()
            assert may_end.wait(10)
        return os.preadv(descriptor, views, offset)

    with DirectReader(PAGE, 2, preadv) as reader:
        first = reader.submit(file, 0, 2 * PAGE, aligned_buffer(2 * PAGE))
        second = reader.submit(file, 2 * PAGE, 3 * PAGE, aligned_buffer(3 * PAGE))
        assert entered.wait(10)
        assert second.result(10) == 3 * PAGE
        assert not first.done()
        may_end.set()
        assert first.result(10) == 2 * PAGE


def test_closing_waits_for_what_was_submitted(file: Path) -> None:
    reader = DirectReader(PAGE, 2)
    buffer = aligned_buffer(30 * PAGE)
    read = reader.submit(file, 0, 30 * PAGE, buffer)
    reader.close()
    assert read.done() and bytes(buffer.numpy()) == file.read_bytes()[: 30 * PAGE]


def test_our_own_mistakes_are_refused(file: Path) -> None:
    with DirectReader() as reader:
        with pytest.raises(ValueError, match="whole pages"):
            reader.submit(file, 1, PAGE, aligned_buffer(PAGE))
        with pytest.raises(ValueError, match="whole pages"):
            reader.submit(file, 0, PAGE + 1, aligned_buffer(PAGE))
        with pytest.raises(ValueError, match="whole pages"):
            reader.submit(file, 0, 10, torch.empty(2 * PAGE, dtype=torch.uint8)[1:])
    with pytest.raises(ValueError, match="depth"):
        DirectReader(depth=0)
    assert round_up(0) == 0 and round_up(1) == PAGE == round_up(PAGE)


def resident_pages(buffer: torch.Tensor) -> int:
    """By the system's own account."""
    num_pages = buffer.numel() // PAGE
    found = (ctypes.c_ubyte * num_pages)()
    address = ctypes.c_void_p(buffer.data_ptr())
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(buffer.numel()), found) == 0
    return sum(page & 1 for page in found)


def test_pages_are_there_before_they_are_written() -> None:
    buffer = aligned_buffer(3 * POPULATED_BYTES + PAGE)
    buffer[:5] = 7
    assert resident_pages(buffer) < buffer.numel() // PAGE
    pages = PopulatedAhead(buffer)
    pages.wait()
    assert resident_pages(buffer) == buffer.numel() // PAGE
    assert buffer[:5].tolist() == [7] * 5 and not buffer[5:].any()
