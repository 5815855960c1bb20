"""The footprint by which a plan knows a model."""

from __future__ import annotations

import math

from penstock.spec import (
    CROSS,
    NO_EXPERTS,
    ExpertFootprint,
    KVLayout,
    ModelFootprint,
    ModelSpec,
    SharedMatrix,
)
from penstock.weights.formats.priced_formats import elements_by_price
from penstock.weights.tensors import ModelTensors, TensorSpec, UnitLayout


def footprint(spec: ModelSpec, tensors: ModelTensors, kv_layout: KVLayout | None = None) -> ModelFootprint:
    """The numbers by which the memory plan knows a model; without a layout, with keys and values in
    float16."""
    output, num_encoder_layers, dense = tensors.output_matrix, tensors.num_encoder_layers, tensors.dense_units
    return ModelFootprint(
        layer_bytes=tuple(unit.num_bytes for unit in dense),
        embedding_bytes=UnitLayout.of(tensors.embedding).num_bytes,
        head_bytes=UnitLayout.of(tensors.head).num_bytes,
        kv_bytes_per_token=spec.kv_bytes_per_token(kv_layout),
        layer_elements=sum(_matrix_elements(layer) for layer in tensors.layers[num_encoder_layers:]),
        head_elements=output.num_elements if tensors.has_logits else 0,
        max_position_embeddings=spec.max_position_embeddings,
        hidden_size=spec.hidden_size,
        widest_layer=spec.row_size
        - spec.hidden_size
        + max(
            (tensor.shape[0] for unit in tensors.units for tensor in unit.tensors if tensor.is_matrix),
            default=0,
        ),
        vocab_size=spec.vocab_size,
        shared_head_bytes=UnitLayout.of((output,)).num_bytes if tensors.is_tied else 0,
        ropes=spec.ropes,
        experts=_experts(tensors, spec.num_experts_per_token),
        num_encoder_layers=tensors.num_encoder_units,
        num_cross_units=sum(unit.key.stack == CROSS for unit in dense),
        encoder_elements=sum(_matrix_elements(layer) for layer in tensors.layers[:num_encoder_layers]),
        lower_planes=frozenset(index for index, unit in enumerate(dense) if unit.key.plane is not None),
        formats=elements_by_price(
            tensor for layer in tensors.layers[num_encoder_layers:] for tensor in layer
        ),
        head_formats=elements_by_price((output,)) if tensors.has_logits else (),
        implementation=spec.implementation,
        state_bytes=spec.state_bytes,
        guess_bytes=spec.guess_bytes,
        path_bytes=spec.path_bytes,
        matrices=_matrices(spec, tensors),
        kv_part_bytes=_part_bytes(spec, kv_layout),
        features=spec.features,
        attended_heads=_attended_heads(spec),
    )


def _matrices(spec: ModelSpec, tensors: ModelTensors) -> tuple[tuple[SharedMatrix, ...], ...]:
    """ModelFootprint.matrices. Layers of other people are not shared; nor are those of an encoder: a card
    computes its many tokens while the link brings the next layer. Planes beside an encoder are not shared."""
    has_planes = any(stack.lower_planes for stack in tensors.stacks)
    if (has_planes and tensors.num_encoder_layers) or spec.implementation != "penstock":
        return ()
    layers = [
        () if stack.is_encoder else _shared_matrices(layer, stack.lower_planes[index : index + 1])
        for stack in tensors.stacks
        for index, layer in enumerate(stack.layers)
    ]
    return tuple(layers) if any(layers) else ()


def _shared_matrices(
    layer: tuple[TensorSpec, ...], lower_planes: tuple[tuple[TensorSpec, ...], ...]
) -> tuple[SharedMatrix, ...]:
    """Of one layer and its lower planes, if it has any."""
    lower = {tensor.name: tensor.row_bytes for tensors in lower_planes for tensor in tensors}
    return tuple(
        SharedMatrix(tensor.shape[0], tensor.row_bytes + lower.get(tensor.name, 0), lower.get(tensor.name, 0))
        for tensor in layer
        if tensor.can_be_split
    )


def _part_bytes(spec: ModelSpec, kv_layout: KVLayout | None) -> tuple[int, ...]:
    """ModelFootprint.kv_part_bytes"""
    layout, shape = kv_layout or spec.kv_layout("float16"), (spec.num_kv_heads, spec.head_dim)
    return tuple(part.item_bytes * math.prod(part.shape(1, 1, *shape)) for part in layout.parts)


def _attended_heads(spec: ModelSpec) -> tuple[int, int] | None:
    """ModelFootprint.attended_heads: the processor's kernel knows neither latents nor biases, and layers have
    one number of heads."""
    is_plain = not (spec.latent_dim or spec.biases_scores or spec.head_counts)
    is_known = spec.implementation == "penstock" and is_plain
    return (spec.num_heads, spec.head_dim) if is_known else None


def _experts(tensors: ModelTensors, num_per_token: int) -> ExpertFootprint:
    """The experts of all layers. In a layer, a token passes through `num_per_token` experts."""
    experts = [unit for unit in tensors.units if unit.key.expert is not None]
    if not experts:
        return NO_EXPERTS
    num_layers = len({(unit.key.stack, unit.key.layer) for unit in experts})
    return ExpertFootprint(
        num_bytes=max(unit.num_bytes for unit in experts),
        elements=max(_matrix_elements(unit.tensors) for unit in experts),
        count=len(experts),
        count_per_token=num_layers * num_per_token,
        per_layer=len(experts) // num_layers,
        formats=elements_by_price(experts[0].tensors),
    )


def _matrix_elements(tensors: tuple[TensorSpec, ...]) -> int:
    return sum(tensor.num_elements for tensor in tensors if tensor.is_matrix)
