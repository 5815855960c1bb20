"""The names by which plans know the rates of formats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from penstock.weights.formats.int4_format import Int4
from penstock.weights.formats.stacked_format import in_one_format
from penstock.weights.formats.weight_format import WeightFormat
from penstock.weights.tensors import TensorSpec


def price_name(kind: WeightFormat) -> str:
    """Equal names have products of the same speed, as far as that is timed."""
    if not isinstance(kind, Int4):
        return kind.name
    form = kind.form
    how = "steps" if form.has_steps else "blocks" if form.block_groups > 1 else ""
    return f"{kind.name}, {how}" if how else kind.name


def elements_by_price(tensors: Iterable[TensorSpec]) -> tuple[tuple[str, int], ...]:
    """The elements of all matrices, by the names of their formats."""
    found: Counter[str] = Counter()
    for tensor in tensors:
        for own in in_one_format(tensor) if tensor.is_matrix else ():
            found[price_name(own.format)] += own.num_elements
    return tuple(sorted(found.items()))
