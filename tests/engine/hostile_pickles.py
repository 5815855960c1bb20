"""Pickles that try to run code or to take memory, for the tests of the reader of torch's files."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: A name in a pickle that creates a file if it is called.
CANARY = "penstock_canary"


def text(value: str) -> bytes:
    """BINUNICODE."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def call(name: str, *arguments: bytes) -> bytes:
    """GLOBAL name, a tuple of arguments, REDUCE."""
    module, _, function = name.rpartition(".")
    return f"c{module}\n{function}\n".encode() + b"(" + b"".join(arguments) + b"tR"


def storage(kind: str = "FloatStorage", key: str = "0", num_items: bytes = b"K\x04") -> bytes:
    return b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu") + num_items + b"tQ"


def tensor(
    offset: bytes = b"K\x00", shape: bytes = b"K\x02K\x02\x86", stride: bytes = b"K\x02K\x01\x86", **of: Any
) -> bytes:
    """A call of _rebuild_tensor_v2."""
    hooks = call("collections.OrderedDict")
    return call("torch._utils._rebuild_tensor_v2", storage(**of), offset, shape, stride, b"\x89", hooks)


def number(value: int) -> bytes:
    """LONG1."""
    raw = pickle.encode_long(value)
    return b"\x8a" + bytes([len(raw)]) + raw


def dictionary(*pairs: tuple[str, bytes]) -> bytes:
    return b"}(" + b"".join(text(name) + value for name, value in pairs) + b"u"


