"""A model's tensors in planes: which tensors of a layer are split, and which stay as they are."""

from __future__ import annotations

from dataclasses import replace

from penstock.weights.formats.planes_format import LowerPlane, UpperPlane
from penstock.weights.formats.weight_format import Int8
from penstock.weights.tensors import ModelTensors, Stack, TensorSpec


def in_planes(tensors: ModelTensors) -> ModelTensors:
    """The same model with the INT8 matrices of its layers in planes, of which the lower ones are units of
    their own. Experts, embedding, head, and matrices with an odd number of inputs stay as they are."""
    return replace(tensors, stacks=tuple(map(_split, tensors.stacks)))


def _split(stack: Stack) -> Stack:
    return replace(
        stack,
        layers=tuple(tuple(map(_upper, layer)) for layer in stack.layers),
        lower_planes=tuple(tuple(map(_lower, filter(_has_planes, layer))) for layer in stack.layers),
    )


def _has_planes(tensor: TensorSpec) -> bool:
    return isinstance(tensor.format, Int8) and tensor.shape[1] % 2 == 0


def _upper(tensor: TensorSpec) -> TensorSpec:
    """The tensor itself if it is not split."""
    plane = UpperPlane(tensor.format.group_size)
    return replace(tensor, format=plane) if _has_planes(tensor) else tensor


def _lower(tensor: TensorSpec) -> TensorSpec:
    return replace(tensor, format=LowerPlane(tensor.format.group_size))
