"""Files of torch.save, read without running anything in them."""

from __future__ import annotations

import argparse
import collections
import datetime
import os
import pathlib
import random
import struct
import subprocess
import sys
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hostile_pickles import (
    ATTACKS,
    CANARY,
    NONSENSE,
    WRONG_TENSORS,
    Writer,
    call,
    dictionary,
    good,
    number,
    program,
    tensor,
    text,
    write_legacy,
    write_zip,
)
from mutated_files import read_mutated
from torch import nn

from penstock.errors import CheckpointError, CorruptFile, UnsafeCheckpoint, WrongTensor
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.torch_files.torch_file import read_torch_file

FORMS = [(is_zip, protocol) for is_zip in (True, False) for protocol in (2, 3, 4, 5)]


def save(value: object, path: Path, is_zip: bool = True, protocol: int = 2) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=is_zip, pickle_protocol=protocol)
    return path


def read_all(file: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a file, whole and row by row."""
    found = read_torch_file(file).tensors
    with Checkpoint(file.parent, {}, found) as checkpoint:
        tensors = {name: checkpoint.read(name) for name in found}
        for name, whole in tensors.items():
            rows = [checkpoint.read_rows(name, row, row + 1) for row in range(len(whole))]
            assert torch.equal(torch.cat(rows), whole), name
    return tensors


class Settings:
    """A class that only this process has."""

    def __init__(self) -> None:
        self.depth, self.inside = 3, {"a": [1, 2]}


def various() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    shared, large, parameter = torch.randn(6, 4), torch.randn(12, 8), nn.Parameter(torch.randn(3))
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    return {
        "float32": torch.randn(5, 3),
        "float16": torch.randn(5, 3).half(),
        "bfloat16": torch.randn(5, 3).bfloat16(),
        "float64": torch.randn(5, 3).double(),
        "int8": torch.randint(-128, 128, (5, 3), dtype=torch.int8),
        "parameter": nn.Parameter(torch.randn(2, 2)),
        "parameter with attributes": parameter,
        "shared": shared,
        "tied": shared,
        "rows of shared": shared[2:5],
        "turned": shared.t(),
        "cut": large[2:10, 1:7],
        "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
        "one row": large[3:4, ::1],
        "every second row": large[::2],
        "一二.weight": torch.randn(2),
    }


@pytest.mark.parametrize(("is_zip", "protocol"), FORMS)
def test_every_form_of_torch_save(is_zip: bool, protocol: int, tmp_path: Path) -> None:
    expected = various()
    found = read_all(save(expected, tmp_path / "x.bin", is_zip, protocol))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value.detach()), name


@pytest.mark.parametrize(("is_zip", "protocol"), FORMS)
def test_training_states_beside_the_tensors_are_left_alone(
    is_zip: bool, protocol: int, tmp_path: Path
) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    state = {
        "module": module.state_dict(),
        "args": argparse.Namespace(lr=1e-4, path=pathlib.PurePosixPath("/x"), own=Settings()),
        "optimizer": torch.optim.Adam(module.parameters()).state_dict(),
        "rng": [random.getstate(), np.random.get_state(), torch.get_rng_state()],
        "torch_rng_state": torch.get_rng_state(),
        "array": np.arange(4.0),
        "counts": collections.defaultdict(list, {"a": [1]}),
        "when": datetime.datetime(2020, 11, 1),
        "sets": {1, 2} | set("ab"),
        "frozen": frozenset("ab"),
        "device": torch.device("cpu"),
        "size": torch.Size([1, 2]),
        "dtype": torch.float16,
        "number": 1 << 100,
        "raw": bytearray(b"abc"),
        "mp_world_size": 2,
    }
    file = save(state, tmp_path / "mp_rank_00_model_states.pt", is_zip, protocol)
    content = read_torch_file(file)
    assert content.numbers["mp_world_size"] == 2
    expected = {name: value for name, value in module.state_dict().items() if value.dim()}
    found = content.tensors
    assert found.keys() == module.state_dict().keys()
    with Checkpoint(tmp_path, {}, found) as checkpoint:
        assert all(torch.equal(checkpoint.read(name), value) for name, value in expected.items())


@pytest.mark.parametrize("key", ["state_dict", "module", "model", "model_state_dict"])
def test_the_dict_of_a_framework_is_found(key: str, tmp_path: Path) -> None:
    weight = torch.randn(2, 2)
    inside = {"language_model": {"encoder": collections.OrderedDict(weight=weight)}}
    content = {key: inside, "optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}}, "epoch": 3}
    found = read_all(save(content, tmp_path / "x.pt"))
    assert list(found) == ["language_model.encoder.weight"]
    assert torch.equal(found["language_model.encoder.weight"], weight)


def test_python_2_and_old_torch(tmp_path: Path) -> None:
    """Python 2 gives an OrderedDict its pairs as a list, and texts as bytes; torch before 0.4 has
    _rebuild_tensor."""
    old = tensor().replace(b"_rebuild_tensor_v2", b"_rebuild_tensor")
    pairs = b"](](U\x06weight" + old + b"ee"
    for body in (call("collections.OrderedDict", pairs),):
        for write in (write_zip, write_legacy):
            found = read_all(write(tmp_path / "x", program(body)))
            assert found["weight"].tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_dtypes_that_nobody_computes_with_are_named_when_they_are_read(tmp_path: Path) -> None:
    values = {"mask": torch.ones(2, 2, dtype=torch.bool), "ids": torch.arange(4)}
    values |= {
        "turned": torch.ones(3, 2, dtype=torch.uint8).t(),
        "f8": torch.zeros(3).to(torch.float8_e4m3fn),
    }
    found = read_torch_file(save(values, tmp_path / "x.bin")).tensors
    assert {name: entry.dtype for name, entry in found.items()} == {
        "mask": "BOOL", "ids": "I64", "turned": "U8", "f8": "F8_E4M3",
    }  # fmt: skip
    with Checkpoint(tmp_path, {}, found) as checkpoint:
        for name, entry in found.items():
            with pytest.raises(WrongTensor, match=f"{name} in .*x.bin has dtype {entry.dtype}"):
                checkpoint.read(name)


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (nn.Linear(2, 2), CorruptFile, "torch.nn.modules.linear.Linear, and no dict of tensors.*state_dict"),
        ([torch.zeros(2)], CorruptFile, "a list without tensors"),
        ({}, CorruptFile, "a dict without tensors"),
        ({"a": torch.zeros(1).expand(1 << 40)}, CorruptFile, r"repeats the 1 elements.*clone\(\)"),
        ({"a": torch.zeros(1000, 1000)[:, 1]}, CorruptFile, r"scattered over 999001 elements.*clone\(\)"),
        ({"a": torch.zeros(3, 3).to_sparse()}, WrongTensor, "a in .* is no tensor of plain elements"),
    ],
)  # fmt: skip
def test_what_is_no_dict_of_plain_tensors(
    value: object, kind: type[CheckpointError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        read_torch_file(save(value, tmp_path / "x.bin"))


# ---- attacks


@pytest.fixture(params=["zip", "legacy"])
def write(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Writer:
    """Writes a pickle in one of torch's forms. The working folder is where a canary would be."""
    monkeypatch.chdir(tmp_path)
    return write_zip if request.param == "zip" else write_legacy


def test_the_hand_made_pickle_is_one_that_torch_reads(write: Writer, tmp_path: Path) -> None:
    file = write(tmp_path / "x", good())
    assert torch.equal(torch.load(file)["good"], read_all(file)["good"])


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_are_refused(attack: str, write: Writer, tmp_path: Path) -> None:
    for body in (good(("attack", ATTACKS[attack])), program(ATTACKS[attack])):
        file = write(tmp_path / "x", body)
        with pytest.raises(UnsafeCheckpoint, match=f"(?s){file}.*Nothing of the file was run"):
            read_torch_file(file)
    assert not (tmp_path / CANARY).exists()


def test_the_attacks_are_real(tmp_path: Path) -> None:
    """Python's own pickle runs the first of them."""
    code = f"import pickle; pickle.loads({program(ATTACKS['os.system'])!r})"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert (tmp_path / CANARY).exists()


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_takes_neither_memory_nor_stack(name: str, write: Writer, tmp_path: Path) -> None:
    """Some of it is harmless beside a tensor: a value that nobody needs."""
    tracemalloc.start()
    try:
        for body in (good(("a", NONSENSE[name])), program(NONSENSE[name])):
            file = write(tmp_path / "x", body)
            try:
                assert list(read_torch_file(file).tensors) == ["good"]
            except CheckpointError as error:
                assert str(file) in str(error)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", WRONG_TENSORS)
def test_tensors_that_the_file_does_not_have(name: str, write: Writer, tmp_path: Path) -> None:
    file = write(tmp_path / "x", good(("wrong", WRONG_TENSORS[name])))
    with pytest.raises(CorruptFile, match=f"{file} can't be read"):
        read_torch_file(file)


def test_too_many_opcodes(tmp_path: Path) -> None:
    with pytest.raises(CorruptFile, match="more than 1000000 opcodes"):
        read_torch_file(write_zip(tmp_path / "x", program(b"N0" * 500_001)))


def test_memory_does_not_grow_beyond_the_opcodes(tmp_path: Path) -> None:
    """A list that is recalled into many dicts, and many small objects that the memo keeps."""
    pairs = b"](" + (b"]" + text("k") + b"aNa") * 2_000 + b"eq\x00"
    copies = b"](" + b"ccollections\nOrderedDict\nh\x00\x85R" * 5_000 + b"e"
    bodies = [
        dictionary(("p", pairs), ("c", copies)),
        b"(" + b"}\x94" * 50_000 + b"t",
        b"(" + b"])\x94" * 40_000 + b"t",
    ]
    for body in bodies:
        file = write_zip(tmp_path / "x", good(("a", body)))
        tracemalloc.start()
        try:
            read_torch_file(file)
        except CheckpointError:
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 20 << 20


def test_shared_dicts_are_gone_through_once(tmp_path: Path) -> None:
    """Twenty levels of which each has the next one ten times are 10^20 names."""
    body = dictionary(("w", tensor()))
    for level in range(20):
        place = bytes([level])
        body = (
            b"}("
            + text("0")
            + body
            + b"q"
            + place
            + b"".join(text(str(i)) + b"h" + place for i in range(9))
            + b"u"
        )
    started = time.perf_counter()
    with pytest.raises(CorruptFile):
        read_torch_file(write_zip(tmp_path / "x", program(body)))
    assert time.perf_counter() - started < 60  # not a matter of speed: it would never end


def test_a_name_that_comes_twice(tmp_path: Path) -> None:
    twice = dictionary(("a.b", tensor()), ("a", dictionary(("b", tensor()))))
    with pytest.raises(CorruptFile, match="a.b is there twice"):
        read_torch_file(write_zip(tmp_path / "x", program(twice)))


# ---- zip files


def test_compressed_entries_are_refused(tmp_path: Path) -> None:
    file = write_zip(tmp_path / "x", good(), compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(CorruptFile, match="data.pkl.*compressed"):
        read_torch_file(file)
    bomb = tmp_path / "bomb"
    with zipfile.ZipFile(bomb, "w", compression=zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(64 << 20))
    with pytest.raises(CorruptFile, match="compressed"):
        read_torch_file(bomb)


def test_big_endian_files_are_refused(tmp_path: Path) -> None:
    file = write_zip(tmp_path / "x", good())
    file.write_bytes(file.read_bytes().replace(b"little", b"big..."))
    with pytest.raises(CorruptFile, match="big-endian"):
        read_torch_file(file)
    with pytest.raises(CorruptFile, match="big-endian"):
        read_torch_file(write_legacy(tmp_path / "x", good(), little_endian=False))


def test_a_torchscript_program_is_named(tmp_path: Path) -> None:
    module = torch.jit.script(nn.Linear(2, 2))
    module.save(str(tmp_path / "x.pt"))
    with pytest.raises(CorruptFile, match="TorchScript"):
        read_torch_file(tmp_path / "x.pt")


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_file_cut_anywhere_is_refused(is_zip: bool, tmp_path: Path) -> None:
    file = save({"a": torch.randn(8, 8), "b": torch.randn(300)}, tmp_path / "x.bin", is_zip)
    whole = file.read_bytes()
    for length in range(0, len(whole) - 1, 7):
        file.write_bytes(whole[:length])
        with pytest.raises(CorruptFile, match="x.bin"):
            read_torch_file(file)


def patched(file: Path, marker: bytes, offset: int, new: bytes, which: int = 0) -> None:
    """Overwrite bytes at `offset` from the occurrence number `which` of a marker."""
    raw, at = bytearray(file.read_bytes()), -1
    for _ in range(which + 1):
        at = raw.index(marker, at + 1)
    raw[at + offset : at + offset + len(new)] = new
    file.write_bytes(raw)


def test_entries_over_one_another_are_refused(tmp_path: Path) -> None:
    """Directory entries of two storages with one place, and with places inside each other."""
    two = good(("other", tensor(key="1")))
    content = struct.pack("<4f", 1, 2, 3, 4)
    file = write_zip(tmp_path / "x", two, {"0": content, "1": content})
    assert len(read_torch_file(file).tensors) == 2
    with zipfile.ZipFile(file) as archive:
        place = archive.getinfo("archive/data/0").header_offset
    patched(file, b"PK\x01\x02", 42, struct.pack("<I", place), which=4)
    with pytest.raises(CorruptFile, match="another name in the directory|over another entry"):
        read_torch_file(file)


def test_names_twice_in_a_zip_are_refused(tmp_path: Path) -> None:
    file = write_zip(tmp_path / "x", good(), {"0": struct.pack("<4f", 1, 2, 3, 4)})
    with zipfile.ZipFile(file, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("archive/data/0", struct.pack("<4f", 5, 6, 7, 8))
    with pytest.raises(CorruptFile, match="data/0' twice"):
        read_torch_file(file)


@pytest.mark.parametrize(
    ("marker", "offset", "new"),
    [
        (b"PK\x05\x06", 12, b"\xff\xff\xff\xff"),  # size of the directory
        (b"PK\x05\x06", 16, b"\xf0\xff\xff\xff"),  # place of the directory
        (b"PK\x01\x02", 20, b"\xff\xff\xff\x00"),  # packed size
        (b"PK\x01\x02", 28, b"\xff\xff"),  # length of a name
        (b"PK\x01\x02", 30, b"\xff\xff"),  # length of the extra field
        (b"PK\x01\x02", 42, b"\x01\x00\x00\x00"),  # place of an entry
        (b"PK\x01\x02", 8, b"\x01"),  # encrypted
        (b"PK\x03\x04", 28, b"\xff\xff"),  # the local header's extra field
        (b"PK\x03\x04", 0, b"XX"),
    ],
)
def test_a_directory_that_makes_no_sense(marker: bytes, offset: int, new: bytes, tmp_path: Path) -> None:
    file = write_zip(tmp_path / "x", good())
    patched(file, marker, offset, new)
    with pytest.raises(CorruptFile, match="zip directory|its entry|can't be read as a file"):
        read_torch_file(file)


def test_sizes_of_64_bits(tmp_path: Path) -> None:
    file = tmp_path / "x"
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in (("data.pkl", good()), ("data/0", struct.pack("<4f", 1, 2, 3, 4))):
            with archive.open(zipfile.ZipInfo(f"archive/{name}"), "w", force_zip64=True) as stream:
                stream.write(content)
    assert read_all(file)["good"].tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_a_sparse_file_larger_than_4_gib(tmp_path: Path) -> None:
    """Places beyond 32 bits, in a file that takes no room on the disk."""
    size = (1 << 32) + 4096
    shape = number(size // 4) + b"\x85"
    body = program(
        dictionary(
            ("large", tensor(shape=shape, stride=b"K\x01\x85", key="big", num_items=number(size // 4))),
            ("good", tensor()),
        )
    )
    file = tmp_path / "x"
    with file.open("wb") as stream, zipfile.ZipFile(stream, "w", allowZip64=True) as archive:
        archive.writestr("archive/data.pkl", body)
        info = zipfile.ZipInfo("archive/data/big")
        info.file_size = info.compress_size = size
        info.header_offset, info.CRC = stream.tell(), 0
        stream.write(info.FileHeader(zip64=True))
        stream.seek(size, os.SEEK_CUR)
        archive.filelist.append(info)
        archive.NameToInfo[info.filename] = info
        archive.start_dir = stream.tell()
        archive.writestr("archive/data/0", struct.pack("<4f", 1, 2, 3, 4))
    found = read_torch_file(file).tensors
    with Checkpoint(tmp_path, {}, found) as checkpoint:
        assert checkpoint.read("good").tolist() == [[1.0, 2.0], [3.0, 4.0]]
        assert checkpoint.read_rows("large", size // 4 - 2, size // 4).tolist() == [0.0, 0.0]


def test_mutated_files_are_read_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of the files that mutated_files.py makes, as a script, by the hundred thousand."""
    monkeypatch.chdir(tmp_path)
    results = read_mutated("torch", tmp_path, range(1000))
    assert results["CorruptFile"] > 250 and results["UnsafeCheckpoint"] > 50 and results["read"] > 50
