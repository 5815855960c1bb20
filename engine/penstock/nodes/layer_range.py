"""A part of a model: some of its layers in a row, which one of several machines computes."""

from __future__ import annotations

from dataclasses import replace

from penstock.config import EngineConfig
from penstock.errors import UnsupportedModel
from penstock.goes_with import Feature, check_together
from penstock.memory.planning.kv_blocks import USUAL_TOKENS
from penstock.model.registry import OpenModel
from penstock.nodes.cut import LayerCost
from penstock.spec import ModelSpec


def check_model(opened: OpenModel) -> None:
    """Raises UnsupportedModel for a model that several machines can't share."""
    kinds = {
        Feature.NODES: True,
        Feature.ENCODER: len(opened.store.tensors.stacks) != 1,
        Feature.POOLED: opened.pooling is not None,
    }
    features = opened.spec.features | {feature for feature, is_so in kinds.items() if is_so}
    check_together(features, opened.spec.architecture, UnsupportedModel)


def layer_range(opened: OpenModel, layers: range) -> OpenModel:
    """The model with these layers alone, which keep their places. The other layers have no keys and values
    here. The store has the part, too."""
    (stack,) = opened.store.tensors.stacks
    opened.store.keep(replace(opened.store.tensors, stacks=(stack.cut(layers.start, layers.stop),)))
    others = frozenset(range(opened.spec.num_layers)) - frozenset(layers)
    spec: ModelSpec = replace(opened.spec, layers_without_kv=opened.spec.layers_without_kv | others)
    return opened._replace(spec=spec)


def layer_costs(opened: OpenModel, config: EngineConfig) -> tuple[LayerCost, ...]:
    """What each layer takes, with keys and values of as many tokens as the config says, or of one usual
    sequence."""
    spec, layout = opened.spec, opened.spec.kv_layout(config.kv_dtype)
    longest = min(config.max_model_len or spec.max_position_embeddings, spec.max_position_embeddings)
    num_tokens = config.num_kv_tokens or min(longest, USUAL_TOKENS)
    dense, experts = [0] * spec.num_layers, [list[int]() for _ in range(spec.num_layers)]
    for unit in opened.store.tensors.units:
        if unit.key.expert is None:
            dense[unit.key.layer] += unit.num_bytes
        else:
            experts[unit.key.layer].append(unit.num_bytes)
    return tuple(
        LayerCost(
            own + sum(sizes),
            num_tokens * layout.bytes_per_token(*spec.kv_shape(index)),
            own + sum(sorted(sizes)[: spec.num_experts_per_token]),
        )
        for index, (own, sizes) in enumerate(zip(dense, experts, strict=True))
    )
