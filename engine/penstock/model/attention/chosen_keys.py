"""Attention of each token to keys of its own choice, where models attend to a part of their context: the best
keys by scores, and attention to these alone. Each token is computed by its own numbers, so that company and
chunks change no bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels import AttentionSpec, BatchLayout, Kernels, LayerKV

#: Numbers of the largest tensors that are made at once, but for a row of scores, which is as long as the
#: context.
MOST_NUMBERS = 1 << 22
#: Keys that are scored at once.
PIECE = 4096


class Chosen(NamedTuple):
    """The keys of tokens of one sequence."""

    seq: int
    #: The first of the step's rows that has a choice, and the end of the sequence's rows.
    first: int
    end: int
    #: int64 [end - first, num_chosen]: positions, ascending.
    positions: Tensor


def write_part(
    batch: BatchLayout, kv: LayerKV, number: int, rows: Tensor, is_written: Tensor | None = None
) -> None:
    """Write a step's rows [num_tokens, width] into a part [num_blocks, width, block_size] of the layer's
    cache, as BatchLayout.write_kv() writes keys: all of them, or those of `is_written`, bool [num_tokens].
    What float16 can't hold becomes its largest number."""
    part = kv.parts[number]
    most, size = torch.finfo(part.dtype).max, part.shape[-1]
    rows = rows.clamp(-most, most).to(part.dtype)
    places = [(torch.arange(len(rows), device=rows.device), batch.slot_mapping)]
    if batch.copied_rows is not None and batch.copied_slots is not None:
        places.append((batch.copied_rows, batch.copied_slots))
    for own, slots in places:
        if is_written is not None:
            kept = is_written[own]
            own, slots = own[kept], slots[kept]
        part[slots // size, :, slots % size] = rows[own]


def read_rows(part: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """The rows of a sequence's positions (int64 of any shape) in a part [num_blocks, width, block_size]:
    [*shape, width]. `table`: the sequence's blocks."""
    size = part.shape[-1]
    return part[table[positions // size].long(), :, positions % size]


def best(scores: Tensor, num_seen: Tensor, most: int) -> Tensor:
    """The places of the `most` highest scores [num_rows, width] of each row, among the row's first num_seen
    (int64 [num_rows], at least `most` each): int64 [num_rows, most], ascending. Of equal scores the earlier
    place wins."""
    beyond = torch.arange(scores.shape[1], device=scores.device) >= num_seen[:, None]
    scores = scores.masked_fill(beyond, -torch.inf)
    least = scores.topk(most, dim=1).values[:, -1:]
    above, equal = scores > least, (scores == least) & ~beyond
    missing = most - above.sum(1, keepdim=True)
    taken = above | (equal & (equal.cumsum(1) <= missing))
    return taken.nonzero()[:, 1].view(-1, most)


def attend_to(
    kernels: Kernels,
    q: Tensor,
    kv: LayerKV,
    batch: BatchLayout,
    chosen: Sequence[Chosen],
    spec: AttentionSpec,
    dense: Sequence[int],
) -> Tensor:
    """Attention of q [num_tokens, num_heads, head_dim] to latents: [num_tokens, num_heads * latent_dim]. The
    tokens of `chosen` attend to their choice, and those before `dense` to all keys that they see: of each
    sequence, the step's first row that has a choice, or the end of its rows."""
    y = q.new_empty(len(q), q.shape[1] * spec.latent_dim)
    starts = batch.query_start.tolist()
    if list(dense) != starts[:-1]:
        rows, layout = _before(batch, starts, dense)
        y[rows] = kernels.paged_attention(q[rows], kv, layout, spec)
    for each in chosen:
        table = batch.block_tables[each.seq]
        for first, positions in in_slices(each.positions, kv.parts[0].shape[2] * each.positions.shape[1]):
            own = slice(each.first + first, each.first + first + len(positions))
            keys = read_rows(kv.parts[0][:, 0], table, positions)
            y[own] = attend_rows(kernels, q[own], keys, kv, spec)
    return y


def attend_rows(
    kernels: Kernels,
    q: Tensor,
    keys: Tensor,
    kv: LayerKV,
    spec: AttentionSpec,
    counts: Tensor | None = None,
) -> Tensor:
    """Each token's attention to keys of its own: q [num_tokens, num_heads, head_dim] to keys [num_tokens,
    num_keys, head_dim], of the type of the cache. counts: how many of the keys a token has, the first ones;
    None: all."""
    num_tokens, num_keys, width = keys.shape
    if counts is None:
        counts = torch.full((num_tokens,), num_keys, device=q.device)
    size = kv.parts[0].shape[-1]
    blocks = -(-num_keys // size)
    own = keys.new_zeros(num_tokens, blocks * size, width)
    own[:, :num_keys] = keys
    own = own.view(num_tokens * blocks, 1, size, width).transpose(2, 3).contiguous()
    numbers = torch.arange(num_tokens * blocks, dtype=torch.int32, device=q.device)
    layout = BatchLayout(
        positions=numbers[:num_tokens].long(),
        slot_mapping=numbers[:num_tokens].long(),
        block_tables=numbers.view(num_tokens, blocks),
        query_start=torch.arange(num_tokens + 1, dtype=torch.int32, device=q.device),
        context_lens=counts.to(torch.int32),
    )
    cache = LayerKV(kv.layout, (own, *kv.parts[1:]))
    return kernels.paged_attention(q.contiguous(), cache, layout, replace(spec, window=0, chunk=0))


def in_slices(rows: Tensor, row_size: int) -> Iterator[tuple[int, Tensor]]:
    """The rows, so many at a time that they have at most MOST_NUMBERS numbers of `row_size` each, or one row;
    each with the number of its first one."""
    step = max(1, MOST_NUMBERS // row_size)
    for first in range(0, len(rows), step):
        yield first, rows[first : first + step]


def _before(batch: BatchLayout, starts: Sequence[int], dense: Sequence[int]) -> tuple[Tensor, BatchLayout]:
    """The rows before `dense` of each sequence, and their layout."""
    device, lengths = batch.positions.device, batch.context_lens.tolist()
    spans = [(seq, first, end) for seq, (first, end) in enumerate(zip(starts, dense, strict=False))]
    spans = [span for span in spans if span[1] < span[2]]
    rows = torch.cat([torch.arange(first, end) for _, first, end in spans]).to(device)
    counts = torch.tensor([0, *(end - first for _, first, end in spans)])
    numbers = torch.tensor([seq for seq, _, _ in spans]).to(device)
    context = torch.tensor([lengths[seq] - starts[seq + 1] + end for seq, _, end in spans], dtype=torch.int32)
    layout = BatchLayout(
        positions=batch.positions[rows],
        slot_mapping=batch.slot_mapping[rows],
        block_tables=batch.block_tables[numbers],
        query_start=counts.cumsum(0).to(torch.int32).to(device),
        context_lens=context.to(device),
    )
    return rows, layout
