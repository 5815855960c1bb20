"""Reads that a thread of C begins one after the other: they bring what a file holds, in the order in which
they were asked for, and what fails is read in the plain way. Their twin is DirectReader.submit()."""

from __future__ import annotations

import gc
import os
import random
from concurrent.futures import CancelledError, Future
from pathlib import Path

import pytest

from penstock.errors import CorruptFile
from penstock.memory import direct_io
from penstock.memory.direct_io import DirectReader, aligned_buffer
from penstock.memory.ordinary_file import FileIdentity
from penstock.memory.pages import PAGE
from penstock.memory.reads.block_reads import OpenFile
from penstock.memory.reads.ordered_reads import NUM_TICKETS, OrderedRead, OrderedReads

NUM_PAGES = 64
#: A file whose descriptor is none.
NOWHERE = OpenFile(Path("nowhere"), -1, True, True, FileIdentity(0, 0, 0, 0, (0, 0, 0, 0)))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(random.Random(0).randbytes(NUM_PAGES * PAGE - 100))
    return path


@pytest.fixture(autouse=True)
def queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as queued on every file system: where a read ends within the call that begins it, the
    thread takes its end all the same."""
    try:
        OrderedReads().close()
    except OSError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(direct_io, "is_queued", lambda descriptor: True)


@pytest.mark.parametrize(("part_pages", "num_parts"), [(1, 1), (3, 2), (100, 2), (2, 16)])
def test_ranges_are_what_the_file_holds(file: Path, part_pages: int, num_parts: int) -> None:
    content, chance = file.read_bytes(), random.Random(1)
    with DirectReader() as reader:
        reader.__dict__["_ordered"] = OrderedReads(part_pages * PAGE, num_parts)
        for _ in range(5):
            asked = []
            for _ in range(NUM_TICKETS):
                offset = chance.randrange(NUM_PAGES) * PAGE
                num_bytes = chance.randint(1, len(content) - offset)
                buffer = aligned_buffer(num_bytes)
                read = reader.order(file, offset, num_bytes, buffer)
                assert read is not None
                asked.append((read, offset, num_bytes, buffer))
            for read, offset, num_bytes, buffer in chance.sample(asked, len(asked)):
                assert read.result() == num_bytes and read.done() and read.exception() is None
                assert bytes(buffer[:num_bytes].numpy()) == content[offset : offset + num_bytes]
            ends = [read.ended_s for read, *_ in asked]
            if num_parts == 1:
                assert ends == sorted(ends)


def test_a_plain_read_that_is_refused_at_once_is_told_each_time() -> None:
    """A file that was changed after it was opened is refused before anything is read."""
    reads = OrderedReads()
    buffer = aligned_buffer(PAGE)
    read = reads.give(NOWHERE, 0, buffer.data_ptr(), PAGE, refuse)
    for _ in range(2):
        with pytest.raises(CorruptFile, match="has changed"):
            read.result()
    assert isinstance(read.exception(), CorruptFile) and read.done()
    reads.close()


def test_what_ends_early_is_read_in_the_plain_way_and_told(file: Path) -> None:
    with DirectReader() as reader:
        reader.order(file, 0, PAGE, aligned_buffer(PAGE))
        buffer = aligned_buffer(8 * PAGE)
        beyond = reader.order(file, (NUM_PAGES - 4) * PAGE, 8 * PAGE, buffer)
        assert beyond is not None
        with pytest.raises(CorruptFile, match="data ends at"):
            beyond.result()
        assert isinstance(beyond.exception(), CorruptFile) and beyond.done()
        after = reader.order(file, 0, 2 * PAGE, buffer)
        assert after is not None and after.result() == 2 * PAGE


def test_a_file_that_was_changed_is_not_read(file: Path) -> None:
    with DirectReader() as reader:
        first = reader.order(file, 0, PAGE, aligned_buffer(PAGE))
        assert first is not None and first.result() == PAGE
        os.utime(file, ns=(0, 5))
        after = reader.order(file, 0, PAGE, aligned_buffer(PAGE))
        assert after is not None
        with pytest.raises(CorruptFile, match="was changed"):
            after.result()


def test_what_was_read_of_a_file_that_was_changed_meanwhile_is_refused(file: Path) -> None:
    """Whoever computes with a range asks for its end before anybody gets what was computed."""
    with DirectReader() as reader:
        read = reader.order(file, 0, PAGE, aligned_buffer(PAGE))
        assert read is not None
        while not read.done():
            pass
        with file.open("r+b") as stream:
            stream.write(b"other bytes")
        with pytest.raises(CorruptFile, match="was changed"):
            read.result()


def test_a_passing_fault_is_made_good(file: Path) -> None:
    """The system refuses the read of a bad descriptor: the range comes in the plain way."""
    reads, buffer = OrderedReads(), aligned_buffer(PAGE)
    done = Future[int]()
    done.set_result(PAGE)
    read = reads.give(NOWHERE, 0, buffer.data_ptr(), PAGE, lambda: done)
    assert read.result() == PAGE and read.ticket == -1
    reads.close()


def test_what_has_not_begun_is_taken_back(file: Path) -> None:
    """A hundred parts of one range, one at a time: the ranges behind it wait."""
    with DirectReader() as reader:
        reader.__dict__["_ordered"] = OrderedReads(PAGE, 1)
        for _ in range(50):
            num_bytes, buffers = NUM_PAGES * PAGE - 100, [aligned_buffer(NUM_PAGES * PAGE) for _ in range(3)]
            reads = [reader.order(file, 0, num_bytes, buffer) for buffer in buffers]
            first, second, third = (read for read in reads if read is not None)
            if third.cancel():
                assert isinstance(third.exception(), CancelledError) and not third.cancel()
                assert not buffers[2].any()
            has_ended = second.cancel() or not second.is_given_up
            assert first.result() == num_bytes
            assert bytes(buffers[0][:num_bytes].numpy()) == file.read_bytes()
            if not has_ended:
                assert isinstance(second.exception(), CancelledError)


def test_who_was_given_up_and_is_wanted_again_is_whole(file: Path) -> None:
    with DirectReader() as reader:
        reader.__dict__["_ordered"] = OrderedReads(PAGE, 1)
        for _ in range(50):
            buffer, num_bytes = aligned_buffer(NUM_PAGES * PAGE), NUM_PAGES * PAGE - 100
            read = reader.order(file, 0, num_bytes, buffer)
            assert read is not None
            while reader_state(read) == 1:  # its first part has not begun
                pass
            read.cancel()
            read.is_given_up = False
            assert read.result() == num_bytes
            assert bytes(buffer[:num_bytes].numpy()) == file.read_bytes()


def test_reads_that_are_dropped_end_their_thread() -> None:
    """As close() does, and with what is on its way: the thread has its end, and the system its memory."""
    before = set(os.listdir("/proc/self/task"))
    reads = OrderedReads()
    with pytest.raises(CorruptFile):
        reads.give(NOWHERE, 0, aligned_buffer(PAGE).data_ptr(), PAGE, refuse).result()  # the thread runs
    own = threads_of_reads() - before
    assert len(own) == 1
    del reads
    gc.collect()
    while own & threads_of_reads():  # nobody waits for the thread
        pass


def test_closing_twice_does_no_harm() -> None:
    reads = OrderedReads()
    reads.close()
    reads.close()
    assert reads.waited_s == 0


def test_a_thread_that_can_not_be_woken_leaves_the_plain_way() -> None:
    """Somebody closed the descriptor that wakes the thread: what is asked for then comes in the plain way,
    and the reads can be closed."""
    gc.collect()  # what an earlier test dropped closes its descriptors now, and not within the comparison
    before = eventfds()
    reads = OrderedReads()
    ((_, wake),) = eventfds() - before
    other = os.dup(wake)
    os.close(wake)
    os.eventfd_write(other, 1)
    done, buffer = Future[int](), aligned_buffer(PAGE)
    done.set_result(PAGE)
    for _ in range(3):
        given = [reads.give(NOWHERE, 0, buffer.data_ptr(), PAGE, lambda: done) for _ in range(NUM_TICKETS)]
        assert [read.result() for read in given] == [PAGE] * NUM_TICKETS
    reads.close()
    os.close(other)


def refuse() -> Future[int]:
    raise CorruptFile("the file has changed")


def eventfds() -> set[tuple[str, int]]:
    """The descriptors of this process that wake somebody, with what tells one from a later one of the same
    number."""
    found = set()
    for info in Path("/proc/self/fdinfo").iterdir():
        try:
            text = info.read_text()
        except OSError:  # it was closed
            continue
        if "eventfd-count" in text:
            found.add((text.partition("eventfd-id:")[2].strip(), int(info.name)))
    return found


def threads_of_reads() -> set[str]:
    """Ids of the threads of this process that begin reads."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text() == "penstock-reads\n":
                found.add(task.name)
        except OSError:  # the thread has ended
            continue
    return found


def reader_state(read: OrderedRead) -> int:
    return int(read.reads.states[read.ticket])
