"""Pooler: rows of hidden states -> one vector or score for each sequence. It stands where a model that writes
has its sampler.

Batch invariance: a sequence's rows are taken one by one, in their order, and sums are float64. The same text
meets the same operations, however its tokens are divided into steps.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from penstock.errors import ComputationError
from penstock.generation.chosen import NOTHING, Chosen
from penstock.generation.requests.generation_request import PoolingParams
from penstock.generation.scheduling.batch import Batch, ScheduledSequence
from penstock.generation.sequence import Sequence
from penstock.model.pooling.pooling_spec import PoolingSpec

_USUAL = PoolingParams()


@dataclass
class _Part:
    """What is pooled of a sequence so far, float64."""

    total: Tensor
    num_rows: int = 0
    sum_of_weights: float = 0.0


class Pooler:
    """Pools for one model."""

    def __init__(self, spec: PoolingSpec) -> None:
        self._spec = spec
        #: Sequences of which a step has computed a part.
        self._parts: WeakKeyDictionary[Sequence, _Part] = WeakKeyDictionary()

    @torch.inference_mode()
    def choose(self, rows: Iterable[Tensor], batch: Batch) -> list[Chosen]:
        """The pooled rows of the sequences that the batch ends, and NOTHING for the others. rows: float32
        [some, width], part after part; all parts together have the rows that the batch wants. A result that
        is no number gives a ComputationError."""
        each = (row for part in rows for row in part)
        return [self._pool(item, each) for item in batch.scheduled]

    def _pool(self, item: ScheduledSequence, rows: Iterator[Tensor]) -> Chosen:
        sequence = item.sequence
        if not sequence.num_computed_tokens:  # also a sequence that was preempted, and begins again
            self._parts.pop(sequence, None)
        for index in item.pooled or ():
            row = next(rows).double()
            self._parts[sequence] = self._add(self._parts.get(sequence), row, index)
        if not item.is_sampled:
            return NOTHING
        vector = self._finish(self._parts.pop(sequence), sequence.request.pooling or _USUAL)
        if not bool(torch.isfinite(vector).all()):
            return Chosen(error=ComputationError("the model computed NaN or infinity for the text"))
        return Chosen(pooled=array("f", vector.tolist()))

    def _add(self, part: _Part | None, row: Tensor, index: int) -> _Part:
        weight = index + 1.0 if self._spec.kind == "weighted_mean" else 1.0
        if part is None:
            return _Part(row * weight, 1, weight)
        if self._spec.kind == "max":
            part.total = torch.maximum(part.total, row)
        else:
            part.total += row * weight
        part.num_rows, part.sum_of_weights = part.num_rows + 1, part.sum_of_weights + weight
        return part

    def _finish(self, part: _Part, params: PoolingParams) -> Tensor:
        """float64 [width]"""
        spec, vector = self._spec, part.total
        if spec.is_score:
            score = vector[1:] - vector[:1] if spec.score_tokens is not None else vector
            return torch.sigmoid(score) if spec.has_sigmoid else score
        if spec.kind in ("mean", "weighted_mean"):
            vector = vector / part.sum_of_weights
        elif spec.kind == "mean_sqrt_len":
            vector = vector / math.sqrt(part.num_rows)
        is_cut = params.dimensions is not None and params.dimensions < len(vector)
        if is_cut:
            vector = vector[: params.dimensions]
        normalizes = spec.normalizes if params.normalizes is None else params.normalizes
        if not normalizes and not is_cut:
            return vector
        length: Tensor = torch.linalg.vector_norm(vector)
        return vector / length.clamp(min=1e-12)  # a vector of zeros has no direction
