"""Which format each matrix of a model gets where the user says how many bytes, or bits, there are: the ones
that lose least of the weights together.

The loss of a matrix is the square of its relative error, which products pass on as it is (with weights of
random signs; "linearity" in HIGGS, arXiv 2411.17525). Errors of matrices add up, so that small matrices get
more bits than large ones: a bit costs fewer bytes there. So attention is finer than feed-forward layers, and
experts, of which a layer has many for one use, are coarsest. All experts of a model are one part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from penstock.errors import ConfigError
from penstock.weights.checkpoints.int4_form import Int4Form
from penstock.weights.conversion.bit_budget import Choice, least_loss
from penstock.weights.formats.int4_format import Int4
from penstock.weights.formats.model_formats import with_matrices_in
from penstock.weights.formats.weight_format import INT8, WeightFormat
from penstock.weights.store import WeightStore
from penstock.weights.tensor_source import TensorSource
from penstock.weights.tensors import ModelTensors, TensorSpec, UnitLayout

#: What a matrix may become, and the relative error of normal weights in it, where no weights are there.
FORMATS: dict[WeightFormat, float] = {
    Int4(Int4Form(32, codebook="int2", has_steps=True)): 0.334,
    Int4(Int4Form(64, codebook="int3", has_steps=True)): 0.178,
    Int4(Int4Form(32, codebook="int3", has_steps=True)): 0.165,
    Int4(Int4Form(64, has_steps=True)): 0.092,
    Int4(Int4Form(32, has_steps=True)): 0.085,
    INT8: 0.009,
}
#: Float32 numbers of a matrix by which its loss is measured: its first rows.
SAMPLE = 1 << 17

#: The relative error of a matrix in a format.
ErrorIn = Callable[[TensorSpec, WeightFormat], float]


@dataclass(frozen=True)
class BitBudget:
    """What there is for a model: bytes for all its weights in memory, or bits for each weight of the layers'
    matrices."""

    num_bytes: int | None = None
    bits: float | None = None


@dataclass(frozen=True)
class _Part:
    """Matrices that get one format: one, or those of one name of all experts."""

    matrices: tuple[TensorSpec, ...]
    num_layers: int

    @property
    def num_elements(self) -> int:
        return sum(each.num_elements for each in self.matrices)

    def choices(self, error_in: ErrorIn) -> dict[WeightFormat, Choice]:
        """By the formats whose groups make up the inputs."""
        sample = self.matrices[:: max(1, len(self.matrices) // self.num_layers)]
        found = {}
        for kind in FORMATS:
            if self.matrices[0].shape[1] % (kind.group_size or 1) == 0:
                squares = [error_in(each, kind) ** 2 for each in sample]
                uses = self.num_layers * len(self.matrices[0].parts)
                size = sum(_bytes_in(each, kind) for each in self.matrices)
                found[kind] = Choice(size, uses * sum(squares) / len(squares))
        return found


def fit(tensors: ModelTensors, budget: BitBudget, source: TensorSource | None = None) -> ModelTensors:
    """The model in other formats: embedding and head stay as they are. The losses are measured by the first
    rows of each matrix of `source`, or those of normal weights. Raises ConfigError for a budget that is too
    small."""
    error_in = _nominal if source is None else _Measured(source).error_in
    parts = list(_parts(tensors))
    choices = [part.choices(error_in) for part in parts]
    least = sum(min(each.num_bytes for each in own.values()) for own in choices)
    elements = sum(part.num_elements for part in parts)
    others = _bytes_of(tensors) - sum(_bytes_in(each, INT8) for part in parts for each in part.matrices)
    room = int(elements * (budget.bits or 0) / 8)
    if budget.num_bytes is not None:
        room = budget.num_bytes - others
    # A few matrices in 2 bits cost more than their squares say: a model all in 3 bits is nearer to itself.
    coarse = next(iter(FORMATS))
    finer = [{kind: each for kind, each in own.items() if kind != coarse} for own in choices]
    chosen = least_loss([list(own.values()) for own in finer], room)
    if chosen is None:
        finer, chosen = choices, least_loss([list(own.values()) for own in choices], room)
    if chosen is None:
        raise ConfigError(
            f"the model needs at least {(least + others) / 2**30:.2f} GiB, {8 * least / elements:.2f} bits "
            "for each weight of its layers, and less was asked for. Ask for more, or take a smaller model"
        )
    found = {
        matrix: list(own)[number]
        for part, own, number in zip(parts, finer, chosen, strict=True)
        for matrix in part.matrices
    }
    return with_matrices_in(tensors, found)


def fit_store(store: WeightStore, budget: BitBudget) -> list[str]:
    """fit() of a model that is to be converted. Returns lines that say what was chosen. Raises ConfigError,
    also for a checkpoint that is quantized already."""
    if store.is_quantized:
        raise ConfigError(
            "the checkpoint is quantized already: --fit and --bits choose formats for unquantized ones"
        )
    store.keep(fit(store.tensors, budget, store.source))
    return described(store.tensors)


def described(tensors: ModelTensors) -> list[str]:
    """What each kind of matrix is kept as."""
    kinds: dict[str, Counter[str]] = {}
    elements = num_bits = 0
    for part in _parts(tensors):
        for each in part.matrices:
            kinds.setdefault(each.name, Counter())[each.format.name] += 1
            elements += each.num_elements
            num_bits += 8 * _bytes_in(each, each.format)
    lines = [
        f"{name:20} {'; '.join(f'{count} x {kind}' for kind, count in sorted(found.items()))}"
        for name, found in kinds.items()
    ]
    return [
        f"{_bytes_of(tensors) / 2**30:.2f} GiB, {num_bits / elements:.2f} bits for each weight of the layers",
        *lines,
    ]


def _parts(tensors: ModelTensors) -> Iterator[_Part]:
    for stack in tensors.stacks:
        for layer in stack.layers:
            yield from (_Part((each,), 1) for each in layer if each.is_matrix)
        experts = dict[str, list[TensorSpec]]()
        for each in (each for layer in stack.experts for expert in layer for each in expert):
            if each.is_matrix:
                experts.setdefault(each.name, []).append(each)
        num_layers = sum(1 for layer in stack.experts if layer)
        yield from (_Part(tuple(matrices), num_layers) for matrices in experts.values())


def _bytes_in(tensor: TensorSpec, kind: WeightFormat) -> int:
    return sum(each.num_bytes for each in kind.components(tensor.shape))


def _bytes_of(tensors: ModelTensors) -> int:
    ends = sum(UnitLayout.of(each).num_bytes for each in (tensors.embedding, tensors.head))
    return ends + sum(unit.num_bytes for unit in tensors.units)


def _nominal(tensor: TensorSpec, kind: WeightFormat) -> float:
    return FORMATS[kind]


class _Measured:
    """Errors by the first rows of matrices, each of which is read once."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._last: tuple[TensorSpec, Tensor] | None = None

    def error_in(self, tensor: TensorSpec, kind: WeightFormat) -> float:
        if self._last is None or self._last[0] != tensor:
            rows = next(iter(self._source.row_chunks(tensor, SAMPLE)))
            self._last = tensor, rows[: max(1, SAMPLE // rows.shape[1])].float()
        rows = self._last[1]
        try:
            lost = (kind.from_rows(rows).dequantize() - rows).norm()
        except ValueError:  # NaN, of which the conversion tells
            return FORMATS[kind]
        return float(lost / rows.norm().clamp_min(1e-30))
