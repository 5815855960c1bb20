"""The formats whose products a machine is timed with, and the names by which plans know their rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from penstock.weights.checkpoints.gguf_files.block_types import BY_NAME
from penstock.weights.checkpoints.int4_form import Int4Form
from penstock.weights.formats.int4_format import OWN_DTYPE, Int4
from penstock.weights.formats.stacked_format import in_one_format
from penstock.weights.formats.weight_format import Int8, WeightFormat
from penstock.weights.tensors import TensorSpec

#: Those of GGUF's files, and our own with groups. INT8 with a scale for each output channel is timed apart.
PRICED: tuple[WeightFormat, ...] = (
    Int8(32),
    Int8(128),
    Int4(Int4Form(64, OWN_DTYPE, has_steps=True)),
    *(Int4(form) for name in ("Q4_0", "Q4_1", "Q4_K", "MXFP4") if (form := BY_NAME[name].form) is not None),
)


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
