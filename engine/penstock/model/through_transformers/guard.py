"""The guard: what a model that comes through transformers promises is tried before the model serves. Layers
with random weights compute a few texts alone, packed together, and in chunks. Equal bits mean that a request
gets the same in any company, if no operation of the modules differs now and then: so each operation is
watched meanwhile (watch.py). Attention is compared with transformers' own: a model that wants more of
attention than it tells us is refused.

One layer of each form is tried in its real size, since sizes decide how torch divides its work. Nothing is
read from the checkpoint."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from penstock.cache.kv_cache import kv_views
from penstock.errors import UnsupportedModel
from penstock.kernels import BatchLayout, LayerKV, QuantizedTensor
from penstock.spec import FLOAT16, INT8, KVLayout
from penstock.weights.layer_weights import ExpertGroup, LayerWeights
from penstock.weights.tensors import ModelTensors, TensorSpec, UnitLayout

if TYPE_CHECKING:
    from penstock.model.through_transformers.family import ThroughTransformers

logger = logging.getLogger(__name__)

#: Lengths of the texts in tokens, and the steps in which chunks are computed: (text, first token, end).
LENGTHS = (37, 1, 6)
CHUNKED = (((0, 0, 11), (2, 0, 2)), ((0, 11, 36), (2, 2, 6), (1, 0, 1)), ((0, 36, 37),))
PACKED = (tuple((text, 0, length) for text, length in enumerate(LENGTHS)),)
ALONE = tuple(((text, 0, length),) for text, length in enumerate(LENGTHS))
BLOCK_SIZE, NUM_BLOCKS, NUM_ROWS = 16, 5, 64
#: So many experts of a layer are made.
NUM_EXPERTS = 3
#: At most so many forms of layers are tried.
MAX_FORMS = 6
#: How far attention may be from transformers' own, as a share of what the layer adds. Float16 keys and
#: values make 1e-3; a forgotten mask or bias makes 1e-2 and more.
TOLERANCE = 5e-3

_Step = tuple[tuple[int, int, int], ...]


class _Way(NamedTuple):
    """A way to compute the texts: steps, and the hidden states of each step."""

    steps: tuple[_Step, ...]
    hidden: list[Tensor]

    def by_text(self) -> list[Tensor]:
        """The hidden states of each text, in the order of its tokens."""
        rows: list[list[Tensor]] = [[] for _ in LENGTHS]
        for step, hidden in zip(self.steps, self.hidden, strict=True):
            parts = hidden.split_with_sizes([end - first for _, first, end in step])
            for (text, _, _), part in zip(step, parts, strict=True):
                rows[text].append(part)
        return [torch.cat(parts) for parts in rows]


def is_invariant(family: ThroughTransformers, tensors: ModelTensors, kv_layout: KVLayout) -> bool:
    """Whether texts have the same bits in any company: alone, packed and in chunks they are equal, and
    modules call no operation that is not known to be safe (watch.py). Raises UnsupportedModel if attention is
    not what transformers computes."""
    with family.desk.functions.watching() as unknown:
        found = are_equal(family, tensors, kv_layout)
    if unknown:
        logger.info(
            "%s calls %s of torch, which may depend on the other tokens of a step",
            family.spec.architecture, ", ".join(sorted(unknown)),
        )  # fmt: skip
    return found and not unknown


@torch.inference_mode()
def are_equal(
    family: ThroughTransformers,
    tensors: ModelTensors,
    kv_layout: KVLayout,
    ways: Sequence[tuple[_Step, ...]] = (ALONE, PACKED, CHUNKED),
) -> bool:
    """Whether the texts have the same bits in all of these ways, of which the first has each text alone.
    Raises UnsupportedModel if attention is not what transformers computes."""
    if kv_layout is INT8:  # INT8 rounds by more than TOLERANCE, and what modules compute depends on no layout
        kv_layout = FLOAT16
    numbers = torch.Generator().manual_seed(0)
    embedding = _random(tensors.embedding, numbers, family, "embedding", tensors.embedding[0].shape[1])
    layouts = {steps: [_layout(step, family.device) for step in steps] for steps in ways}
    computed = [
        _Way(steps, [_embed(family, embedding, step, layout) for step, layout in zip(steps, of, strict=True)])
        for steps, of in layouts.items()
    ]
    found = _all_equal(computed)
    for index in _forms(family):
        weights = _with_experts(_random(tensors.layers[index], numbers, family), family, tensors, index)
        after = [_through(family, index, weights, way, layouts[way.steps], kv_layout) for way in computed]
        _compare_attention(family, index, weights, computed[0].by_text()[0], after[0].by_text()[0])
        computed = after
        found = found and _all_equal(computed)
    head = _random(tensors.head, numbers, family, "head", tensors.output_matrix.shape[1])
    ends = [_Way(way.steps, [family.head(head, hidden) for hidden in way.hidden]) for way in computed]
    return found and _all_equal(ends)


def _forms(family: ThroughTransformers) -> Iterator[int]:
    """The first layer of each form."""
    seen: set[object] = set()
    for index, parts in enumerate(family.skeleton.layers):
        shapes = tuple((tensor.name, tensor.shape) for tensor in parts.tensors)
        form = type(parts.module), shapes, parts.experts is None, family.spec.attentions[index]
        if form not in seen and len(seen) < MAX_FORMS:
            seen.add(form)
            yield index


def _random(
    tensors: tuple[TensorSpec, ...],
    numbers: torch.Generator,
    family: ThroughTransformers,
    table: str = "",
    width: int = 0,
) -> LayerWeights:
    """Random weights. The matrix `table`, which has a row for each token of the vocabulary, gets NUM_ROWS
    rows of `width`."""
    small = tuple(each for each in tensors if each.name not in (table, f"{table}.bias"))
    layout = UnitLayout.of(small)
    buffer = torch.empty(layout.num_bytes, dtype=torch.uint8)
    for slot in layout.slots:
        arrays = slot.arrays(buffer)
        slot.tensor.format.fill_random(arrays, numbers)
        if not slot.tensor.is_matrix:
            arrays[0].normal_(0.0 if slot.tensor.name.endswith("bias") else 1.0, 0.1, generator=numbers)
    layout.derive(buffer)
    weights = LayerWeights.views(layout, buffer)
    if table:
        rows = torch.randint(-127, 128, (NUM_ROWS, width), dtype=torch.int8, generator=numbers)
        weights = weights.with_matrices({table: QuantizedTensor(rows, torch.full((NUM_ROWS,), 1 / 73))})
    return weights if table == "embedding" else weights.map(lambda part: part.to(family.device))


def _with_experts(
    weights: LayerWeights, family: ThroughTransformers, tensors: ModelTensors, index: int
) -> LayerWeights:
    """The weights of a layer, with random experts: a few, which stand for all."""
    experts = tensors.stacks[0].experts[index] if tensors.stacks[0].experts else ()
    numbers = torch.Generator().manual_seed(1)
    made = [_random(expert, numbers, family) for expert in experts[:NUM_EXPERTS]]

    def ask(chosen: Sequence[int], _: Sequence[int]) -> Iterator[ExpertGroup]:
        yield [(number, made[number % len(made)]) for number in chosen]

    return LayerWeights(dict(weights.items()), ask)


def _layout(step: _Step, device: torch.device) -> BatchLayout:
    """Each text has blocks of its own."""
    starts = [sum(-(-length // BLOCK_SIZE) for length in LENGTHS[:text]) for text in range(len(LENGTHS))]
    tables = [[starts[text] + each for each in range(-(-max(LENGTHS) // BLOCK_SIZE))] for text, _, _ in step]
    positions = [torch.arange(first, end) for _, first, end in step]
    slots = [starts[text] * BLOCK_SIZE + each for (text, _, _), each in zip(step, positions, strict=True)]
    ends = torch.tensor([0, *(end - first for _, first, end in step)]).cumsum(0)
    layout = BatchLayout(
        positions=torch.cat(positions),
        slot_mapping=torch.cat(slots),
        block_tables=torch.tensor(tables, dtype=torch.int32).clamp(max=NUM_BLOCKS - 1),
        query_start=ends.int(),
        context_lens=torch.tensor([end for _, _, end in step], dtype=torch.int32),
    )
    return layout.to(device)


def _embed(family: ThroughTransformers, weights: LayerWeights, step: _Step, layout: BatchLayout) -> Tensor:
    ids = torch.cat([(7 * torch.arange(first, end) + 3 * text) % NUM_ROWS for text, first, end in step])
    return family.embed(weights, ids, layout.positions.cpu()).to(family.device)


def _through(
    family: ThroughTransformers,
    index: int,
    weights: LayerWeights,
    way: _Way,
    layouts: list[BatchLayout],
    kv_layout: KVLayout,
) -> _Way:
    """The texts after one layer."""
    sizes = family.spec.num_kv_heads, family.spec.head_dim
    num_bytes = NUM_BLOCKS * BLOCK_SIZE * kv_layout.bytes_per_token(*sizes)
    buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=family.device)
    kv = LayerKV(kv_layout, kv_views(kv_layout, buffer, NUM_BLOCKS, BLOCK_SIZE, *sizes))
    hidden = [
        family.layer(index, weights, each, kv, layout)
        for each, layout in zip(way.hidden, layouts, strict=True)
    ]
    return _Way(way.steps, hidden)


def _all_equal(ways: list[_Way]) -> bool:
    """Whether all ways have the same bits. Raises UnsupportedModel if they differ by more than rounding."""
    alone = torch.cat(ways[0].by_text())
    others = [torch.cat(way.by_text()) for way in ways[1:]]
    if not all(each.isfinite().all() for each in (alone, *others)):
        raise UnsupportedModel("it computes no numbers (infinity or NaN) from random weights")
    worst = max(float((other - alone).abs().max() / (alone.max() - alone.min())) for other in others)
    if not worst <= TOLERANCE:
        raise UnsupportedModel(
            f"its numbers differ by {worst:.1g} of their range between texts that are alone and in company"
        )
    return all(torch.equal(alone, other) for other in others)


def _compare_attention(
    family: ThroughTransformers, index: int, weights: LayerWeights, before: Tensor, after: Tensor
) -> None:
    """Raises UnsupportedModel unless a layer computes what it computes with transformers' own attention."""
    expected = family.layer_with_own_attention(index, weights, before)
    added = expected - before
    difference = float((after - expected).abs().max() / (added.max() - added.min()).clamp(min=1e-20))
    if not math.isfinite(difference):
        raise UnsupportedModel(
            f"layer {index} of {family.spec.architecture} computes no numbers (infinity or NaN) from random "
            "weights, so that it can't be compared with transformers' own attention"
        )
    if not difference <= TOLERANCE:
        raise UnsupportedModel(
            f"layer {index} of {family.spec.architecture} is {difference:.1g} of its range away from what it "
            "is with transformers' own attention, so it needs something that our attention lacks"
        )
