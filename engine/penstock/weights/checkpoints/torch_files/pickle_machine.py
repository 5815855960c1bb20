"""PickleMachine: an interpreter of the opcodes that picklers write for a dictionary of tensors. Python's own
pickle is not used: the machine has no opcode that imports or calls anything but the functions of
pickled_names.py, and no opcode that takes more memory than the bytes that were read allow.

Memory: an opcode makes at most one small object, so MAX_OPCODES bounds the objects, whatever lengths and
counts the pickle claims. Nothing here goes into objects recursively, so neither depth nor cycles matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, BinaryIO

from penstock.weights.checkpoints.torch_files.faults import Hostile, Malformed
from penstock.weights.checkpoints.torch_files.pickle_bytes import LITERALS, PickleBytes
from penstock.weights.checkpoints.torch_files.pickled_names import (
    Dtype,
    Inert,
    Known,
    StorageType,
    find,
    is_key,
    storage_of,
)
from penstock.weights.checkpoints.torch_files.stored_tensor import Storage

#: A tensor takes about 45 opcodes, so this is enough for 20,000 tensors in a file.
MAX_OPCODES = 1_000_000
#: The protocols of Python's pickle.
MAX_PROTOCOL = 5
STOP = ord(".")
#: Opcodes that torch.save never writes: extension registry, classes of Python 1, buffers outside the file.
REFUSED = {
    0x82: "EXT1", 0x83: "EXT2", 0x84: "EXT4", ord("i"): "INST", ord("o"): "OBJ", ord("P"): "PERSID",
    0x97: "NEXT_BUFFER", 0x98: "READONLY_BUFFER", ord("2"): "DUP",
}  # fmt: skip


class PickleMachine:
    """Runs one pickle."""

    def __init__(self, source: PickleBytes) -> None:
        self.source = source
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self.memo: dict[int, Any] = {}
        #: The storages that the pickle names, by their keys.
        self.storages: dict[str, Storage] = {}

    def run(self) -> Any:
        """The value that the pickle describes. Raises Malformed and Hostile."""
        source, stack, literals, actions = self.source, self.stack, LITERALS, ACTIONS
        for _ in range(MAX_OPCODES):
            code = source.take(1)[0]
            if code in literals:
                stack.append(literals[code](source))
            elif code in actions:
                actions[code](self)
            elif code == STOP:
                return self.pop()
            elif code in REFUSED:
                raise Hostile(f"has the opcode {REFUSED[code]}, which torch.save never writes")
            else:
                raise Malformed(f"the pickle has the opcode {code:#x}, which torch.save does not write")
        raise Malformed(f"the pickle has more than {MAX_OPCODES} opcodes")

    def pop(self) -> Any:
        if len(self.stack) <= (self._marks[-1] if self._marks else 0):
            raise Malformed("the pickle takes a value that is not there")
        return self.stack.pop()

    def top(self, kind: type) -> Any:
        """The last value, which stays there. None for Inert, which takes no content."""
        value = self.pop()
        self.stack.append(value)
        if not isinstance(value, kind | Inert):
            raise Malformed(f"the pickle changes a {type(value).__name__} as if it were a {kind.__name__}")
        return None if isinstance(value, Inert) else value

    def mark(self) -> None:
        self._marks.append(len(self.stack))

    def pop_to_mark(self) -> list[Any]:
        if not self._marks:
            raise Malformed("the pickle takes values to a mark that is not there")
        start = self._marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def remember(self, number: int) -> None:
        value = self.pop()
        self.stack.append(value)
        self.memo[number] = value

    def recall(self, number: int) -> None:
        if number not in self.memo:
            raise Malformed("the pickle recalls a value that is not there")
        self.stack.append(self.memo[number])


def read_pickle(stream: BinaryIO) -> Any:
    """The value of a pickle that begins here. The stream is left behind the pickle. Raises Malformed and
    Hostile."""
    return PickleMachine(PickleBytes(stream)).run()


def _protocol(machine: PickleMachine) -> None:
    if machine.source.number("B") > MAX_PROTOCOL:
        raise Malformed("the pickle has an unknown protocol")


def _tuple(count: int) -> Callable[[PickleMachine], None]:
    def make(machine: PickleMachine) -> None:
        values = [machine.pop() for _ in range(count)]
        machine.stack.append(tuple(values[::-1]))

    return make


def _append(machine: PickleMachine) -> None:
    value = machine.pop()
    if (values := machine.top(list)) is not None:
        values.append(value)


def _appends(machine: PickleMachine) -> None:
    added = machine.pop_to_mark()
    if (values := machine.top(list)) is not None:
        values.extend(added)


def _set_item(machine: PickleMachine) -> None:
    value, key = machine.pop(), machine.pop()
    _put(machine, [key, value])


def _put(machine: PickleMachine, pairs: list[Any]) -> None:
    """Put key, value, key, value ... into the dict that comes before them."""
    items = machine.top(dict)
    if len(pairs) % 2:
        raise Malformed("a dict in the pickle has a key without a value")
    if items is not None:
        items.update({key: value for key, value in zip(pairs[::2], pairs[1::2], strict=True) if is_key(key)})


def _discard_items(machine: PickleMachine) -> None:
    """Elements of a set: nothing that is needed is in one."""
    machine.pop_to_mark()
    machine.top(Inert)


def _frozen_set(machine: PickleMachine) -> None:
    machine.pop_to_mark()
    machine.stack.append(Inert("frozenset"))


def _global(machine: PickleMachine) -> None:
    module = machine.source.line()
    machine.stack.append(find(module, machine.source.line()))


def _stack_global(machine: PickleMachine) -> None:
    name, module = machine.pop(), machine.pop()
    machine.stack.append(find(module, name))


def _reduce(machine: PickleMachine) -> None:
    arguments, function = machine.pop(), machine.pop()
    if not isinstance(arguments, tuple):
        raise Malformed("a call in the pickle has no tuple of arguments")
    if isinstance(function, Known):
        machine.stack.append(_call(function, arguments))
    elif isinstance(function, Inert | StorageType | Dtype):
        machine.stack.append(Inert(_name(function)))
    else:
        raise Hostile(f"calls a {type(function).__name__}")


def _call(function: Known, arguments: tuple[Any, ...]) -> object:
    try:
        return function.call(*arguments)
    except TypeError as error:
        raise Malformed("a call in the pickle has the wrong number of arguments") from error


def _new_object(machine: PickleMachine, num_arguments: int) -> None:
    for _ in range(num_arguments):
        machine.pop()
    machine.stack.append(Inert(_name(machine.pop())))


def _name(value: object) -> str:
    """The name of a class. Raises Hostile for what is no class."""
    if isinstance(value, Inert):
        return value.what
    if isinstance(value, StorageType | Dtype | Known):
        return "an object of torch"
    raise Hostile(f"makes an object of a {type(value).__name__}")


def _build(machine: PickleMachine) -> None:
    """The state of an object: attributes of an OrderedDict, or of an object that is inert anyway."""
    machine.pop()
    machine.stack.append(machine.pop())


def _persistent_id(machine: PickleMachine) -> None:
    value = storage_of(machine.pop())
    if isinstance(value, Storage) and machine.storages.setdefault(value.key, value) != value:
        raise Malformed("the pickle gives a storage two sizes or dtypes")
    machine.stack.append(value)


ACTIONS: dict[int, Callable[[PickleMachine], None]] = {
    0x80: _protocol,
    0x95: lambda machine: (machine.source.number("Q"), None)[1],  # FRAME: how much to read ahead
    ord("("): PickleMachine.mark,
    ord("0"): lambda machine: (machine.pop(), None)[1],
    ord("1"): lambda machine: (machine.pop_to_mark(), None)[1],
    ord("t"): lambda machine: machine.stack.append(tuple(machine.pop_to_mark())),
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    ord("a"): _append,
    ord("e"): _appends,
    ord("s"): _set_item,
    ord("u"): lambda machine: _put(machine, machine.pop_to_mark()),
    0x90: _discard_items,
    0x91: _frozen_set,
    ord("q"): lambda machine: machine.remember(machine.source.number("B")),
    ord("r"): lambda machine: machine.remember(machine.source.number("I")),
    0x94: lambda machine: machine.remember(len(machine.memo)),
    ord("h"): lambda machine: machine.recall(machine.source.number("B")),
    ord("j"): lambda machine: machine.recall(machine.source.number("I")),
    ord("c"): _global,
    0x93: _stack_global,
    ord("R"): _reduce,
    0x81: lambda machine: _new_object(machine, 1),
    0x92: lambda machine: _new_object(machine, 2),
    ord("b"): _build,
    ord("Q"): _persistent_id,
}
