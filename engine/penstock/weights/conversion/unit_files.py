"""UnitFile: which files the weights of a converted model consist of, and what each holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.spec import DECODER
from penstock.weights.checkpoints.own_head import HEAD
from penstock.weights.conversion.converted_config import has_copied_head
from penstock.weights.tensors import ModelTensors, TensorSpec, Unit, UnitLayout


@dataclass(frozen=True)
class UnitFile:
    """A file of a converted model: embedding, a unit, or head."""

    name: str
    tensors: tuple[TensorSpec, ...]
    #: The same tensors under the names that they have in the file.
    stored: tuple[TensorSpec, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors' buffer."""
        return UnitLayout.of(self.tensors).num_bytes

    @property
    def num_stored_bytes(self) -> int:
        """The first bytes of the buffer, which the file has."""
        return UnitLayout.of(self.tensors).num_stored_bytes


def unit_files(tensors: ModelTensors) -> list[UnitFile]:
    """The files of a converted model, in the order of `ModelTensors.groups`, and a file with a tied head."""
    names = ["model-embedding", *map(_unit_name, tensors.units), "model-head"]
    found = zip(names, tensors.groups, strict=True)
    files = [UnitFile(f"{name}.safetensors", group, group) for name, group in found]
    if has_copied_head(tensors):
        matrix = tensors.output_matrix
        head = replace(matrix, parts=(HEAD,))
        files.append(UnitFile("model-tied-head.safetensors", (matrix,), (head,)))
    return files


def _unit_name(unit: Unit) -> str:
    stack, layer, expert, plane = unit.key
    return (
        "model"
        + ("" if stack == DECODER else f"-{stack}")
        + f"-layer-{layer:05d}"
        + ("" if expert is None else f"-expert-{expert:05d}")
        + ("" if plane is None else f"-{plane}")
    )
