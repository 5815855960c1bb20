"""Layers with recurrent states among layers with attention: which layer is which."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, TypeVar

from penstock.errors import UnsupportedModel
from penstock.model.config_values import refuse, require
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.recurrent.form import RecurrentForm
from penstock.state_layout import NO_STATE

Spec = TypeVar("Spec", bound=LlamaSpec)


def with_recurrence(
    spec: Spec,
    form: RecurrentForm,
    layers: Collection[int],
    others: Collection[int] = (),
    is_beside: bool = False,
) -> Spec:
    """The spec whose `layers` have a recurrence in place of attention, or beside it. The layers `others` have
    neither. Raises UnsupportedModel if no layer has attention."""
    without_kv = frozenset() if is_beside else frozenset(layers) | frozenset(others)
    if len(without_kv) == spec.num_layers:
        raise UnsupportedModel(
            f"no layer of this {spec.architecture} has attention; Penstock computes only those recurrent "
            "models in which some layers have attention"
        )
    states = tuple(form.layout if index in layers else NO_STATE for index in range(spec.num_layers))
    return replace(spec, recurrent=form, states=states, layers_without_kv=without_kv)


def kinds_of(config: dict[str, Any], names: Collection[str], num_layers: int) -> tuple[str, ...] | None:
    """The kind of each layer by the first of `names` that config.json has. Raises InvalidConfig."""
    name = next((name for name in names if config.get(name) is not None), None)
    if name is None:
        return None
    kinds = config[name]
    if not isinstance(kinds, list | tuple) or len(kinds) != num_layers:
        refuse(name, kinds, f"a list with the kind of each of {num_layers} layers")
    return tuple(str(kind) for kind in kinds)


def linear_layers(config: dict[str, Any], num_layers: int) -> frozenset[int] | None:
    """The layers with linear attention by config.json's `layer_types`, where the others have full attention;
    None: there is no such list. Raises InvalidConfig, and UnsupportedModel for layers of another kind."""
    kinds = kinds_of(config, ("layer_types",), num_layers)
    if kinds is None:
        return None
    for kind in kinds:
        named = {"layer_types": kind, "model_type": config.get("model_type")}
        require(named, "layer_types", "linear_attention", "full_attention")
    return frozenset(index for index, kind in enumerate(kinds) if kind == "linear_attention")


def layers_of(config: dict[str, Any], name: str, num_layers: int) -> frozenset[int]:
    """A list of layers. Raises InvalidConfig."""
    layers = config.get(name)
    if not isinstance(layers, list | tuple) or not all(layer in range(num_layers) for layer in layers):
        refuse(name, layers, f"a list of layers from 0 to {num_layers - 1}")
    return frozenset(layers)
