"""Experts of transformers' modules as units of their own. transformers calls a registered function with
hidden states and a router's choice; the function hands them to the desk of the module."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from penstock.errors import UnsupportedModel
from penstock.model.through_transformers.own_functions import ours
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.merged_experts import separate_experts
from penstock.weights.formats.weight_format import INT8
from penstock.weights.tensors import TensorSpec

#: The name of our experts in transformers' registry.
NAME = "penstock"


#: The tensors of each expert of a layer.
LayerTensors = tuple[tuple[TensorSpec, ...], ...]


class LayerExperts(NamedTuple):
    """The experts of a layer."""

    module: nn.Module
    #: "gate_up" and "down", with or without biases. Their names in checkpoints are made by expert_name();
    #: names.py finds the names of files in which experts lie apart.
    tensors: LayerTensors


class Mixing(Protocol):
    """Who computes experts for a module."""

    def mix(self, module: nn.Module, x: Tensor, experts: Tensor, scores: Tensor) -> Tensor:
        """x [num_tokens, hidden_size]; experts and scores [num_tokens, num_chosen] -> the shape of x."""


def register() -> None:
    """Make the name known to transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, _mix)


@ours
def _mix(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    desk: Mixing = module.desk  # type: ignore[assignment]
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    return desk.mix(module, rows, top_k_index, top_k_weights).view(hidden_states.shape)


def is_experts(module: nn.Module) -> bool:
    """Whether a module has transformers' interface for experts (use_experts_implementation)."""
    return hasattr(module, "is_concatenated") and hasattr(module, "has_gate")


def layer_experts(module: Any, part: str) -> LayerExperts:
    """The experts of a module, which checkpoints call `part`. Raises UnsupportedModel."""
    up = "gate_up_proj" if module.has_gate else "up_proj"
    names = (("gate_up", up), ("down", "down_proj"))
    known = {name for _, name in names} | {f"{name}_bias" for _, name in names}
    if others := sorted({name for name, _ in module.named_parameters()} - known):
        raise UnsupportedModel(f"its experts have {', '.join(others)}, which our experts lack")
    shapes = {name: tuple(each.shape) for name, each in module.named_parameters()}
    return LayerExperts(
        module,
        tuple(
            tuple(
                tensor
                for name, key in names
                for tensor in _tensors(name, f"{part}.{key}", number, shapes[key], module)
            )
            for number in range(shapes[up][0])
        ),
    )


def _tensors(name: str, key: str, number: int, shape: tuple[int, ...], module: Any) -> list[TensorSpec]:
    rows, columns = shape[:0:-1] if module.is_transposed else shape[1:]
    matrix = TensorSpec(name, (rows, columns), (expert_name(key, number),), INT8)
    bias = TensorSpec(f"{name}.bias", (rows,), (expert_name(f"{key}_bias", number),))
    return [matrix, bias] if module.has_bias else [matrix]


def expert_name(merged: str, number: int) -> str:
    """The name of one expert's part of a tensor that holds all experts of a layer."""
    return f"{merged}.{number}.weight"


def merged_name(name: str) -> tuple[str, int] | None:
    """What expert_name() was called with; None for other names."""
    found = re.fullmatch(r"(.+)\.(\d+)\.weight", name)
    return (found[1], int(found[2])) if found else None


def separate(checkpoint: Checkpoint, layers: Iterable[LayerTensors], is_transposed: bool) -> None:
    """Put experts apart that lie in merged tensors. Raises UnsupportedModel and WrongTensor."""
    merged = {
        merged_name(part) for layer in layers for expert in layer for each in expert for part in each.parts
    }
    for name in sorted({found[0] for found in merged if found}):
        separate_experts(checkpoint, name, f"{name}.", ("weight",), is_transposed)


def activated(module: Any, gate_up: Tensor) -> Tensor:
    """What a module makes of its first product."""
    made: Tensor = module._apply_gate(gate_up) if module.has_gate else module.act_fn(gate_up)
    return made
