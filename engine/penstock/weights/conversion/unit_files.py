"""UnitFile: which files the weights of a converted model consist of, and what each holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.spec import DECODER
from penstock.weights.checkpoints.own_head import HEAD
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
        return UnitLayout.of(self.tensors).num_bytes


def unit_files(tensors: ModelTensors) -> list[UnitFile]:
    """The files of a converted model, in the order of `ModelTensors.groups`, and a file with a tied head."""
    names = ["model-embedding", *map(_unit_name, tensors.units), "model-head"]
    found = zip(names, tensors.groups, strict=True)
    files = [UnitFile(f"{name}.safetensors", group, group) for name, group in found]
    if tensors.is_tied:
        # transformers can't share an INT8 matrix between embedding and head, so the file has it twice.
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
