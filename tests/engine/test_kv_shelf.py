"""Files of keys and values on disk: what a shelf finds after anything that can happen to its files."""

from __future__ import annotations

import dataclasses
import errno
import json
import mmap
import os
import random
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from killed_engines import kill_some

from penstock.cache.disk.block_order import BlockOrder
from penstock.cache.disk.kv_folder import KVFolder, shrink, summaries
from penstock.cache.disk.record import NO_KEY, RECORD_BYTES, Record, pack, unpack_all
from penstock.cache.disk.shelf import BLOCKS, INDEX, Shelf
from penstock.errors import ConfigError
from penstock.memory.pages import PAGE
from penstock.weights.checkpoints.kept_checksums import KeptChecksums, Unwanted

ABOUT = {"fingerprint": "0a" * 32}


def key_of(number: int) -> bytes:
    return (number + 1).to_bytes(32, "big")


def content_of(number: int, num_bytes: int = PAGE) -> memoryview:
    """On a page boundary, as direct writes want it."""
    buffer = mmap.mmap(-1, num_bytes)
    buffer.write(random.Random(number).randbytes(num_bytes))
    return memoryview(buffer)


def add(shelf: Shelf, number: int, parent: bytes = NO_KEY) -> None:
    shelf.add(key_of(number), parent, content_of(number))


def found(shelf: Shelf, number: int) -> bool | None:
    """Whether a block is there; if it is, its bytes must be those that were written."""
    buffer = memoryview(mmap.mmap(-1, PAGE))
    is_whole = shelf.read(key_of(number), buffer)
    assert not is_whole or buffer == content_of(number)
    return is_whole


def test_blocks_are_found_again_and_only_the_owner_can_read_them(tmp_path: Path) -> None:
    with Shelf.open(tmp_path / "s", ABOUT, PAGE) as shelf:
        for number in range(5):
            add(shelf, number)
        shelf.remove(key_of(3))
        add(shelf, 7)  # in the place of the one that was removed
    with Shelf.open(tmp_path / "s", ABOUT, PAGE) as shelf:
        assert [found(shelf, number) for number in (0, 1, 2, 3, 4, 7)] == [True] * 3 + [None] + [True] * 2
        assert (tmp_path / "s" / BLOCKS).stat().st_size == 5 * PAGE
    for path in (tmp_path / "s").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700
    with Shelf.open(tmp_path / "s", {"fingerprint": "0b" * 32}, PAGE) as other:
        assert len(other) == 0, "blocks of another fingerprint"


def test_a_shelf_opens_on_a_full_disk_and_can_be_made_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Shelf.open(tmp_path / "s", ABOUT, PAGE) as shelf:
        add(shelf, 1)
    _fill_the_disk(monkeypatch)
    with Shelf.open(tmp_path / "s", ABOUT, PAGE) as shelf:
        assert shelf.is_writer and found(shelf, 1)
        assert shelf.evict(gives_back=True)


def test_a_disk_without_room_for_a_shelf_keeps_no_half_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        _fill_the_disk(full)
        with pytest.raises(ConfigError, match="No space left on device"):
            Shelf.open(tmp_path / "s", ABOUT, PAGE)
        (tmp_path / "model").write_bytes(b"weights")
        KeptChecksums(tmp_path / "weights.json").of([tmp_path / "model"])
        assert not list(tmp_path.rglob("*.part"))
    with Shelf.open(tmp_path / "s", ABOUT, PAGE) as shelf:
        assert shelf.is_writer, "who could not open the shelf does not hold its lock"


