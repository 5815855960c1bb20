"""Skeleton: transformers' model, taken apart: an outline, and layers as functions. read() turns config.json
into a spec by building a skeleton and probing it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch

from penstock.errors import UnsupportedModel
from penstock.model.through_transformers import attention, experts
from penstock.model.through_transformers.auto_model import auto_config, causal_class, on_meta
from penstock.model.through_transformers.desk import Desk
from penstock.model.through_transformers.outline import Outline
from penstock.model.through_transformers.parts import LayerParts, product_tensors, take_apart
from penstock.model.through_transformers.probe import ProbeDesk, probe
from penstock.model.through_transformers.transformers_spec import TransformersSpec
from penstock.weights.formats.weight_format import INT8
from penstock.weights.tensors import TensorSpec


class Skeleton(NamedTuple):
    """A model without weights, whose modules work with one desk."""

    outline: Outline
    layers: list[LayerParts]
    #: The outline itself: its modules before and after the layers, without embedding and head.
    outer: LayerParts
    #: The matrix of the embedding; that of the head, with its bias.
    embedding: TensorSpec
    head: tuple[TensorSpec, ...]
    is_tied: bool

    @property
    def has_transposed_experts(self) -> bool:
        """Whether the modules hold experts as [num_experts, in_features, out_features]."""
        modules: list[Any] = [layer.experts.module for layer in self.layers if layer.experts]
        return any(module.is_transposed for module in modules)

    def outer_tensors(
        self, before: Collection[str], after: Collection[str]
    ) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...], tuple[str, ...]]:
        """Tensors of the modules `before` the layers and `after` them; the names in checkpoints of those that
        belong to neither. Raises UnsupportedModel for a tensor that is used on both sides."""
        first = tuple(tensor for tensor in self.outer.tensors if _module_of(tensor) in before)
        last = tuple(tensor for tensor in self.outer.tensors if _module_of(tensor) in after)
        if shared := set(first) & set(last):
            raise UnsupportedModel(f"{shared.pop().name} is used before its layers and after them")
        used = {*first, *last}
        idle = (tensor for tensor in self.outer.tensors if tensor not in used)
        return first, last, tuple(part for tensor in idle for part in tensor.parts)


def _module_of(tensor: TensorSpec) -> str:
    """The name of the module that a tensor belongs to."""
    part = tensor.parts[0]
    return part.rpartition(".")[0]


def build(config: Any, desk: Desk) -> Skeleton:
    """The skeleton of transformers' model for a configuration. Raises UnsupportedModel."""
    attention.register()
    experts.register()
    model = on_meta(config, attention.NAME, experts.NAME)
    names = {module: name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", None)
    outline = Outline(model, desk, config.num_hidden_layers)
    layers = [
        take_apart(layer, desk, f"{outline.layers_name}.{index}")
        for index, layer in enumerate(outline.layers)
    ]
    rows = TensorSpec("embedding", tuple(embedding.weight.shape), (f"{names[embedding]}.weight",), INT8)
    output = product_tensors(head, "head", names[head])
    return Skeleton(outline, layers, take_apart(model, desk, ""), rows, output, is_tied)


def read(config_json: dict[str, Any]) -> TransformersSpec:
    """config.json as numbers and tensors. Raises UnsupportedModel and InvalidConfig."""
    kind = causal_class(config_json)
    _check_class(kind, config_json.get("architectures") or [kind.__name__])
    config = auto_config(config_json)
    _check_config(kind.__name__, config)
    desk = ProbeDesk(config.max_position_embeddings)
    try:
        with torch.inference_mode():
            skeleton = build(config, desk)
            found = probe(skeleton, desk)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{kind.__name__}: {error}") from error
    except Exception as error:  # other people's code, which raises what it likes
        raise UnsupportedModel(
            f"{kind.__name__} does not compute tokens one row after the other with our attention "
            f"({type(error).__name__}: {str(error).strip()})"
        ) from error
    return TransformersSpec.of(config_json, config, skeleton, found)


def _check_class(kind: Any, named: list[str]) -> None:
    """Raises UnsupportedModel for what transformers' class says of itself."""
    name = kind.__name__
    if name not in named:
        raise UnsupportedModel(f"transformers computes this model_type as {name} alone")
    if kind._is_stateful:
        raise UnsupportedModel(
            f"{name} keeps a recurrent state of each sequence, and the cache holds keys and values alone"
        )
    if not kind._supports_attention_backend:
        raise UnsupportedModel(f"{name} has no place for another attention (AttentionInterface)")


def _check_config(name: str, config: Any) -> None:
    """Raises UnsupportedModel for what the configuration says."""
    if config is not config.get_text_config():
        raise UnsupportedModel(f"{name} takes more than text (config.json has a text_config inside)")
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} encodes its input")
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 2:
        raise UnsupportedModel(f"config.json does not tell {name}'s longest text (max_position_embeddings)")
    rope = getattr(config, "rope_parameters", None) or {}
    for scaling in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if scaling.get("rope_type") in ("dynamic", "longrope"):
            raise UnsupportedModel(
                f"{name}'s rope ({scaling['rope_type']}) depends on a step's longest text in transformers"
            )
