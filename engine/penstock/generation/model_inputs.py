"""ModelInputs: a scheduled step as tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from penstock.generation.scheduling.batch import Batch, ScheduledSequence
from penstock.generation.sequence import Sequence
from penstock.generation.state_inputs import StateInputs
from penstock.kernels import BatchLayout
from penstock.model.family import GivenRows

if TYPE_CHECKING:
    from penstock.weights.adapters.adapter import Adapter, StepAdapters


@dataclass(frozen=True)
class EncodedInputs:
    """Inputs that a step encodes."""

    input_ids: Tensor  # int64 [num_tokens]
    #: Every token sees all tokens of its input.
    layout: BatchLayout
    given: GivenRows | None = None
    adapters: StepAdapters | None = None

    @classmethod
    def of(cls, sequences: List[Sequence], block_size: int) -> EncodedInputs:
        encoders = [sequence.encoder for sequence in sequences if sequence.encoder is not None]
        counts = [encoder.num_tokens for encoder in encoders]
        slots = [
            encoder.block_table[p // block_size] * block_size + p % block_size
            for encoder in encoders
            for p in range(encoder.num_tokens)
        ]
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        lengths = torch.tensor(counts, dtype=torch.int32)
        layout = BatchLayout(
            positions=torch.cat([torch.arange(count) for count in counts]),
            slot_mapping=torch.tensor(slots),
            block_tables=_padded([encoder.block_table for encoder in encoders]),
            query_start=starts,
            context_lens=lengths,
            prefix_lens=lengths,
        )
        input_ids = [token_id for encoder in encoders for token_id in encoder.token_ids]
        firsts = zip(sequences, starts.tolist(), strict=False)
        given = _given_rows(
            (sequence, first, sequence.encoder.token_ids)
            for sequence, first in firsts
            if sequence.encoder is not None
        )
        runs = [(sequence.request.adapter, count) for sequence, count in zip(sequences, counts, strict=True)]
        return cls(_ids(input_ids), layout, given, _adapters(runs))


@dataclass(frozen=True)
class ModelInputs:
    """What the executor needs to know of a step."""

    input_ids: Tensor  # int64 [num_tokens]
    #: Rows of the hidden states whose logits are wanted, in the order of Batch.scheduled. int64 [num_rows]
    wanted_rows: Tensor
    layout: BatchLayout
    #: KV blocks (source, destination) to copy in this order before the step writes.
    block_copies: tuple[tuple[int, int], ...] = ()
    #: None if nothing has to be encoded.
    encoded: EncodedInputs | None = None
    #: None if all the step's tokens are in the vocabulary.
    given: GivenRows | None = None
    #: Slots of recurrent states (source, destination) to copy in this order before the step writes.
    state_copies: tuple[tuple[int, int], ...] = ()
    #: None if no row has an adapter.
    adapters: StepAdapters | None = None

    @classmethod
    def of(cls, batch: Batch, block_size: int) -> ModelInputs:
        input_ids: list[int] = []
        rows, firsts, wanted_rows = list[_RowRun](), list[int](), list[int]()
        for item in batch.scheduled:
            sequence = item.sequence
            start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + item.num_new_tokens
            firsts.append(len(input_ids))
            if item.scored:  # position p has row len(input_ids) - start + p
                first = len(input_ids) - start - 1
                wanted_rows += range(first + item.scored.start, first + item.scored.stop)
            if item.pooled is not None:
                first = len(input_ids) - start
                wanted_rows += range(first + item.pooled.start, first + item.pooled.stop)
            input_ids += sequence.token_ids[start:end]
            if item.is_sampled and item.pooled is None:
                wanted_rows += range(len(input_ids) - 1, len(input_ids) + item.drafts.num_nodes)
            input_ids += item.drafts.token_ids
            rows += _runs(item)
        starts = torch.tensor([0, *accumulate(len(run.positions) for run in rows)], dtype=torch.int32)
        states, guessed = StateInputs.of(batch, firsts)
        copies = [
            copy
            for item, first in zip(batch.scheduled, firsts, strict=True)
            for copy in _copies(item, first, block_size)
        ]
        layout = BatchLayout(
            positions=torch.tensor([position for run in rows for position in run.positions]),
            slot_mapping=torch.tensor([slot for run in rows for slot in run.slots(block_size)]),
            block_tables=_padded([run.block_table for run in rows]),
            query_start=starts,
            context_lens=torch.tensor([run.positions.stop for run in rows], dtype=torch.int32),
            prefix_lens=_prefix_lens(rows),
            cross=_cross_layout(batch, starts),
            rope_lengths=_rope_lengths(rows),
            states=states,
            guessed=guessed,
            copied_rows=torch.tensor([row for row, _ in copies]) if copies else None,
            copied_slots=torch.tensor([slot for _, slot in copies]) if copies else None,
        )
        encoded = EncodedInputs.of(batch.encoded, block_size) if batch.encoded else None
        adapters = [
            (item.sequence.request.adapter, item.num_new_tokens + item.drafts.num_nodes)
            for item in batch.scheduled
        ]
        given = _given_rows(
            (item.sequence, first, input_ids[first : first + item.num_new_tokens])
            for item, first in zip(batch.scheduled, firsts, strict=True)
            if item.sequence.encoder is None
        )
        return cls(
            _ids(input_ids), torch.tensor(wanted_rows, dtype=torch.int64), layout, batch.block_copies,
            encoded, given, batch.state_copies, _adapters(adapters),
        )  # fmt: skip


class _RowRun(NamedTuple):
    """Rows of a step whose tokens stand one after the other: a sequence's tokens and the first run of its
    drafts, or a branch."""

    sequence: Sequence
    positions: range
    block_table: list[int]

    def slots(self, block_size: int) -> Iterator[int]:
        for position in self.positions:
            yield self.block_table[position // block_size] * block_size + position % block_size


def _runs(item: ScheduledSequence) -> Iterator[_RowRun]:
    """The runs of one sequence, in the order of the step's rows."""
    sequence, start = item.sequence, item.sequence.num_computed_tokens
    num_beside = sum(len(branch.nodes) for branch in item.branches)
    end = start + item.num_new_tokens + item.drafts.num_nodes - num_beside
    yield _RowRun(sequence, range(start, end), sequence.block_table)
    for branch in item.branches:
        end = sequence.num_tokens + len(item.drafts.path(branch.nodes.stop - 1))
        yield _RowRun(sequence, range(end - len(branch.nodes), end), branch.block_table)