def _fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file can be written by name any more."""

    def dump(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(json, "dump", dump)


@pytest.mark.parametrize("name", [INDEX, BLOCKS])
def test_any_change_of_a_file_costs_blocks_and_never_gives_wrong_ones(name: str, tmp_path: Path) -> None:
    """found() compares the bytes of each block that a shelf gives."""
    with Shelf.open(tmp_path / "s", ABOUT, PAGE) as shelf:
        for number in range(6):
            add(shelf, number, key_of(number - 1) if number else NO_KEY)
    path = tmp_path / "s" / name
    whole, index = path.read_bytes(), (tmp_path / "s" / INDEX).read_bytes()
    dice, num_lost = random.Random(name), 0
    for _ in range(100):
        (tmp_path / "s" / INDEX).write_bytes(index)
        path.write_bytes(_changed(whole, dice))
        with Shelf.open(tmp_path / "s", ABOUT, PAGE) as shelf:
            states = [found(shelf, number) for number in range(6)]
            num_lost += states != [True] * 6
            assert [found(shelf, number) for number in range(6)] == [state or None for state in states]
            add(shelf, 8)
            assert found(shelf, 8)
    assert num_lost > 60, "most changes hit something"


def _changed(whole: bytes, dice: random.Random) -> bytes:
    content, at = bytearray(whole), dice.randrange(len(whole))
    kind = dice.choice(("flip", "cut", "swap", "zeros"))
    if kind == "flip":
        content[at] ^= 1 << dice.randrange(8)
    elif kind == "cut":
        del content[at:]
    else:  # pieces that are there, at other places
        size, other = dice.choice((RECORD_BYTES, 512, PAGE)), dice.randrange(len(whole))
        start, source = at // size * size, other // size * size
        piece = bytes(size) if kind == "zeros" else whole[source : source + size]
        content[start : start + size] = piece[: len(content) - start]
    return bytes(content)


def test_a_record_counts_only_whole_and_at_its_own_place() -> None:
    made = Record(key_of(1), key_of(2), 2**64 - 3, 1.5, 2)
    head, nothing = bytes(RECORD_BYTES), bytes(RECORD_BYTES)
    assert list(unpack_all(head + nothing * 2 + pack(made))) == [made]
    assert list(unpack_all(head + nothing + pack(made))) == []
    for size in range(88):  # the checksum lies behind these bytes
        assert list(unpack_all(head + nothing * 2 + pack(made)[:size].ljust(RECORD_BYTES, b"\0"))) == []


def test_two_writers(tmp_path: Path) -> None:
    with Shelf.open(tmp_path / "s", ABOUT, PAGE) as first:
        add(first, 1)
        with Shelf.open(tmp_path / "s", ABOUT, PAGE) as second:
            assert first.is_writer and not second.is_writer and found(second, 1)
            first.evict()
            add(first, 2)  # at the place of the first block
            assert found(second, 1) is False, "the second one has an old index"
            assert found(first, 2)
        assert not shrink(tmp_path / "s", 1, float("inf"))
    with Shelf.open(tmp_path / "s", ABOUT, PAGE) as again:
        assert again.is_writer and found(again, 2)


@pytest.fixture
def small_files() -> Iterator[int]:
    """Files have at most so many bytes."""
    before, limit = resource.getrlimit(resource.RLIMIT_FSIZE), 6 * PAGE
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_without_room_keeps_what_it_has(tmp_path: Path, small_files: int) -> None:
    with Shelf.open(tmp_path / "s", ABOUT, PAGE) as shelf:
        for number in range(6):
            add(shelf, number)
        with pytest.raises(OSError, match="File too large"):
            add(shelf, 6)
        assert found(shelf, 6) is None and all(found(shelf, number) for number in range(6))
        shelf.evict()
        add(shelf, 6)
        assert found(shelf, 6)


def test_a_write_that_ends_early_keeps_nothing(tmp_path: Path) -> None:
    def half(descriptor: int, parts: list[memoryview], offset: int) -> int:
        size = len(parts[0]) if len(parts[0]) < PAGE else PAGE // 2
        return os.pwrite(descriptor, bytes(parts[0][:size]), offset)

    Shelf.open(tmp_path / "s", ABOUT, PAGE).close()
    flags = os.O_RDWR
    shelf = Shelf.open(tmp_path / "s", ABOUT, PAGE, half)
    with shelf, open(os.open(tmp_path / "s" / BLOCKS, flags), "rb"):
        with pytest.raises(OSError):
            add(shelf, 1)
        assert found(shelf, 1) is None and len(shelf) == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("aur"), st.integers(0, 11)), max_size=60))
def test_a_block_gives_way_before_those_in_front_of_it(actions: list[tuple[str, int]]) -> None:
    """Blocks are a tree: block n goes on from block (n - 1) // 2. The plain twin looks at all blocks."""
    order, used = BlockOrder(), dict[int, float]()
    for now, (action, number) in enumerate(actions):
        if action == "a" and number not in used:
            parent = key_of((number - 1) // 2) if number else NO_KEY
            order.add(Record(key_of(number), parent, 0, float(now), number))
            used[number] = now
        elif action == "u":
            order.use(key_of(number), float(now))
            used |= {number: now} if number in used else {}
        elif action == "r" and order.next_out is not None:
            out = int.from_bytes(order.next_out.key, "big") - 1
            assert out in used and not any((other - 1) // 2 == out for other in used if other)
            order.remove(key_of(out))
            del used[out]
        assert len(order) == len(used) and (order.next_out is None) == (not used)
        again = BlockOrder(order)  # as it is found at the next start
        assert {record.key for record in again} == {record.key for record in order}


def test_the_block_that_was_used_least_recently_gives_way_of_whatever_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(1000, 100000, 100))
    monkeypatch.setattr("time.time", lambda: float(next(clock)))
    folder = KVFolder(tmp_path, 6 * PAGE)
    with folder.open_shelf("old", ABOUT, PAGE) as old:
        for number in range(4):
            add(old, number)
        old.use([key_of(0)])
    with folder.open_shelf("new", ABOUT, PAGE) as new:
        for number in range(10, 15):
            assert folder.make_room(new, PAGE)
            add(new, number)
        assert [each.num_blocks for each in summaries(tmp_path)] == [5, 1]
        assert folder.make_room(new, PAGE)
        assert [each.folder.name for each in summaries(tmp_path)] == ["new"], "the last of the old gave way"
        add(new, 15)
        assert folder.make_room(new, PAGE) and found(new, 10) is None and found(new, 11)
    with Shelf.open(tmp_path / "new", ABOUT, PAGE) as new:
        assert [found(new, number) for number in range(10, 16)] == [None] + [True] * 5
    smaller = KVFolder(tmp_path, 2 * PAGE)
    with smaller.open_shelf("new", ABOUT, PAGE) as new:
        assert len(new) == 2 and found(new, 15)
        blocks = (tmp_path / "new" / BLOCKS).stat()
        assert blocks.st_blocks * 512 <= blocks.st_size, "room was given back where the file system can"


def test_an_other_processes_shelf_counts_and_stays(tmp_path: Path) -> None:
    with KVFolder(tmp_path, 10 * PAGE).open_shelf("other", ABOUT, PAGE) as other:
        for number in range(3):
            add(other, number)
        folder = KVFolder(tmp_path, 4 * PAGE)
        with folder.open_shelf("own", ABOUT, PAGE) as own:
            for number in range(3):
                assert folder.make_room(own, PAGE)
                add(own, number)
            assert len(own) == 1 and len(other) == 3


def test_checksums_that_nobody_wants_end_at_once(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.truncate(64 << 30)  # zeros that take no disk, and minutes to be read
    kept = KeptChecksums(tmp_path / "weights.json")
    with pytest.raises(Unwanted):
        kept.of([file], lambda: False)
    assert kept.known([file]) is None


@pytest.mark.parametrize("model", ["Llama", "LFM2"])
def test_engines_that_are_killed_leave_whole_blocks_alone(model: str, tmp_path: Path) -> None:
    counts = list(kill_some(2, tmp_path, seed=3, model=model))
    assert len(counts) == 2


def test_a_summary_says_what_a_shelf_holds(tmp_path: Path) -> None:
    about = ABOUT | {"model": "m"}
    with Shelf.open(tmp_path / "s", about, PAGE) as shelf:
        add(shelf, 1)
    (tmp_path / "nothing").mkdir()
    (summary,) = summaries(tmp_path)
    assert dataclasses.asdict(summary) | {"oldest_s": 0, "newest_s": 0} == {
        "folder": tmp_path / "s",
        "about": about,
        "num_blocks": 1,
        "num_bytes": PAGE,
        "oldest_s": 0,
        "newest_s": 0,
        "num_pieces": 0,
    }
