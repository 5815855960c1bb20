"""The tensors of transformers' model, as our tensors: those of each layer, those before the layers and those
after them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import UnsupportedModel
from penstock.model.through_transformers.desk import Desk
from penstock.model.through_transformers.experts import LayerExperts, is_experts, layer_experts
from penstock.model.through_transformers.stand_ins import Product, is_product, stand_in
from penstock.weights.formats.weight_format import INT8
from penstock.weights.tensors import TensorSpec

#: A tensor of more elements that is no matrix would take too much memory as float32.
MAX_FLOATS = 1 << 20


class LayerParts(NamedTuple):
    """A layer whose modules work with a desk."""

    module: nn.Module
    tensors: tuple[TensorSpec, ...]
    #: Shapes of the tensors that transformers' own modules in the layer take as parameters and buffers.
    own: dict[str, torch.Size]
    experts: LayerExperts | None = None


def product_tensors(module: nn.Module, name: str, part: str) -> tuple[TensorSpec, ...]:
    """The INT8 matrix of a linear module, which checkpoints call `part`, and its bias."""
    is_transposed = not isinstance(module, nn.Linear)
    shape = tuple(module.get_parameter("weight").shape)
    rows, columns = shape[::-1] if is_transposed else shape
    matrix = TensorSpec(name, (rows, columns), (f"{part}.weight",), INT8, is_transposed)
    if module._parameters.get("bias") is None:
        return (matrix,)
    return matrix, TensorSpec(f"{name}.bias", (rows,), (f"{part}.bias",))


def stored_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's own parameters, and its own buffers that checkpoints hold."""
    yield from module.named_parameters(recurse=False)
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set and buffer.is_floating_point():
            yield name, buffer


def take_apart(layer: nn.Module, desk: Desk, part: str) -> LayerParts:
    """Put stand-ins into a module, which checkpoints call `part`. Raises UnsupportedModel."""
    experts = _experts_of(layer, part)
    routers = (len(experts.tensors), 1) if experts else ()
    tensors: list[TensorSpec] = []
    own: dict[str, torch.Size] = {}
    for name, module in list(layer.named_modules()):
        module.desk = desk
        if is_product(module) and module.get_parameter("weight").shape[0] not in routers:
            tensors += product_tensors(module, name, _joined(part, name))
            layer.set_submodule(name, Product(desk, name))
            continue
        found = stand_in(module, desk, name) if name else None
        if found is not None:
            layer.set_submodule(name, found)
        for key, tensor in () if is_experts(module) else stored_tensors(module):
            whole = _joined(name, key)
            tensors.append(TensorSpec(whole, tuple(tensor.shape), (_joined(part, whole),)))
            if found is None:
                own[whole] = tensor.shape
    _refuse_large(tensors)
    return LayerParts(layer, tuple(tensors), own, experts)


def _experts_of(layer: nn.Module, part: str) -> LayerExperts | None:
    """The experts of a layer. Raises UnsupportedModel."""
    found = [(name, module) for name, module in layer.named_modules() if is_experts(module)]
    if len(found) > 1:
        raise UnsupportedModel("its layers have several modules of experts")
    return layer_experts(found[0][1], _joined(part, found[0][0])) if found else None


def _joined(first: str, second: str) -> str:
    return f"{first}.{second}" if first and second else first or second


def _refuse_large(tensors: list[TensorSpec]) -> None:
    for tensor in tensors:
        if tensor.num_elements > MAX_FLOATS and len(tensor.shape) > 2:
            kind = "experts" if "expert" in tensor.name else "a tensor"
            raise UnsupportedModel(
                f"its layers have {kind} ({tensor.name}) that are no linear modules, and would stay float32"
            )
