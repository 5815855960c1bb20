"""ModelInputs: a scheduled step as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.generation.scheduling.batch import Batch
from penstock.kernels import BatchLayout


@dataclass(frozen=True)
class ModelInputs:
    """What the executor needs to know of a step."""

    input_ids: Tensor  # int64 [num_tokens]
    #: Rows of the hidden states whose logits are wanted, in the order of Batch.scheduled. int64 [num_rows]
    wanted_rows: Tensor
    layout: BatchLayout
    #: KV blocks (source, destination) to copy before the step writes.
    block_copies: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, batch: Batch, block_size: int) -> ModelInputs:
        input_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        query_start, wanted_rows, context_lens = [0], list[int](), []
        for item in batch.scheduled:
            sequence = item.sequence
            start = sequence.num_computed_tokens
            certain = start + item.num_new_tokens
            end = certain + len(item.drafts)
            if item.scored:  # position p has row len(input_ids) - start + p
                first = len(input_ids) - start - 1
                wanted_rows += range(first + item.scored.start, first + item.scored.stop)
            input_ids += sequence.token_ids[start:certain]
            if item.is_sampled:
                wanted_rows += range(len(input_ids) - 1, len(input_ids) + len(item.drafts))
            input_ids += item.drafts
            positions += range(start, end)
            table = sequence.block_table
            slots += [table[p // block_size] * block_size + p % block_size for p in range(start, end)]
            query_start.append(len(input_ids))
            context_lens.append(end)
        tables = [item.sequence.block_table for item in batch.scheduled]
        width = max(map(len, tables))
        padded = [table + [0] * (width - len(table)) for table in tables]
        layout = BatchLayout(
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            block_tables=torch.tensor(padded, dtype=torch.int32),
            query_start=torch.tensor(query_start, dtype=torch.int32),
            context_lens=torch.tensor(context_lens, dtype=torch.int32),
            rope_lengths=_rope_lengths(batch),
        )
        rows = torch.tensor(wanted_rows, dtype=torch.int64)
        return cls(torch.tensor(input_ids), rows, layout, batch.block_copies)


def _rope_lengths(batch: Batch) -> Tensor | None:
    """rope_lengths as BatchLayout describes them. None if all are 0, as they are for most models."""
    lengths = [item.sequence.rope_length for item in batch.scheduled]
    if not any(lengths):
        return None
    counts = torch.tensor([item.num_new_tokens + len(item.drafts) for item in batch.scheduled])
    return torch.tensor(lengths).repeat_interleave(counts)
