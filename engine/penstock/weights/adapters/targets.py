"""Targets: the modules of a model that adapters can change, and where their outputs lie in the matrices that
layers multiply by."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pkgutil import resolve_name
from typing import NamedTuple

from penstock.errors import UnsupportedModel
from penstock.weights.formats.stacked_format import in_one_format
from penstock.weights.store import WeightStore
from penstock.weights.tensor_source import is_transposed
from penstock.weights.tensors import TensorSpec, Unit

_WEIGHT = ".weight"
#: Names of modules in other programs: module -> lists of transformers' names.
_FOREIGN_NAMES = "penstock.cpm.known_names:module_names"


class Target(NamedTuple):
    """Outputs of a matrix that are one module's."""

    stack: str
    layer: int
    matrix: str
    num_inputs: int
    first_output: int
    num_outputs: int


class Targets:
    """All of one model."""

    def __init__(self, store: WeightStore, unadapted: Collection[str] = ()) -> None:
        """`unadapted` are matrices that adapters can't change (Architecture.unadapted)."""
        self._prefix = store.tensors.optional_prefix
        self._targets: dict[str, Target] = {}
        #: Modules without adapters, and what they are.
        self._others: dict[str, str] = {}
        for unit in store.tensors.units:
            if unit.key.expert is not None:
                self._note(unit.tensors, "experts have no adapters here")
            elif unit.key.plane != "lower":
                self._add(store, unit, unadapted)
        self._note(store.tensors.embedding, "embeddings have no adapters here")
        self._note(store.tensors.head, "the head has no adapter here")

    def _note(self, tensors: tuple[TensorSpec, ...], reason: str) -> None:
        for tensor in tensors:
            self._others |= dict.fromkeys((part.removesuffix(_WEIGHT) for part in tensor.parts), reason)

    def _add(self, store: WeightStore, unit: Unit, unadapted: Collection[str]) -> None:
        for tensor in unit.tensors:
            if not tensor.is_matrix or tensor.name in unadapted:
                self._note((tensor,), "this module has no adapter here")
                continue
            first = 0
            for part, num_outputs in _parts(store, tensor):
                self._targets[part.removesuffix(_WEIGHT)] = Target(
                    unit.key.stack, unit.key.layer, tensor.name, tensor.shape[1], first, num_outputs
                )
                first += num_outputs

    def find(self, module: str) -> list[Target]:
        """The targets of a module of an adapter, in the order of its outputs: one, or one for each module of
        the model that the adapter's program fuses. Raises UnsupportedModel."""
        for names in self._spellings(module):
            if all(name in self._targets for name in names):
                return [self._targets[name] for name in names]
            if names[0] in self._others:
                raise UnsupportedModel(f"the adapter changes {module}: {self._others[names[0]]}")
        example = next(iter(self._targets), "none")
        raise UnsupportedModel(
            f"the adapter changes {module}, and this model has no such module (it has {example}, for "
            "example): the adapter belongs to another model"
        )

    def _spellings(self, module: str) -> Iterator[list[str]]:
        """transformers' names of a module, with and without the prefix of the bare model."""
        from penstock.weights.checkpoints.text_part import text_name

        for name in (module, self._prefix + module, text_name(f"{module}.").removesuffix(".")):
            yield [name]
        yield from resolve_name(_FOREIGN_NAMES)(module)


def _parts(store: WeightStore, tensor: TensorSpec) -> Iterator[tuple[str, int]]:
    """The parts of a matrix in a checkpoint, each with its outputs."""
    for own in in_one_format(tensor):
        if len(own.parts) == 1:
            yield own.parts[0], own.shape[0]
            continue
        for part in own.parts:
            entry = store.source.entry(part)
            yield part, entry.shape[1 if is_transposed(own, entry) else 0]