def program(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


def write_zip(path: Path, body: bytes, storages: dict[str, bytes] | None = None, **options: Any) -> Path:
    """A zip file with data.pkl and storages; by default one with four float32."""
    storages = {"0": struct.pack("<4f", 1, 2, 3, 4)} if storages is None else storages
    with zipfile.ZipFile(path, "w", **options) as archive:
        archive.writestr("archive/data.pkl", body)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/version", b"3\n")
        for key, content in storages.items():
            archive.writestr(f"archive/data/{key}", content)
    return path


def write_legacy(path: Path, body: bytes, little_endian: bool = True) -> Path:
    """The form before torch 1.6 with the same storage."""
    stream = io.BytesIO()
    system = {"protocol_version": 1001, "little_endian": little_endian, "type_sizes": {"short": 2}}
    for value in (0x1950A86A20F9469CFC6C, 1001, system):
        pickle.dump(value, stream, 2)
    stream.write(body.replace(b"tQ", b"NtQ"))  # a persistent id has one more part
    pickle.dump(["0"], stream, 2)
    stream.write(struct.pack("<q4f", 4, 1, 2, 3, 4))
    path.write_bytes(stream.getvalue())
    return path


def _deep(open_: bytes, close: bytes, depth: int = 10_000) -> bytes:
    return open_ * depth + b"N" + close * depth


#: Pickles that ask for code. Each has a good tensor as well.
ATTACKS: dict[str, bytes] = {
    "os.system": call("os.system", text(f"touch {CANARY}")),
    "posix.system": call("posix.system", text(f"touch {CANARY}")),
    "nt.system": call("nt.system", text("dir")),
    "builtins.eval": call("builtins.eval", text(f"open('{CANARY}', 'w')")),
    "builtins.exec": call("builtins.exec", text(f"open('{CANARY}', 'w')")),
    "__builtin__.eval": call("__builtin__.eval", text(f"open('{CANARY}', 'w')")),
    "builtins.open": call("builtins.open", text(CANARY), text("w")),
    "subprocess.Popen": call("subprocess.Popen", text(f"touch {CANARY}")),
    "getattr chain": call("builtins.getattr", b"cos\npath\n", text("os")),
    "getattr of torch": call("builtins.getattr", b"ctorch\nhub\n", text("load")),
    "dotted name": b"\x80\x04\x8c\x02os\x8c\x0bpath.system\x93" + text(f"touch {CANARY}") + b"\x85R",
    "no call, only the name": b"cos\nsystem\n",
    "importlib": call("importlib.import_module", text("os")),
    "runpy": call("runpy.run_path", text(CANARY)),
    "pickle in pickle": call("pickle.loads", b"C\x02N."),
    "marshal": call("marshal.loads", b"C\x01N"),
    "types.CodeType": call("types.CodeType"),
    "ctypes": call("ctypes.CDLL", text("libc.so.6")),
    "NEWOBJ": b"csubprocess\nPopen\n" + text(f"touch {CANARY}") + b"\x85\x81",
    "NEWOBJ_EX": b"csubprocess\nPopen\n" + text(f"touch {CANARY}") + b"\x85}\x92",
    "INST": b"(" + text(f"touch {CANARY}") + b"ios\nsystem\n",
    "OBJ": b"(cos\nsystem\n" + text(f"touch {CANARY}") + b"o",
    "EXT1": b"\x82\x01",
    "EXT2": b"\x83\x01\x00",
    "EXT4": b"\x84\x01\x00\x00\x00",
    "PERSID": b"Pstorage\n",
    "NEXT_BUFFER": b"\x97",
    "a call of a number": b"K\x07)R",
    "a call of a tensor": tensor() + b")R",
    "a call of a text": text("os.system") + b")R",
    "an object of a dict": b"})\x81",
}

#: Pickles that make no sense, or that claim sizes which they don't have.
NONSENSE: dict[str, bytes] = {
    "a long text": b"X\xff\xff\xff\xffabc",
    "a text of 2^63 bytes": b"\x8d" + struct.pack("<Q", 1 << 63),
    "bytes of 2^63 bytes": b"\x8e" + struct.pack("<Q", 1 << 63),
    "a bytearray of 2^62 bytes": b"\x96" + struct.pack("<Q", 1 << 62),
    "a text of -1 bytes": b"T\xff\xff\xff\xff",
    "a number of 2^31 - 1 bytes": b"\x8b\xff\xff\xff\x7f",
    "a number of -1 bytes": b"\x8b\xff\xff\xff\xff",
    "a number of 4 KiB": b"\x8b\x00\x10\x00\x00" + b"\x01" * 4096,
    "a name without an end": b"c" + b"a" * 10_000,
    "a mark that is not there": b"t",
    "a value that is not there": b"\x86",
    "a value below a mark": b"N(a",
    "a place of the memo that is empty": b"j\xff\xff\xff\xff",
    "a key without a value": b"}(" + text("a") + b"u",
    "items of a number": b"K\x01(NNu",
    "an element of a text": text("a") + b"Na",
    "a protocol of 200": b"\x80\xc8N",
    "an opcode of protocol 0": b"I7\n",
    "a frame and nothing": b"\x95" + struct.pack("<Q", 1 << 63),
    "deep tuples": _deep(b"(", b"t"),
    "deep lists": _deep(b"](", b"e"),
    "deep dicts": _deep(b"}(" + text("a"), b"u"),
    "deep tuples as a key": b"}" + _deep(b"(", b"t") + b"Ns",
    "a list of itself": b"]q\x00h\x00a",
    "a dict of itself": dictionary(("a", b"N"))[:-1] + b"uq\x00" + text("b") + b"h\x00s",
    "a persistent id that is a number": b"K\x01Q",
    "a persistent id of one part": text("storage") + b"\x85Q",
    "a storage of a negative size": b"}" + text("a") + tensor(num_items=b"J\xff\xff\xff\xff") + b"s",
}

#: Tensors that are not what the file has, in a dict with one tensor.
WRONG_TENSORS: dict[str, bytes] = {
    "a shape beyond the storage": tensor(shape=b"K\x03K\x02\x86"),
    "an offset beyond the storage": tensor(offset=b"K\x01"),
    "an offset of 2^60": tensor(offset=number(1 << 60)),
    "a negative offset": tensor(offset=b"J\xff\xff\xff\xff"),
    "a negative size": tensor(shape=b"J\xff\xff\xff\xffK\x02\x86"),
    "a size of 2^100": tensor(shape=number(1 << 100) + b"K\x02\x86"),
    "sizes whose product is 2^120": tensor(
        shape=number(1 << 40) * 3 + b"\x87", stride=b"K\x00K\x00K\x00\x87"
    ),
    "a negative stride": tensor(stride=b"J\xff\xff\xff\xffK\x01\x86"),
    "strides of 0": tensor(shape=b"J\x00\x00\x00\x7fK\x02\x86", stride=b"K\x00K\x01\x86"),
    "a stride of a text": tensor(stride=text("a") + b"K\x01\x86"),
    "a stride of True": tensor(stride=b"\x88K\x01\x86"),
    "more strides than sizes": tensor(stride=b"K\x02K\x02K\x01\x87"),
    "a thousand axes": tensor(shape=b"(" + b"K\x01" * 1000 + b"t", stride=b"(" + b"K\x01" * 1000 + b"t"),
    "a storage that is not there": tensor(key="7"),
    "a storage of another size": tensor(num_items=b"K\x08"),
    "a storage of another dtype": tensor(kind="DoubleStorage"),
    "too few arguments": call("torch._utils._rebuild_tensor_v2", storage()),
    "no storage": call("torch._utils._rebuild_tensor_v2", b"N", b"K\x00", b"K\x02\x85", b"K\x01\x85"),
}


def good(*more: tuple[str, bytes]) -> bytes:
    """A pickle with the tensor "good" and other values."""
    return program(dictionary(("good", tensor()), *more))


Writer = Callable[[Path, bytes], Path]
