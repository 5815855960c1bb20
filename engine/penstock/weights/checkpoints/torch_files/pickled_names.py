"""What the names in a pickle stand for. A pickle asks for functions and classes by name, and this file has
all names that mean something here. Nothing is ever imported or called by a name that a file gives.

Checkpoints hold more than tensors: arguments of the training, states of random numbers, settings of an
optimizer. Their classes become Inert, which has a name and nothing else. Names of Python's own library are
refused unless they are known to be harmless data: no checkpoint has a reason to ask for os.system."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.weights.checkpoints.torch_files.faults import Hostile, Malformed
from penstock.weights.checkpoints.torch_files.stored_tensor import (
    NEWER_DTYPES,
    STORAGES,
    Storage,
    StoredTensor,
    size_of,
)


@dataclass(frozen=True, slots=True)
class Inert:
    """Something of a pickle that is no tensor. `what` is its name, for messages alone."""

    what: str


@dataclass(frozen=True, slots=True)
class StorageType:
    dtype: str


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype without a storage class of its own."""

    dtype: str


@dataclass(frozen=True, slots=True)
class Known:
    """A function of this file that stands for a function of torch or Python."""

    call: Callable[..., Any]


#: Beginnings of the names of tensors that are not stored as plain elements.
OTHER_TENSORS = ("torch._utils._rebuild_", "torch._tensor._rebuild_", "torch.storage.")
#: Names of Python's library (None: any name of the module) that data of a training may hold.
HARMLESS: dict[str, frozenset[str] | None] = {
    "argparse": frozenset({"Namespace"}),
    "types": frozenset({"SimpleNamespace"}),
    "collections": frozenset({"OrderedDict", "defaultdict", "deque", "Counter"}),
    "_codecs": frozenset({"encode"}),
    "_io": frozenset({"BytesIO"}),
    "functools": frozenset({"partial"}),
    "copyreg": frozenset({"_reconstructor"}),
    "copy_reg": frozenset({"_reconstructor"}),
    "datetime": None,
    "decimal": frozenset({"Decimal"}),
    "pathlib": None,
    "pathlib._local": None,
    "uuid": frozenset({"UUID"}),
}
_PLAIN = {"set", "frozenset", "object", "list", "dict", "tuple", "int", "float", "bool", "str", "bytes"}
HARMLESS |= dict.fromkeys(
    ("builtins", "__builtin__"), frozenset(_PLAIN | {"bytearray", "complex", "slice", "range", "long"})
)
#: Modules of Python 2's library that Python 3 has under other names.
OLDER_MODULES = {"__builtin__", "copy_reg", "commands", "os2", "popen2", "new"}
#: More characters of a name than a message shows.
MAX_NAME = 120


def find(module: object, name: object) -> Inert | StorageType | Dtype | Known:
    """What a name stands for. Raises Hostile and Malformed."""
    if not isinstance(module, str) or not isinstance(name, str):
        raise Malformed("a name in the pickle is not a text")
    whole = f"{module}.{name}"
    if whole in KNOWN:
        return Known(KNOWN[whole])
    if module in ("torch", "torch.storage", "torch.cuda") and name in STORAGES:
        return StorageType(STORAGES[name])
    if module == "torch" and name in NEWER_DTYPES:
        return Dtype(NEWER_DTYPES[name])
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in OLDER_MODULES:
        allowed = HARMLESS.get(module, frozenset())
        if allowed is not None and name not in allowed:
            raise Hostile(f"asks for {whole[:MAX_NAME]!r}")
    return Inert(whole[:MAX_NAME])


def storage_of(saved_id: object) -> Storage | Inert:
    """The storage that a persistent id names: ("storage", type, key, location, number of elements). The
    location (a device) has no meaning here. Raises Malformed."""
    if not isinstance(saved_id, tuple) or not saved_id or len(saved_id) > 6:
        raise Malformed("a persistent id is not what torch.save writes")
    if saved_id[0] == "module":  # the source code of a class, which older versions of torch saved
        return Inert("the source code of a class")
    if saved_id[0] != "storage" or len(saved_id) < 5 or not isinstance(saved_id[2], str):
        raise Malformed("a persistent id is not what torch.save writes")
    if len(saved_id) == 6 and saved_id[5] is not None:
        raise Malformed("a storage is a part of another storage, as only torch before 0.4 wrote it")
    if not isinstance(saved_id[1], StorageType):
        return Inert("a storage of another kind of elements")
    return Storage(saved_id[2], saved_id[1].dtype, size_of(saved_id[4]))


def _rebuild_tensor(
    storage: object, offset: object, shape: object, stride: object, *_: object
) -> StoredTensor | Inert:
    """The other arguments are whether the tensor has a gradient, its hooks and its metadata."""
    if isinstance(storage, Inert):
        return Inert(f"torch._utils._rebuild_tensor of {storage.what}")
    return StoredTensor.of(storage, offset, shape, stride)


def _rebuild_tensor_v3(
    storage: object,
    offset: object,
    shape: object,
    stride: object,
    has_gradient: object,
    hooks: object,
    dtype: object,
    *_: object,
) -> StoredTensor | Inert:
    """A view of an untyped storage."""
    if not isinstance(dtype, Dtype):
        return Inert("torch._utils._rebuild_tensor_v3 of an unknown dtype")
    return StoredTensor.of(storage, offset, shape, stride, dtype.dtype)


def _rebuild_parameter(data: object, *_: object) -> object:
    return data


def _rebuild_from_type(function: object, kind: object, arguments: object, *_: object) -> object:
    """A tensor with attributes, which mean nothing here."""
    if not isinstance(function, Known) or function.call not in _TENSORS or not isinstance(arguments, tuple):
        return Inert("torch._tensor._rebuild_from_type_v2")
    return function.call(*arguments)


def _ordered_dict(pairs: object = (), *_: object) -> dict[Any, Any]:
    """Python 2 gives the pairs as a list. The list is emptied: many dicts of one list would take more memory
    than the file."""
    made: dict[Any, Any] = {}
    if pairs == ():
        return made
    if not isinstance(pairs, list) or any(not isinstance(pair, list | tuple) for pair in pairs):
        raise Malformed("an OrderedDict is not made of pairs")
    if any(len(pair) != 2 for pair in pairs):
        raise Malformed("an OrderedDict is not made of pairs")
    made.update({pair[0]: pair[1] for pair in pairs if is_key(pair[0])})
    pairs.clear()
    return made


def is_key(value: object) -> bool:
    """Whether a value is kept as the key of a dict. Tuples are not: hashing a deep one overflows the stack.
    Nor are long numbers: many of them can be made to collide."""
    return isinstance(value, str) or (type(value) is int and abs(value) < 1 << 32)


_TENSORS = (_rebuild_tensor, _rebuild_tensor_v3)
KNOWN: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "collections.OrderedDict": _ordered_dict,
    "torch.Size": lambda sizes=(), *_: sizes,
}
