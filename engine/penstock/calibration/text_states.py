"""TextStates: the hidden states of a calibration text, by matrices that are quantized already, and by the
unquantized ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.cache.kv_cache import kv_views
from penstock.calibration.listening_kernels import ListeningKernels
from penstock.kernels import BatchLayout, LayerKV
from penstock.model.registry import OpenModel
from penstock.spec import RopeSpec
from penstock.weights.layer_weights import LayerWeights

#: Sequences of a step.
STEP_SEQS = 2
BLOCK_SIZE = 16


class TextStates:
    """Both paths go through the layers together, some sequences at a time."""

    def __init__(self, opened: OpenModel, kernels: ListeningKernels, ids: Tensor) -> None:
        """ids: int64 [num_seqs, length]."""
        self.ids = ids
        self._kernels = kernels
        self._family = opened.family(opened.spec, kernels, ids.shape[1])
        spec, blocks = opened.spec, STEP_SEQS * -(-ids.shape[1] // BLOCK_SIZE)
        heads, dim, layout = spec.num_kv_heads, spec.head_dim, spec.kv_layout("float32")
        buffer = torch.zeros(blocks * BLOCK_SIZE * layout.bytes_per_token(heads, dim), dtype=torch.uint8)
        self._kv = LayerKV(layout, kv_views(layout, buffer, blocks, BLOCK_SIZE, heads, dim))
        #: After the last layer, STEP_SEQS sequences at a time, each [num_tokens, hidden_size].
        self.rounded: list[Tensor] = []
        self.exact: list[Tensor] = []

    def embed(self, weights: LayerWeights, exact: LayerWeights) -> None:
        for ids in torch.split(self.ids, STEP_SEQS):
            positions = torch.arange(self.ids.shape[1]).repeat(len(ids))
            self.rounded.append(self._family.embed(weights, ids.flatten(), positions))
            self.exact.append(self._family.embed(exact, ids.flatten(), positions))

    def compute(
        self, index: int, weights: LayerWeights, exact: LayerWeights
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """What a layer makes of each part of the text, by both paths. The states stay as they are."""
        for rounded, wanted in zip(self.rounded, self.exact, strict=True):
            yield self._layer(index, weights, rounded), self._layer(index, exact, wanted)

    def go_on(self, index: int, weights: LayerWeights, exact: LayerWeights) -> None:
        """The states after a layer."""
        for part, found in enumerate(self.compute(index, weights, exact)):
            self.rounded[part], self.exact[part] = found

    def inputs(
        self, index: int, name: str, weights: LayerWeights, exact: LayerWeights
    ) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """The inputs of a layer's matrix for each part of the text, by both paths."""
        for rounded, wanted in zip(self.rounded, self.exact, strict=True):
            yield self._heard(index, name, weights, rounded), self._heard(index, name, exact, wanted)

    def _heard(self, index: int, name: str, weights: LayerWeights, hidden: Tensor) -> Tensor | None:
        return self._kernels.inputs(
            weights.matrix(name), len(hidden), lambda: self._layer(index, weights, hidden)
        )

    def _layer(self, index: int, weights: LayerWeights, hidden: Tensor) -> Tensor:
        length = self.ids.shape[1]
        layout = _layout(hidden.shape[0] // length, length, self._family.spec.rope)
        return self._family.layer(index, weights, hidden, self._kv, layout)


def _layout(num_seqs: int, length: int, rope: RopeSpec | None) -> BatchLayout:
    """A batch of whole sequences of one length, each in blocks of its own."""
    width = -(-length // BLOCK_SIZE)
    tables = torch.arange(num_seqs * width, dtype=torch.int32).view(num_seqs, width)
    positions = torch.arange(length)
    slots = (tables.long()[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten(1)[:, :length]
    rope_length = rope.frequency_length(length, length) if rope is not None else 0
    return BatchLayout(
        positions=positions.repeat(num_seqs),
        slot_mapping=slots.flatten(),
        block_tables=tables,
        query_start=torch.arange(num_seqs + 1, dtype=torch.int32) * length,
        context_lens=torch.full((num_seqs,), length, dtype=torch.int32),
        rope_lengths=torch.full((num_seqs * length,), rope_length) if rope_length else None,
    )
