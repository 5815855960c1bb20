"""`penstock kv` on folders with blocks of invented models."""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import pytest

from penstock.cache.disk.kv_folder import summaries
from penstock.cache.disk.piece_numbers import PieceNumbers
from penstock.cache.disk.record import NO_KEY
from penstock.cache.disk.shelf import BLOCKS, Shelf
from penstock.memory.pages import PAGE
from penstock_server import cli


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two models: blocks 0 to 3 are older than blocks 10 and 11."""
    clock = iter(range(1000, 9000, 100))
    monkeypatch.setattr("time.time", lambda: float(next(clock)))
    for name, numbers in (("old", range(4)), ("new", range(10, 12))):
        about = {"fingerprint": "0c" * 32, "model": f"/models/{name}"}
        with Shelf.open(tmp_path / name, about, PAGE) as shelf:
            for number in numbers:
                content = mmap.mmap(-1, PAGE)
                content.write(bytes([number]) * PAGE)
                shelf.add((number + 1).to_bytes(32, "big"), NO_KEY, memoryview(content))
    return tmp_path


def sizes(folder: Path) -> dict[str, int]:
    return {each.folder.name: each.num_blocks for each in summaries(folder)}


def test_what_lies_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["kv", "list", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "4 blocks  old" in text and "of /models/new" in text and "2 models" in text
    assert cli.main(["kv", "list", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(each["name"], each["num_bytes"]) for each in told] == [("new", 2 * PAGE), ("old", 4 * PAGE)]


def test_recurrent_states_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = {"fingerprint": "0d" * 32, "model": "/models/hybrid", "state_blocks": 3}
    pieces = PieceNumbers(first=9, num_pieces=3)
    with Shelf.open(tmp_path / "hybrid", about, PAGE) as shelf:
        for key in ((1).to_bytes(32, "big"), *pieces.keys(bytes(32)), *pieces.keys(b"other")):
            shelf.add(key, NO_KEY, memoryview(mmap.mmap(-1, PAGE)))
    assert cli.main(["kv", "list", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "7 blocks  hybrid" in text and "6 of them are 2 recurrent states" in text
    assert cli.main(["kv", "list", str(tmp_path), "--json"]) == 0
    assert [each["num_states"] for each in json.loads(capsys.readouterr().out)] == [2]
    assert cli.main(["kv", "verify", str(tmp_path)]) == 0
    assert "7 blocks are whole" in capsys.readouterr().out


def test_damaged_blocks_are_found_and_removed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["kv", "verify", str(folder)]) == 0
    path = folder / "old" / BLOCKS
    content = bytearray(path.read_bytes())
    content[2 * PAGE + 5] ^= 1
    path.write_bytes(content)
    capsys.readouterr()
    assert cli.main(["kv", "verify", str(folder)]) == 1
    assert "old: 3 blocks are whole, 1 are damaged" in capsys.readouterr().out
    assert cli.main(["kv", "verify", str(folder), "--json"]) == 0
    assert {"name": "old", "whole": 3, "damaged": 0} in json.loads(capsys.readouterr().out)


def test_what_was_used_least_recently_goes_first(folder: Path) -> None:
    assert cli.main(["kv", "prune", str(folder), "--keep", str(4 * PAGE)]) == 0
    assert sizes(folder) == {"old": 2, "new": 2}
    assert cli.main(["kv", "prune", str(folder), "--keep", str(PAGE)]) == 0
    assert sizes(folder) == {"new": 1}
    assert cli.main(["kv", "prune", str(folder), "--keep", "0"]) == 0
    assert sizes(folder) == {}


def test_what_a_server_uses_stays(folder: Path) -> None:
    with Shelf.open(folder / "old", {"fingerprint": "0c" * 32}, PAGE) as shelf:
        assert shelf.is_writer
        assert cli.main(["kv", "prune", str(folder), "--keep", "0"]) == 1
    assert sizes(folder) == {"old": 4}


def test_wrong_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["kv", "prune", str(folder)]) == 2
    assert cli.main(["kv", "list", str(folder), "--keep", "1GiB"]) == 2
    with pytest.raises(SystemExit):
        cli.main(["kv", "prune", str(folder), "--keep", "much"])
    assert "--keep: 'much' is no size; write for example 2GiB" in capsys.readouterr().err
    assert cli.main(["kv", "list", str(folder / "nothing")]) == 2
