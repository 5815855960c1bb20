"""Names of tensors in checkpoints. Files may have other names than the modules of the installed transformers,
whose conversion mapping tells both."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from penstock.errors import UnsupportedModel
from penstock.model.through_transformers import attention, experts
from penstock.model.through_transformers.auto_model import auto_config, on_meta
from penstock.model.through_transformers.experts import expert_name, merged_name
from penstock.model.through_transformers.transformers_spec import TransformersSpec
from penstock.weights.tensors import TensorSpec


def named_as(spec: TransformersSpec, names: Collection[str]) -> TransformersSpec:
    """The spec with the names that the files have. Raises UnsupportedModel where files hold tensors in
    another arrangement than modules."""
    groups = (spec.embedding, *spec.layers, spec.head, *(one for each in spec.experts for one in each))
    wanted = {part for group in groups for tensor in group for part in tensor.parts}
    head = next(tensor for tensor in spec.head if tensor.name == "head")
    if wanted - (set(head.parts) if spec.is_tied else set()) <= set(names):
        return spec
    attention.register()
    experts.register()
    model = on_meta(auto_config(spec.config), attention.NAME, experts.NAME)
    found = _Names(model, names, wanted)

    def named(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return tuple(
            replace(tensor, parts=tuple(name for part in tensor.parts for name in found.of(part)))
            for tensor in tensors
        )

    return replace(
        spec,
        embedding=named(spec.embedding),
        layers=tuple(named(layer) for layer in spec.layers),
        experts=tuple(tuple(named(expert) for expert in layer) for layer in spec.experts),
        head=named(spec.head),
        idle=tuple(name for key in spec.idle for name in found.of(key)),
    )


def parameter_names(model: Any, names: Collection[str]) -> dict[str, str]:
    """The name in files of each parameter and buffer that the installed transformers calls otherwise, where
    the two are one tensor."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
    keys, prefix = model.state_dict(), model.base_model_prefix
    return {rename_source_key(name, renamings, [], prefix, keys)[0]: name for name in names}


class _Names:
    """Parameters of a model, and the tensors in files of which they consist."""

    def __init__(self, model: Any, names: Collection[str], wanted: Collection[str]) -> None:
        """`wanted` are parameters, and parts of them that belong to one expert. Raises UnsupportedModel."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        transforms = get_model_conversion_mapping(model)
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        keys, prefix = model.state_dict(), model.base_model_prefix
        stacked = {found[0] for part in wanted if (found := merged_name(part))}
        self._names = set(names)
        #: Parameter -> the converter's source pattern -> names in files.
        self._found: dict[str, dict[str, list[str]]] = {}
        for name in sorted(names, key=_natural):
            key, pattern = rename_source_key(name, renamings, converters, prefix, keys)
            if pattern is not None and (key in wanted or key in stacked):
                converter = next(each for each in converters if pattern in each.source_patterns)
                _check_arrangement(name, converter, axis=0 if key in wanted else 1)
                places = self._found.setdefault(key, {each: [] for each in converter.source_patterns})
                places[pattern].append(name)
            else:
                self._found.setdefault(key, {})[""] = [name]
        for key, others in _aliases(model).items():
            for other in others if key in self._found else ():
                self._found.setdefault(other, self._found[key])

    def of(self, part: str) -> tuple[str, ...]:
        """The names in files of a parameter, or of one expert's part of it."""
        if part in self._names or (part not in self._found and merged_name(part) is None):
            return (part,)
        if part in self._found:
            return tuple(name for names in self._found[part].values() for name in names)
        key, number = merged_name(part) or ("", 0)
        places = list(self._found.get(key, {}).values())
        if "" in self._found.get(key, {}):
            return (expert_name(places[0][0], number),)
        if not places or any(number >= len(names) for names in places):
            return (part,)  # the store says what is missing
        return tuple(names[number] for names in places)


def _natural(name: str) -> list[int | str]:
    """Sorts names by the numbers in them."""
    return [int(word) if word.isdecimal() else word for word in re.split(r"(\d+)", name)]


def _aliases(model: Any) -> dict[str, list[str]]:
    """Name of a parameter -> its other names, where modules share it."""
    shared: dict[int, list[str]] = {}
    for name, each in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(each), []).append(name)
    return {name: [other for other in names if other != name] for names in shared.values() for name in names}


def _check_arrangement(name: str, converter: Any, axis: int) -> None:
    """Raises UnsupportedModel unless the converter only puts rows after each other, along `axis` of what it
    makes. Experts, which it stacks, are numbered along the first axis."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    def is_known(operation: Any) -> bool:
        if isinstance(operation, MergeModulelist):
            return axis == 1 and operation.dim == 0
        return isinstance(operation, Concatenate) and operation.dim == axis

    others = [each for each in converter.operations if not is_known(each)]
    if others or len(converter.target_patterns) > 1:
        kinds = ", ".join(type(each).__name__ for each in others) or "several modules"
        raise UnsupportedModel(
            f"its files hold {name} in another arrangement than transformers' modules ({kinds})"
        )