def _copies(item: ScheduledSequence, first: int, block_size: int) -> Iterator[tuple[int, int]]:
    """BatchLayout.copied_rows and copied_slots of one sequence, whose first token has the row `first`."""
    sequence, drafts = item.sequence, item.drafts
    for branch in item.branches:
        path = drafts.path(drafts.parents[branch.nodes.start])
        for position in range(branch.first_copied, sequence.num_tokens + len(path)):
            if position < sequence.num_tokens:
                row = first + position - sequence.num_computed_tokens
            else:
                row = first + item.num_new_tokens + path[position - sequence.num_tokens]
            yield row, branch.block_table[position // block_size] * block_size + position % block_size


def _adapters(runs: List[tuple[Adapter | None, int]]) -> StepAdapters | None:
    """Of runs of rows (adapter, number of rows) in the order of the step; None if none has an adapter."""
    if all(adapter is None for adapter, _ in runs):
        return None
    from penstock.weights.adapters.adapter import StepAdapters

    return StepAdapters.of(runs)


def _ids(token_ids: list[int]) -> Tensor:
    """int64 [num_tokens]. A vector that a caller gave has the id of any row of the embedding."""
    return torch.tensor(token_ids).clamp_(min=0)


def _given_rows(parts: Iterable[tuple[Sequence, int, list[int]]]) -> GivenRows | None:
    """The vectors of callers among the tokens of a step. Each part is (sequence, row of its first token in
    the step, the ids of its tokens in the step)."""
    rows, vectors = list[Tensor](), list[Tensor]()
    for sequence, first, token_ids in parts:
        embeds = sequence.request.prompt_embeds
        if embeds is None:
            continue
        ids = torch.tensor(token_ids)
        places = (ids < 0).nonzero().flatten()
        if len(places):
            rows.append(first + places)
            vectors.append(embeds.vectors[-1 - ids[places]])
    return GivenRows(torch.cat(rows), torch.cat(vectors)) if rows else None


def _padded(tables: List[list[int]]) -> Tensor:
    """int32 [num_seqs, the longest table]"""
    width = max(map(len, tables))
    return torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32)


def _cross_layout(batch: Batch, query_start: Tensor) -> BatchLayout | None:
    """BatchLayout.cross; the encoded inputs have no tokens in the step."""
    encoders = [item.sequence.encoder for item in batch.scheduled if item.sequence.encoder is not None]
    if not encoders:
        return None
    lengths = torch.tensor([encoder.num_tokens for encoder in encoders], dtype=torch.int32)
    nothing = torch.empty(0, dtype=torch.int64)
    tables = _padded([encoder.block_table for encoder in encoders])
    return BatchLayout(nothing, nothing, tables, query_start, lengths, prefix_lens=lengths)


def _prefix_lens(rows: List[_RowRun]) -> Tensor | None:
    """prefix_lens as BatchLayout describes them. None if all are 0, as they are for most models."""
    lengths = [run.sequence.prefix_len for run in rows]
    return torch.tensor(lengths, dtype=torch.int32) if any(lengths) else None


def _rope_lengths(rows: List[_RowRun]) -> Tensor | None:
    """rope_lengths as BatchLayout describes them. None if all are 0, as they are for most models."""
    lengths = [run.sequence.rope_length for run in rows]
    if not any(lengths):
        return None
    return torch.tensor(lengths).repeat_interleave(torch.tensor([len(run.positions) for run in rows]))
